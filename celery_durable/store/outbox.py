"""The outbox: messages to send after the transaction that wrote them has committed.

A task's row is deleted when the broker has its message. An event's row is deleted when its handler has returned. So the
table holds only unsent messages and undelivered events. ``run_at`` is when an event may be delivered next. ``poll_at``
is when a sweep processes the row. It is NULL for an event whose attempts are used up; such an event is kept for an
operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import OutboxKind, OutboxMessage, RunRef, Scope, duration_us, from_us
from celery_durable.redispatch import Redispatch
from celery_durable.store import scopes
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.store.step_rows import from_us_or_none

_CHUNK = 500
_EXTRA_GRACE_PER_HUNDRED = timedelta(seconds=1)


@statement
def _insert(s: Store) -> Any:
    values = {
        "id": param("id"),
        "kind": param("kind"),
        "name": param("name"),
        "body": param("body"),
        "instance_pk": param("pk"),
        "run_number": param("run"),
        "step_key": param("key"),
        "attempts": 0,
        "run_at": s.clock(),
        "poll_at": s.clock() + param("grace_us", sa.BigInteger),
        "created_at": s.clock(),
    }
    return sa.insert(s.tables.outbox).values(values).inline()


def insert(
    tx: Tx, messages: Sequence[OutboxMessage], *, pk: int, run_number: int, step_key: str | None, grace: timedelta
) -> None:
    """Store messages to be sent after ``tx`` commits. ``pk``, ``run_number`` and ``step_key`` name their sender.

    The caller sends them after its commit (`tasks.outbox.Outbox.post`). If the caller dies before it sends them, a
    sweep sends them after ``grace``. With hundreds of messages the grace is longer, because sending them takes longer.
    """
    grace += len(messages) // 100 * _EXTRA_GRACE_PER_HUNDRED
    source = {"pk": pk, "run": run_number, "key": step_key, "grace_us": duration_us(grace)}
    rows = [{"id": each.id, "kind": each.kind.value, "name": each.name, "body": each.body} for each in messages]
    tx.run_many(_insert, [source | row for row in rows])


# --- send ---------------------------------------------------------------------------------------


@statement
def _select_due(s: Store) -> Any:
    o = s.tables.outbox.c
    return (
        sa.select(o.id, o.kind, o.name, o.body, o.created_at, s.statement_clock().label("now_us"))
        .where(o.poll_at <= s.statement_clock())
        .order_by(o.poll_at)
        .limit(param("limit", sa.Integer))
        .with_for_update(skip_locked=True)
    )


@statement
def _reschedule(s: Store) -> Any:
    o = s.tables.outbox
    return sa.update(o).where(o.c.id == param("id")).values(poll_at=param("poll_us"))


def lock_due(tx: Tx, *, limit: int, redispatch: Redispatch) -> list[OutboxMessage]:
    """Return due messages and postpone their rows. Any number of sweeps may call this at once.

    Each row is postponed by its age, within the limits of ``redispatch``. So the pause doubles with every try. The row
    is deleted after the message is sent. If the sweep dies before that, the message is only late.
    """
    rows = tx.run(_select_due, limit=limit).all()
    moves = []
    for row in rows:
        age = timedelta(microseconds=row.now_us - row.created_at)
        pause = min(max(age, redispatch.first), redispatch.longest)
        moves.append({"id": row.id, "poll_us": row.now_us + duration_us(pause)})
    tx.run_many(_reschedule, moves)
    return [OutboxMessage(row.id, OutboxKind(row.kind), row.name, row.body) for row in rows]


def postpone(tx: Tx, messages: Sequence[OutboxMessage], *, delay: timedelta) -> None:
    """Postpone these messages by ``delay``: the broker has accepted none of them."""
    o = tx.t.outbox
    wanted = (o.c.id.in_([each.id for each in messages]), o.c.poll_at.is_not(None))
    tx.execute(sa.update(o).where(*wanted).values(poll_at=tx.store.clock() + duration_us(delay)))


def delete_unsent(tx: Tx, ids: Sequence[str]) -> None:
    """Delete these messages if they have not been sent yet."""
    for start in range(0, len(ids), _CHUNK):
        delete(tx, ids[start : start + _CHUNK])


def delete(tx: Tx, ids: Sequence[str]) -> None:
    """Delete these messages: they were sent, or an operator drops them."""
    o = tx.t.outbox
    tx.execute(sa.delete(o).where(o.c.id.in_(ids)))


# --- deliver ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery of an outbound event by one worker. It is valid as long as the event's row contains ``token``."""

    id: str
    token: str
    name: str
    payload: str
    workflow: str
    instance_id: str
    run_number: int
    attempt: int


def begin_delivery(tx: Tx, id_: str, *, token: str, lease: timedelta) -> Delivery | None:
    """Start the delivery of a due event. Returns None if it is delivered, being delivered, or not yet due.

    The attempt counts at once, even if the worker dies. The event is due again when the ``lease`` ends.
    """
    o, now = tx.t.outbox, tx.store.clock()
    until = now + duration_us(lease)
    taken = tx.execute(
        sa.update(o)
        .where(o.c.id == id_, o.c.kind == OutboxKind.EVENT.value, o.c.run_at <= now)
        .values(token=token, attempts=o.c.attempts + 1, run_at=until, poll_at=until)
    )
    return find_delivery(tx, id_, token=token) if taken.rowcount else None


