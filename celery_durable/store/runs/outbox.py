"""The outbox: messages to send after the transaction that wrote them has committed.

A task's row is deleted when the broker has its message, an event's row when its handler has returned. ``run_at`` is
when an event may be delivered next. ``next_check_at`` is when a sweep processes the row. It is NULL for an event whose
attempts are used up, and for a task that can never be sent: these are kept for an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import OutboxKind, OutboxMessage, RunRef, duration_us, from_us, from_us_or_none
from celery_durable.redispatch import Redispatch
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.schema import dialects

_CHUNK = 500
PART_SIZE = 200
"""How many messages a process sends at once. A process that dies meanwhile has sent at most these twice."""
PART_GRACE = timedelta(milliseconds=50)
"""How much longer a sweep leaves each further part of a transaction's messages to the process that sends them."""


@statement
def _insert(s: Store) -> Any:
    given = {name: param(name) for name in ("id", "kind", "name", "payload")}
    values = _sender_values(s) | given | {"next_check_at": s.clock() + param("grace_us", sa.BigInteger)}
    return sa.insert(s.tables.outbox).values(values).inline()


@statement
def _insert_many(s: Store) -> Any:
    columns: dict[str, sa.types.TypeEngine[Any]] = {name: sa.String() for name in ("id", "kind", "name")}
    columns |= {"payload": sa.Text(), "grace_us": sa.BigInteger()}
    new = dialects.build_rows(s.database, param("rows", sa.Text), columns)
    given = {name: new.c[name] for name in ("id", "kind", "name", "payload")}
    values = _sender_values(s) | given | {"next_check_at": s.clock() + new.c.grace_us}
    return sa.insert(s.tables.outbox).from_select(list(values), sa.select(*values.values()))


def _sender_values(s: Store) -> dict[str, Any]:
    return {
        "instance_pk": param("pk", sa.BigInteger),
        "run_number": param("run", sa.Integer),
        "step_key": param("key", sa.String),
        "attempts": sa.literal_column("0"),
        "run_at": s.clock(),
        "created_at": s.clock(),
    }


