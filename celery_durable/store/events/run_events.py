"""The events of a run: they are stored under the instance's lock, and one wait consumes each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, InstanceRow, StepStatus, StoredEvent, from_us, make_answer_id, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.schema import dialects

# --- send ---------------------------------------------------------------------------------------


@statement
def _bump_version(s: Store) -> Any:
    i = s.tables.instance
    return sa.update(i).where(i.c.id == param("pk")).values(version=i.c.version + 1)


def event_values(pk: Any, run_number: Any, seq: Any, *, created_at: Any) -> dict[str, Any]:
    """Return the values of an event's row. Its id, type and payload are parameters."""
    return {
        "instance_pk": pk,
        "run_number": run_number,
        "seq": seq,
        "event_id": param("event_id", sa.String),
        "type": param("type", sa.String),
        "payload": param("payload", sa.Text),
        "created_at": created_at,
    }


def _build_event(s: Store, seq: Any) -> dict[str, Any]:
    values = event_values(param("pk", sa.BigInteger), param("run", sa.Integer), seq, created_at=s.clock())
    return values | {"actor": param("actor", sa.String)}


EVENT_KEY = ("instance_pk", "run_number", "event_id")


@statement
def _bump_version_and_insert_event(s: Store) -> Any:
    """Do both in one statement."""
    i, e = s.tables.instance, s.tables.event
    bumped = _bump_version.build(s).returning(i.c.version).cte("bumped")
    values = _build_event(s, bumped.c.version)
    return dialects.insert_rows_or_nothing(s.database, e, values, bumped, EVENT_KEY).returning(e.c.seq, e.c.created_at)


@statement
def _insert_event(s: Store) -> Any:
    i, e = s.tables.instance.c, s.tables.event
    values = _build_event(s, sa.select(i.version).where(i.id == param("pk", sa.BigInteger)).scalar_subquery())
    once = dialects.insert_or_nothing(s.database, e, values, EVENT_KEY)
    return once.returning(e.c.seq, e.c.created_at)


_WAITING = (StepStatus.WAITING.value, StepStatus.LINEAR_WAITING.value)


def build_open_wait(s: Store, pk: Any, run_number: Any) -> sa.Select[tuple[str]]:
    """Build the SELECT of an open wait of a run for the event type that is a parameter."""
    st = s.tables.step.c
    live = (
        st.instance_pk == pk,
        st.run_number == run_number,
        st.status.in_([constant(status) for status in _WAITING]),
        st.wait_event_type == param("type", sa.String),
        st.wake_at > s.clock(),
    )
    return sa.select(st.step_key).where(*live)


@statement
def _find_payload_type(s: Store) -> Any:
    i = s.tables.instance.c
    is_it = (i.workflow == param("workflow", sa.String), i.instance_id == param("instance", sa.String))
    st = s.tables.step.c
    wait = build_open_wait(s, i.id, i.run_number).with_only_columns(st.payload_type).where(*is_it)
    return wait.order_by(st.seq).limit(1)  # the first of several consumes the event


def find_payload_type(tx: Tx, workflow: str, instance_id: str, type_: str) -> str | None:
    """Return the class that the payload of an event has to fit, by the open wait for this type."""
    found: str | None = tx.run(_find_payload_type, workflow=workflow, instance=instance_id, type=type_).scalar()
    return found


@statement
def _find_open_wait(s: Store) -> Any:
    return dialects.bypass_snapshot(s.database, build_open_wait(s, param("pk"), param("run")).limit(1))


@dataclass(frozen=True, slots=True)
class InsertedEvent:
    """An event that `insert_event` inserted. `is_event_committed` tells it from another event with the same id."""

    run_number: int
    seq: int
    created_us: int

    @property
    def created_at(self) -> datetime:
        return from_us(self.created_us)


def insert_event(
    tx: Tx, row: InstanceRow, *, type_: str, payload: str, event_id: str, actor: str | None = None
) -> InsertedEvent | None:
    """Store an event for the current run. Returns None if an event with this id was accepted before.

    ``actor``: the person whose answer it is.

    Events are ordered by the instance's version, as the statement finds or writes it: an earlier SELECT could be
    outdated in a caller's REPEATABLE READ session.
    """
    of_run = {"pk": row.pk, "run": row.run_number}
    event = {**of_run, "event_id": event_id, "type": type_, "payload": payload, "actor": actor}
    inserted = tx.run_combined(_bump_version_and_insert_event, **event)
    if inserted is None:
        tx.run(_bump_version, pk=row.pk)
        inserted = tx.run(_insert_event, **event)
    new = inserted.first()
    return None if new is None else InsertedEvent(row.run_number, new.seq, new.created_at)


