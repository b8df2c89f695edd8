"""An event that is sent on its own, in one statement.

Whether the run waits for the event must be known at the time of the lock (LAW 2b). The statement looks before it locks,
and then compares the version, which each change of the status, the claim or the run increments, and each wait that
begins. If it is another one, nothing is written, and the caller sends the event in a transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import TERMINAL, DueRun, RunRef, Status, WakeReason, duration_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.events.run_events import EVENT_KEY, InsertedEvent, build_open_wait, event_values
from celery_durable.store.instances.lifecycle import due_values
from celery_durable.store.schema.dialects import insert_rows_or_nothing


@dataclass(frozen=True, slots=True)
class SentEvent:
    """An event as inserted, and the run that is due because it waited for the event."""

    inserted: InsertedEvent
    due_run: DueRun | None


@statement
def _insert_and_wake(s: Store) -> Any:
    i, e = s.tables.instance, s.tables.event
    is_suspended = sa.and_(i.c.status == Status.WAITING.value, i.c.claim_token.is_(None))
    waits = sa.and_(is_suspended, build_open_wait(s, i.c.id, i.c.run_number).exists())
    checks_payload = build_open_wait(s, i.c.id, i.c.run_number).where(s.tables.step.c.payload_type.is_not(None))
    seen = (
        sa.select(i.c.id, i.c.run_number, i.c.version, i.c.queue, waits.label("waits"))
        .where(
            i.c.workflow == param("workflow", sa.String),
            i.c.instance_id == param("instance", sa.String),
            i.c.status.not_in([constant(status) for status in sorted(TERMINAL)]),
            ~checks_payload.exists(),
        )
        .cte("seen")
        .prefix_with("MATERIALIZED")  # `waits` is used several times
    )
    locked = (
        sa.select(i.c.id, seen.c.run_number, seen.c.queue, seen.c.waits)
        .where(i.c.id == seen.c.id, i.c.version == seen.c.version)
        .with_for_update(key_share=True, of=i)
        .cte("locked")
    )
    # Not in the SELECT that locks: it computes its columns before it waits for the lock (LAW 4).
    held = sa.select(locked, s.clock().label("now_us")).cte("held")
    due = due_values(held.c.now_us, wake_reason=WakeReason.EVENT.value, grace_us=param("grace_us", sa.BigInteger))
    due["updated_at"] = held.c.now_us
    changed = (
        sa.update(i)
        .where(i.c.id == held.c.id)
        .values(
            version=i.c.version + 1,
            **{name: sa.case((held.c.waits, value), else_=i.c[name]) for name, value in due.items()},
        )
        .returning(i.c.id, i.c.version, held.c.run_number, held.c.queue, held.c.waits, held.c.now_us)
        .cte("changed")
    )
    values = event_values(changed.c.id, changed.c.run_number, changed.c.version, created_at=changed.c.now_us)
    # The id is taken if an earlier try, whose connection was lost, has ended in between.
    inserted = insert_rows_or_nothing(s.database, e, values, changed, EVENT_KEY)
    inserted = inserted.returning(e.c.seq, e.c.created_at).cte("inserted")
    found = (changed.c.run_number, inserted.c.seq, inserted.c.created_at, changed.c.queue, changed.c.waits)
    return sa.select(*found).select_from(changed.join(inserted, sa.true()))


def send(
    tx: Tx, workflow: str, instance_id: str, *, type_: str, payload: str, event_id: str, grace: timedelta
) -> SentEvent | None:
    """Store an event for the current run, and make the run due if it waits for the event.

    ``event_id`` belongs to this event alone. Returns None if nothing was stored: there is no such instance, it has
    ended or changed meanwhile, its wait checks the payload, or an earlier try has stored the event.
    """
    event = {"event_id": event_id, "type": type_, "payload": payload}
    found = tx.run(
        _insert_and_wake, workflow=workflow, instance=instance_id, grace_us=duration_us(grace), **event
    ).first()
    if found is None:
        return None
    ref = RunRef(workflow, instance_id, found.run_number)
    due_run = DueRun(ref, found.queue) if found.waits else None
    return SentEvent(InsertedEvent(found.run_number, found.seq, found.created_at), due_run)