def insert(
    tx: Tx, messages: Sequence[OutboxMessage], *, pk: int, run_number: int, step_key: str | None, grace: timedelta
) -> None:
    """Store messages to be sent after ``tx`` commits. ``pk``, ``run_number`` and ``step_key`` name their sender.

    The caller sends them after its commit (`tasks.outbox.Outbox.send_committed`). A sweep sends what is lost on the
    way: the first part after ``grace``, and each further part `PART_GRACE` later. A late sender calls `keep`.
    """
    source = {"pk": pk, "run": run_number, "key": step_key}
    rows = [
        {
            "id": each.id,
            "kind": each.kind.value,
            "name": each.name,
            "payload": each.body,
            "grace_us": duration_us(grace + position // PART_SIZE * PART_GRACE),
        }
        for position, each in enumerate(messages)
    ]
    if len(rows) == 1:
        tx.run(_insert, **source, **rows[0])
        return
    for part in dialects.encode_rows_in_parts(rows):
        tx.run(_insert_many, **source, rows=part)


def keep(tx: Tx, messages: Sequence[OutboxMessage], *, grace: timedelta) -> list[OutboxMessage]:
    """Leave these messages to their sender for another ``grace``. Returns those that no sweep has taken."""
    o = tx.t.outbox
    untaken = (o.c.id.in_([each.id for each in messages]), o.c.attempts == 0)
    kept = frozenset(tx.execute(sa.select(o.c.id).where(*untaken).order_by(o.c.id).with_for_update()).scalars())
    tx.execute(sa.update(o).where(o.c.id.in_(kept)).values(next_check_at=tx.store.clock() + duration_us(grace)))
    return [each for each in messages if each.id in kept]


# --- send ---------------------------------------------------------------------------------------


@statement
def _select_due(s: Store) -> Any:
    o = s.tables.outbox.c
    return (
        sa.select(o.id, o.kind, o.name, o.payload, o.created_at, s.statement_clock().label("now_us"))
        .where(o.next_check_at <= s.statement_clock())
        .order_by(o.next_check_at)
        .limit(param("limit", sa.Integer))
        .with_for_update(skip_locked=True)
    )


@statement
def _reschedule(s: Store) -> Any:
    o = s.tables.outbox
    # Of a task, the sweep's attempts to send it. Of an event, those to deliver it, which `begin_delivery` counts.
    is_task = o.c.kind == constant(OutboxKind.TASK)
    attempts = sa.case((is_task, o.c.attempts + 1), else_=o.c.attempts)
    return sa.update(o).where(o.c.id == param("id")).values(next_check_at=param("next_check_us"), attempts=attempts)


def lock_due(tx: Tx, *, limit: int, redispatch: Redispatch) -> list[OutboxMessage]:
    """Return messages to send, or to send again. Each is postponed before, so a sweep that dies has only delayed it."""
    rows = tx.run(_select_due, limit=limit)
    moves = []
    for row in rows:
        pause = redispatch.outbox_pause(timedelta(microseconds=row.now_us - row.created_at))
        moves.append({"id": row.id, "next_check_us": row.now_us + duration_us(pause)})
    tx.run_many(_reschedule, moves)
    return [OutboxMessage(row.id, OutboxKind(row.kind), row.name, row.payload) for row in rows]


def postpone(tx: Tx, messages: Sequence[OutboxMessage], *, delay: timedelta) -> None:
    """Let the sweep offer these messages again after ``delay``: the broker took none of them."""
    o = tx.t.outbox
    wanted = (o.c.id.in_([each.id for each in messages]), o.c.next_check_at.is_not(None))
    tx.execute(sa.update(o).where(*wanted).values(next_check_at=tx.store.clock() + duration_us(delay)))


def give_up(tx: Tx, id_: str, *, error: str) -> None:
    """Keep a task that can never be sent for an operator."""
    o = tx.t.outbox
    tx.execute(sa.update(o).where(o.c.id == id_).values(next_check_at=None, last_error=error))


@statement
def _delete(s: Store) -> Any:
    return sa.delete(s.tables.outbox).where(s.tables.outbox.c.id == param("id", sa.String))


def delete(tx: Tx, ids: Sequence[str]) -> None:
    """Delete these messages if they are still in the outbox."""
    if len(ids) == 1:
        tx.run(_delete, id=ids[0])
        return
    o = tx.t.outbox
    for start in range(0, len(ids), _CHUNK):
        tx.execute(sa.delete(o).where(o.c.id.in_(ids[start : start + _CHUNK])))


# --- deliver ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """An outbound event that one worker delivers. The worker holds it as long as the row names ``token``."""

    id: str
    token: str
    name: str
    payload: str
    workflow: str
    instance_id: str
    run_number: int
    attempt: int


def find_due_events(tx: Tx, name: str) -> list[str]:
    """Return the ids of due events of this name, oldest first."""
    o = tx.t.outbox.c
    due = (o.next_check_at <= tx.store.statement_clock(), o.kind == OutboxKind.EVENT.value, o.name == name)
    return list(tx.execute(sa.select(o.id).where(*due).order_by(o.next_check_at).limit(_CHUNK)).scalars())


@statement
def _begin_delivery(s: Store) -> Any:
    o, now = s.tables.outbox, s.clock()
    until = now + param("lease_us", sa.BigInteger)
    return (
        sa.update(o)
        .where(
            o.c.id == param("id", sa.String),
            o.c.kind == constant(OutboxKind.EVENT),
            o.c.run_at <= now,
        )
        .values(claim_token=param("token", sa.String), attempts=o.c.attempts + 1, run_at=until, next_check_at=until)
    )


def begin_delivery(tx: Tx, id_: str, *, token: str, lease: timedelta) -> Delivery | None:
    """Start the delivery of a due event. If the worker dies, the event is due again when the ``lease`` ends."""
    taken = tx.run(_begin_delivery, id=id_, token=token, lease_us=duration_us(lease))
    return find_delivery(tx, id_, token=token) if taken.rowcount else None


@statement
def _find_delivery(s: Store) -> Any:
    o, i = s.tables.outbox, s.tables.instance
    return (
        sa.select(o.c.name, o.c.payload, o.c.run_number, o.c.attempts, i.c.workflow, i.c.instance_id)
        .select_from(o.outerjoin(i, i.c.id == o.c.instance_pk))
        .where(o.c.id == param("id", sa.String), o.c.claim_token == param("token", sa.String))
    )


def find_delivery(tx: Tx, id_: str, *, token: str) -> Delivery | None:
    """Return the delivery that this token started, or None."""
    row = tx.run(_find_delivery, id=id_, token=token).first()
    if row is None:
        return None
    return Delivery(
        id=id_,
        token=token,
        name=row.name,
        payload=row.payload,
        workflow=row.workflow or "",
        instance_id=row.instance_id or "",
        run_number=row.run_number,
        attempt=row.attempts,
    )


def finish_delivery(tx: Tx, delivery: Delivery) -> None:
    """Delete the event after its handler has returned, unless another worker has taken it over."""
    o = tx.t.outbox
    tx.execute(sa.delete(o).where(o.c.id == delivery.id, o.c.claim_token == delivery.token))


def release_delivery(
    tx: Tx, delivery: Delivery, *, retry_in: timedelta | None, error: str | None, counts_as_attempt: bool = True
) -> None:
    """Schedule the next delivery, or none. ``counts_as_attempt=False`` takes back the counted attempt."""
    o = tx.t.outbox
    at = None if retry_in is None else tx.store.clock() + duration_us(retry_in)
    values: dict[str, Any] = {"claim_token": None, "run_at": at, "next_check_at": at}
    if error is not None:
        values["last_error"] = error
    if not counts_as_attempt:
        values["attempts"] = o.c.attempts - 1
    tx.execute(sa.update(o).where(o.c.id == delivery.id, o.c.claim_token == delivery.token).values(values))


# --- read, retry and delete ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A row of the outbox. ``ref``: its sender, unless deleted. ``next_at``: None if it was given up."""

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
        """Whether nothing sends or delivers it any more, so that it waits for an operator."""
        return self.next_at is None


def read_entries(tx: Tx, *, given_up: bool, limit: int) -> list[OutboxEntry]:
    """Return the given up or the other entries of the outbox, oldest first; at most 10,000 are examined."""
    o = tx.t.outbox
    next_ = dialects.force_index(sa.select(o), o, "outbox_due").order_by(o.c.next_check_at).limit(bounds.MAX_EXAMINED)
    examined = (next_.where(o.c.next_check_at.is_(None)) if given_up else next_).subquery()
    oldest = sa.select(examined).order_by(examined.c.created_at, examined.c.id).limit(limit)
    return _read_entries(tx, oldest.subquery())


def count_given_up(tx: Tx) -> int:
    """Count the messages that were given up. The count ends at 10,000."""
    few = sa.select(tx.t.outbox.c.id).where(tx.t.outbox.c.next_check_at.is_(None)).limit(bounds.MAX_EXAMINED).subquery()
    return int(tx.execute(sa.select(sa.func.count()).select_from(few)).scalar_one())


def find_existing(tx: Tx, ids: Sequence[str]) -> frozenset[str]:
    """Return which of these ids are still in the outbox."""
    o = tx.t.outbox.c
    return frozenset(tx.execute(sa.select(o.id).where(o.id.in_(ids))).scalars()) if ids else frozenset()


def lock_entries(tx: Tx, ids: Sequence[str]) -> list[OutboxEntry]:
    """Lock and return the entries of these ids that exist; if a commit of the caller is in doubt, this waits for it."""
    o = tx.t.outbox.c
    # In the order of their ids, so that two callers with common ids do not deadlock.
    tx.execute(sa.select(o.id).where(o.id.in_(ids)).order_by(o.id).with_for_update()).all()
    return _read_entries(tx, sa.select(tx.t.outbox).where(o.id.in_(ids)).subquery())


def retry(tx: Tx, ids: Sequence[str]) -> None:
    """Make these messages due now, with fresh attempts, for the next sweep."""
    o, now = tx.t.outbox, tx.store.clock()
    fresh: dict[str, Any] = {"attempts": 0, "claim_token": None, "run_at": now, "next_check_at": now}
    tx.execute(sa.update(o).where(o.c.id.in_(ids)).values(fresh))


def _read_entries(tx: Tx, o: sa.Subquery) -> list[OutboxEntry]:
    i = tx.t.instance
    columns = (
        o.c.id,
        o.c.kind,
        o.c.name,
        o.c.attempts,
        o.c.created_at,
        o.c.next_check_at,
        o.c.last_error,
        o.c.run_number,
    )
    query = (
        sa.select(*columns, i.c.workflow, i.c.instance_id)
        .select_from(o.outerjoin(i, i.c.id == o.c.instance_pk))
        .order_by(o.c.created_at, o.c.id)
    )
    return [
        OutboxEntry(
            id=row.id,
            kind=OutboxKind(row.kind),
            name=row.name,
            ref=None if row.workflow is None else RunRef(row.workflow, row.instance_id, row.run_number),
            attempts=row.attempts,
            since=from_us(row.created_at),
            next_at=from_us_or_none(row.next_check_at),
            error=row.last_error,
        )
        for row in tx.execute(query)
    ]