def find_delivery(tx: Tx, id_: str, *, token: str) -> Delivery | None:
    """Return the delivery that this token started, or None."""
    o, i = tx.t.outbox, tx.t.instance
    query = (
        sa.select(o.c.name, o.c.body, o.c.run_number, o.c.attempts, i.c.workflow, i.c.instance_id)
        .select_from(o.outerjoin(i, i.c.id == o.c.instance_pk))
        .where(o.c.id == id_, o.c.token == token)
    )
    row = tx.execute(query).first()
    if row is None:
        return None
    return Delivery(
        id=id_,
        token=token,
        name=row.name,
        payload=row.body,
        workflow=row.workflow or "",
        instance_id=row.instance_id or "",
        run_number=row.run_number,
        attempt=row.attempts,
    )


def finish_delivery(tx: Tx, delivery: Delivery) -> None:
    """Delete the event after its handler has returned, unless another worker has taken it over."""
    o = tx.t.outbox
    tx.execute(sa.delete(o).where(o.c.id == delivery.id, o.c.token == delivery.token))


def release_delivery(
    tx: Tx, delivery: Delivery, *, retry_in: timedelta | None, error: str | None, counts: bool = True
) -> None:
    """Schedule the next delivery after ``retry_in``. None means never: the event is kept for an operator.

    ``counts=False`` means that the delivery does not count as an attempt.
    """
    o = tx.t.outbox
    at = None if retry_in is None else tx.store.clock() + duration_us(retry_in)
    values: dict[str, Any] = {"token": None, "run_at": at, "poll_at": at}
    if error is not None:
        values["error"] = error
    if not counts:
        values["attempts"] = o.c.attempts - 1
    tx.execute(sa.update(o).where(o.c.id == delivery.id, o.c.token == delivery.token).values(values))


# --- read, retry and delete ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A row of the outbox, for display. ``ref`` is the run that sent it, or None if its instance is deleted.

    ``next_at`` is when it is sent or delivered next, or None if it was given up.
    """

    id: str
    kind: OutboxKind
    name: str
    ref: RunRef | None
    attempts: int
    since: datetime
    next_at: datetime | None
    error: str | None

    @property
    def is_given_up(self) -> bool:
        """Whether the event has no attempts left and waits for an operator."""
        return self.next_at is None


def read_entries(tx: Tx, *, given_up: bool, limit: int, scope: Scope | None = None) -> list[OutboxEntry]:
    """Return the entries of the outbox, oldest first. ``given_up`` selects those that were given up."""
    o = tx.t.outbox.c
    return _read_entries(tx, *([o.poll_at.is_(None)] if given_up else []), limit=limit, scope=scope)


def count_given_up(tx: Tx) -> int:
    """Count the events that were given up. An index answers this."""
    return int(tx.execute(sa.select(sa.func.count()).where(tx.t.outbox.c.poll_at.is_(None))).scalar_one())


def find_existing(tx: Tx, ids: Sequence[str]) -> frozenset[str]:
    """Return which of these ids are still in the outbox."""
    o = tx.t.outbox.c
    return frozenset(tx.execute(sa.select(o.id).where(o.id.in_(ids))).scalars()) if ids else frozenset()


def count_by_step(tx: Tx, pk: int, run_number: int, step_keys: Sequence[str]) -> dict[str, int]:
    """Count the unsent messages of each of these steps."""
    if not step_keys:
        return {}
    o = tx.t.outbox.c
    mine = (o.instance_pk == pk, o.run_number == run_number, o.step_key.in_(step_keys))
    query = sa.select(o.step_key, sa.func.count().label("n")).where(*mine).group_by(o.step_key)
    return {row.step_key: row.n for row in tx.execute(query)}


def lock_entries(tx: Tx, ids: Sequence[str], *, scope: Scope | None = None) -> list[OutboxEntry]:
    """Lock and return the entries of these ids that exist. The locks wait until a commit in doubt is decided."""
    o = tx.t.outbox.c
    # In the order of their ids, so that two callers with common ids do not deadlock.
    tx.execute(sa.select(o.id).where(o.id.in_(ids)).order_by(o.id).with_for_update()).all()
    return _read_entries(tx, o.id.in_(ids), scope=scope)


def retry_events(tx: Tx, ids: Sequence[str]) -> None:
    """Make these events due now, with fresh attempts. The next sweep delivers them."""
    o, now = tx.t.outbox, tx.store.clock()
    fresh: dict[str, Any] = {"attempts": 0, "token": None, "run_at": now, "poll_at": now}
    tx.execute(sa.update(o).where(o.c.id.in_(ids)).values(fresh))


def _read_entries(
    tx: Tx, *where: sa.ColumnElement[bool], limit: int | None = None, scope: Scope | None = None
) -> list[OutboxEntry]:
    o, i = tx.t.outbox, tx.t.instance
    columns = (o.c.id, o.c.kind, o.c.name, o.c.attempts, o.c.created_at, o.c.poll_at, o.c.error, o.c.run_number)
    query = (
        sa.select(*columns, i.c.workflow, i.c.instance_id)
        .select_from(o.outerjoin(i, i.c.id == o.c.instance_pk))
        .where(*where, *scopes.conditions(tx.t, scope))
        .order_by(o.c.created_at, o.c.id)
        .limit(limit)
    )
    return [
        OutboxEntry(
            id=row.id,
            kind=OutboxKind(row.kind),
            name=row.name,
            ref=None if row.workflow is None else RunRef(row.workflow, row.instance_id, row.run_number),
            attempts=row.attempts,
            since=from_us(row.created_at),
            next_at=from_us_or_none(row.poll_at),
            error=row.error,
        )
        for row in tx.execute(query)
    ]