@statement
def _find_same_event(s: Store) -> Any:
    e = s.tables.event.c
    is_of_run = (e.instance_pk == param("pk", sa.BigInteger), e.run_number == param("run", sa.Integer))
    return sa.select(e.seq).where(*is_of_run, e.event_id == param("event_id", sa.String)).limit(1)


def has_event(tx: Tx, row: InstanceRow, *, event_id: str) -> bool:
    """Return whether the current run has an event with this id."""
    return bool(tx.run(_find_same_event, pk=row.pk, run=row.run_number, event_id=event_id))


def find_event(tx: Tx, row: InstanceRow, *, event_id: str) -> InsertedEvent | None:
    """Return the event with this id. A later run may have a copy of it, which is not returned."""
    e = tx.t.event.c
    same_event = (e.instance_pk == row.pk, e.event_id == event_id)
    query = sa.select(e.run_number, e.seq, e.created_at).where(*same_event).order_by(e.run_number).limit(1)
    found = tx.execute(query).first()
    return None if found is None else InsertedEvent(found.run_number, found.seq, found.created_at)


def is_event_committed(tx: Tx, row: InstanceRow, sent: InsertedEvent, *, event_id: str) -> bool:
    """Return whether the transaction that inserted this event was committed, after a commit in doubt."""
    e = tx.t.event.c
    same_event = (
        e.run_number == sent.run_number,
        e.seq == sent.seq,
        e.created_at == sent.created_us,
        e.event_id == event_id,
    )
    return tx.execute(sa.select(e.seq).where(e.instance_pk == row.pk, *same_event)).first() is not None


def is_awaited(tx: Tx, row: InstanceRow, type_: str) -> bool:
    """Return whether the suspended run waits for this event type. A wait whose deadline has passed does not count."""
    if not row.is_suspended:
        return False
    return tx.run(_find_open_wait, pk=row.pk, run=row.run_number, type=type_).first() is not None


# --- consume ------------------------------------------------------------------------------------


@statement
def _select_oldest_event(s: Store) -> Any:
    e = s.tables.event.c
    return (
        sa.select(e.seq, e.type, e.payload, e.created_at, e.actor)
        .where(
            e.instance_pk == param("pk"),
            e.run_number == param("run"),
            e.type == param("type"),
            # Another wait's answer has the type of this one, too, if both wait for the same type.
            sa.or_(e.actor.is_(None), e.event_id == param("answer_id")),
            e.delivered_at.is_(None),
            e.created_at <= param("deadline_us"),
        )
        .order_by(e.seq)
        .limit(1)
    )


def find_oldest_event(
    tx: Tx, run: Claim | InstanceRow, type_: str, *, key: str, deadline: datetime
) -> StoredEvent | None:
    """Return the event of a run that its wait with this step key consumes next: the oldest of its type.

    It was accepted by the deadline, however late it is now.
    """
    of_run = {"pk": run.pk, "run": run.ref.run_number, "answer_id": make_answer_id(key)}
    row = tx.run(_select_oldest_event, **of_run, type=type_, deadline_us=to_us(deadline)).first()
    return None if row is None else _to_stored_event(row)


@statement
def _select_event(s: Store) -> Any:
    e = s.tables.event.c
    return sa.select(e.seq, e.type, e.payload, e.created_at, e.actor).where(
        e.instance_pk == param("pk"), e.run_number == param("run"), e.seq == param("seq")
    )


def read_event(tx: Tx, claim: Claim, seq: int) -> StoredEvent:
    """Return one event of the run, consumed or not."""
    row = tx.run(_select_event, pk=claim.pk, run=claim.ref.run_number, seq=seq).one()
    return _to_stored_event(row)


def _to_stored_event(row: Any) -> StoredEvent:
    return StoredEvent(row.seq, row.type, row.payload, from_us(row.created_at), row.actor)


def find_answer(tx: Tx, run: Claim | InstanceRow, *, key: str) -> StoredEvent | None:
    """Return the answer to the wait with this step key that a run has accepted."""
    e = tx.t.event.c
    is_it = (e.instance_pk == run.pk, e.run_number == run.ref.run_number, e.event_id == make_answer_id(key))
    found = tx.execute(sa.select(e.seq, e.type, e.payload, e.created_at, e.actor).where(*is_it)).first()
    return None if found is None else _to_stored_event(found)


@statement
def _consume(s: Store) -> Any:
    e = s.tables.event
    return (
        sa.update(e)
        .where(e.c.instance_pk == param("pk"), e.c.run_number == param("run"), e.c.seq == param("seq"))
        .values(delivered_at=param("now_us"), consumed_by_step_key=param("key"))
    )


def consume(tx: Tx, claim: Claim, guard_result: GuardResult, event: StoredEvent, *, key: str) -> None:
    """Mark an event as consumed by a step. This is permanent."""
    tx.run(_consume, pk=claim.pk, run=claim.ref.run_number, seq=event.seq, now_us=to_us(guard_result.now), key=key)
