"""The items of a map that starts, inserted in few statements: the instance is locked meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_durable.model import ItemStatus, OutboxMessage, TaskSendingStep, are_items_of
from celery_durable.store import items, row_sets
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement

_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "position": sa.Integer(),
    "task": sa.Text(),
    "status": sa.String(),
    "attempts": sa.Integer(),
    "due_at": sa.BigInteger(),
    "attempt_token": sa.String(),
    "sent_at": sa.BigInteger(),
    "queue": sa.String(),
    "priority": sa.Integer(),
}


@statement
def _insert(s: Store) -> Any:
    new = row_sets.build(s.database, param("rows", sa.Text), _COLUMNS)
    common = {
        "instance_pk": param("pk", sa.BigInteger),
        "run_number": param("run", sa.Integer),
        "step_key": param("key", sa.String),
        "on_lost": param("on_lost", sa.String),
        "loss_count": sa.literal_column("0"),
    }
    source = sa.select(*common.values(), *(new.c[name] for name in _COLUMNS))
    return sa.insert(s.tables.item).from_select([*common, *_COLUMNS], source)


def start(tx: Tx, step: TaskSendingStep, bodies: Sequence[str], *, now: datetime) -> list[OutboxMessage]:
    """Insert the items of a map that starts, the first ones as sent. Returns their messages, for the outbox.

    A retried run finds the items that have completed. It keeps them, unless the bodies have changed.
    """
    item = tx.t.item
    mine = (item.c.instance_pk == step.pk, item.c.run_number == step.run_number, item.c.step_key == step.step_key)
    kept = {row.position: row.task for row in tx.execute(sa.select(item.c.position, item.c.task).where(*mine))}
    if not are_items_of(bodies, kept):
        tx.execute(sa.delete(item).where(*mine))
        kept = {}
    new = [position for position in range(len(bodies)) if position not in kept]
    messages, rows = [], []
    for position in new[: step.max_concurrency]:
        body = bodies[position]
        reference, message = items.build_message(tx, step, body, position=position, attempt=1)
        messages.append(message)
        sent = {"status": ItemStatus.SENT.value} | items.attempt_values(body, reference, 1, now=now, step=step)
        rows.append({"position": position, "task": body} | sent)
    pending = {"status": ItemStatus.PENDING.value, "attempts": 0}
    rows += [{"position": position, "task": bodies[position]} | pending for position in new[len(messages) :]]
    for part in row_sets.encode_in_parts(rows):
        tx.run(_insert, rows=part, on_lost=step.on_lost, **items.key_parameters(step))
    return messages
