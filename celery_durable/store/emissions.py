"""Emissions to topics: an emission is a row that exists until its last waiter has the payload.

Each batch is one transaction. It locks the emission's row, then the rows of its instances in ascending key order, and
only then reads which waits are open (LAW 2b). Each open wait gets its own event and stops being a waiter. The
emission's position moves past the batch in the same transaction. If a process dies between batches, another continues
and delivers nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import EmissionMismatch
from celery_durable.model import (
    TERMINAL,
    DueRun,
    RunRef,
    Scope,
    Status,
    StepStatus,
    WakeReason,
    duration_us,
    parse_topic_event_type,
)
from celery_durable.store import dialects, scopes, topic_waits
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.store.instances import RESUMING

BATCH = 256
"""Instances per transaction."""

# If a run has several waits on the topic, each wait gets an event. The ids of the second and later events are the
# emission id, this character, and a number. An emission id cannot contain this character.
_COPY_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class EmissionProgress:
    """The progress of an emission, after a batch.

    ``delivered_count`` is how many waits have their event so far. ``due_runs`` are the runs that this batch made due.
    ``received`` lists the runs that got an event in this batch, each with the topic and the event's id.
    """

    delivered_count: int
    cursor_pk: int
    is_over: bool
    due_runs: tuple[DueRun, ...] = ()
    received: tuple[tuple[RunRef, str, str], ...] = ()


# --- the emission's row -------------------------------------------------------------------------


@statement
def _find_last_waiter(s: Store) -> Any:
    w = s.tables.topic_wait.c
    return sa.select(w.instance_pk).where(w.topic == param("topic")).order_by(w.instance_pk.desc()).limit(1)


@statement
def _insert_emission(s: Store) -> Any:
    values = {
        "id": param("id", sa.String),
        "topic": param("topic", sa.String),
        "payload": param("payload", sa.Text),
        "scope": param("scope", sa.Text),
        "cursor_pk": 0,
        "end_pk": param("last", sa.BigInteger),
        "delivered_count": 0,
        "created_at": s.clock(),
        "next_check_at": s.clock() + param("next_check_us", sa.BigInteger),
    }
    return dialects.insert_or_nothing(s.database, s.tables.emission, values, ("id",))


@statement
def _select_emission(s: Store) -> Any:
    return sa.select(s.tables.emission).where(s.tables.emission.c.id == param("id"))


@statement
def _lock_emission(s: Store) -> Any:
    return sa.select(s.tables.emission).where(s.tables.emission.c.id == param("id")).with_for_update()


@statement
def _advance_cursor(s: Store) -> Any:
    e = s.tables.emission
    moved = {
        "cursor_pk": param("after"),
        "delivered_count": param("delivered"),
        "next_check_at": s.clock() + param("next_check_us"),
    }
    return sa.update(e).where(e.c.id == param("id")).values(moved)


@statement
def _delete_emission(s: Store) -> Any:
    return sa.delete(s.tables.emission).where(s.tables.emission.c.id == param("id"))


def begin(tx: Tx, *, emission_id: str, topic: str, payload: str, lease: timedelta, scope: Scope | None = None) -> bool:
    """Store an emission for the waits that are open now. Returns False if there are none, and writes nothing.

    If an emission with this id is under way, it continues. Raises EmissionMismatch if its topic or payload differs.
    If no process advances it for ``lease``, the sweep does.
    """
    last = tx.run(_find_last_waiter, topic=topic).scalar()
    if last is not None:
        text = None if scope is None else scope.to_text()
        tx.run(
            _insert_emission,
            id=emission_id,
            topic=topic,
            payload=payload,
            scope=text,
            last=last,
            next_check_us=duration_us(lease),
        )
    found = tx.run(_select_emission, id=emission_id).first()
    if found is None:
        return False
    if (found.topic, found.payload) != (topic, payload):
        raise EmissionMismatch(emission_id, found.topic)
    return True


def read_progress(tx: Tx, emission_id: str) -> EmissionProgress | None:
    """Return the progress of an emission, or None if it is over.

    It locks the emission. So if the commit of a batch is in doubt, it waits until the database has decided it.
    """
    row = tx.run(_lock_emission, id=emission_id).first()
    return None if row is None else EmissionProgress(row.delivered_count, row.cursor_pk, is_over=False)


# --- handing out --------------------------------------------------------------------------------


@statement
def _select_next_waiters(s: Store) -> Any:
    w = s.tables.topic_wait.c
    return (
        sa.select(w.instance_pk)
        .where(w.topic == param("topic"), w.instance_pk > param("after"), w.instance_pk <= param("last"))
        .distinct()
        .order_by(w.instance_pk)
        .limit(param("limit", sa.Integer))
    )


def deliver_batch(tx: Tx, emission_id: str, *, lease: timedelta, grace: timedelta) -> EmissionProgress | None:
    """Deliver one batch. Returns None if the emission is over. The sweep checks runs made due only after ``grace``."""
    emission = tx.run(_lock_emission, id=emission_id).first()
    if emission is None:
        return None
    batch = _read_batch(tx, emission)
    received, due_runs = _deliver(tx, emission, batch, grace=grace) if batch else ((), ())
    delivered_count = emission.delivered_count + len(received)
    if len(batch) < BATCH:
        tx.run(_delete_emission, id=emission_id)
        return EmissionProgress(delivered_count, emission.end_pk, is_over=True, due_runs=due_runs, received=received)
    tx.run(
        _advance_cursor, id=emission_id, after=batch[-1], delivered=delivered_count, next_check_us=duration_us(lease)
    )
    return EmissionProgress(delivered_count, batch[-1], is_over=False, due_runs=due_runs, received=received)


def _read_batch(tx: Tx, emission: Any) -> list[int]:
    """Return the keys of the next instances. Instances outside the emitter's scope are passed over."""
    if emission.scope is None:
        found = tx.run(
            _select_next_waiters, topic=emission.topic, after=emission.cursor_pk, last=emission.end_pk, limit=BATCH
        )
        return [int(pk) for pk in found.scalars()]
    w, i = tx.t.topic_wait.c, tx.t.instance.c
    query = (
        sa.select(w.instance_pk)
        .join(tx.t.instance, i.id == w.instance_pk)
        .where(w.topic == emission.topic, w.instance_pk > emission.cursor_pk, w.instance_pk <= emission.end_pk)
        .where(*scopes.conditions(tx.t, Scope.from_text(emission.scope)))
        .distinct()
        .order_by(w.instance_pk)
        .limit(BATCH)
    )
    return [int(pk) for pk in tx.execute(query).scalars()]


def _deliver(
    tx: Tx, emission: Any, pks: Sequence[int], *, grace: timedelta
) -> tuple[tuple[tuple[RunRef, str, str], ...], tuple[DueRun, ...]]:
    """Deliver the payload to the open waits of these instances. Returns the events, and the runs that became due."""
    i = tx.t.instance
    columns = ("id", "workflow", "instance_id", "run_number", "status", "claim_token", "version", "queue")
    lock = sa.select(*(i.c[name] for name in columns)).where(i.c.id.in_(pks)).order_by(i.c.id)
    owners = {row.id: row for row in tx.execute(lock.with_for_update(key_share=True))}
    event_counts, closed_waits = Counter[int](), list[tuple[int, int, str]]()
    events: list[dict[str, Any]] = []
    for wait in tx.execute(_select_waits(tx, emission, pks)):
        owner = owners.get(wait.instance_pk)
        if owner is None or not _is_open(wait, owner, emission.topic):
            closed_waits.append((wait.instance_pk, wait.run_number, wait.step_key))
        elif wait.earlier_seq is None:  # else this run received it before, under the same id
            closed_waits.append((wait.instance_pk, wait.run_number, wait.step_key))
            event_counts[owner.id] += 1
            events.append(_build_event(wait, owner, emission, number=event_counts[owner.id]))
    tx.run_many(_insert_event, events)
    topic_waits.close_many(tx, closed_waits)
    now = tx.store.clock()
    pks_to_wake = [pk for pk in event_counts if _needs_wake(owners[pk])]
    due = {
        "status": Status.ACTIVE.value,
        "run_at": now,
        "next_check_at": now + duration_us(grace),
        # Without a grace, only the sweep sends it.
        "sent_at": now if grace else None,
        "dispatch_count": 0,
        "wake_reason": WakeReason.EVENT.value,
        "priority": RESUMING,
        "updated_at": now,
    }
    _update_instances(tx, {pk: event_counts[pk] for pk in pks_to_wake}, due)
    _update_instances(tx, {pk: count for pk, count in event_counts.items() if not _needs_wake(owners[pk])}, {})
    received = tuple((_due_run(owners[each["instance_pk"]]).ref, emission.topic, each["event_id"]) for each in events)
    return received, tuple(_due_run(owners[pk]) for pk in pks_to_wake)


def _select_waits(tx: Tx, emission: Any, pks: Sequence[int]) -> sa.Select[Any]:
    """Select the waits that were open when the emission started, with their step and any earlier event."""
    w, st, e = tx.t.topic_wait, tx.t.step, tx.t.event
    its_step = sa.and_(
        st.c.instance_pk == w.c.instance_pk, st.c.run_number == w.c.run_number, st.c.step_key == w.c.step_key
    )
    its_event = sa.and_(
        e.c.instance_pk == w.c.instance_pk, e.c.run_number == w.c.run_number, e.c.event_id == emission.id
    )
    return (
        sa.select(
            w.c.instance_pk, w.c.run_number, w.c.step_key, st.c.status, st.c.wait_event_type, st.c.wake_at,
            e.c.seq.label("earlier_seq"), tx.store.clock().label("now_us"),
        )
        .select_from(w.outerjoin(st, its_step).outerjoin(e, its_event))
        .where(w.c.topic == emission.topic, w.c.instance_pk.in_(pks), w.c.opened_at <= emission.created_at)
        .order_by(w.c.instance_pk, st.c.seq)
    )  # fmt: skip


def _is_open(wait: Any, owner: Any, topic: str) -> bool:
    return (
        wait.run_number == owner.run_number
        and Status(owner.status) not in TERMINAL
        and wait.status == StepStatus.WAITING.value
        and parse_topic_event_type(wait.wait_event_type) == topic
        and wait.wake_at >= wait.now_us
    )


def _needs_wake(owner: Any) -> bool:
    """Whether the instance must be woken. A worker checks for events itself when it releases, and so does a resume."""
    return owner.claim_token is None and Status(owner.status) is Status.WAITING


@statement
def _insert_event(s: Store) -> Any:
    columns = ("instance_pk", "run_number", "seq", "event_id", "type", "payload", "created_at")
    return sa.insert(s.tables.event).values({name: param(name) for name in columns}).inline()


def _build_event(wait: Any, owner: Any, emission: Any, *, number: int) -> dict[str, Any]:
    """Build an event for this wait alone. Its order is the instance's version, which the lock keeps from changing."""
    return {
        "instance_pk": owner.id,
        "run_number": owner.run_number,
        "seq": owner.version + number,
        "event_id": emission.id if number == 1 else f"{emission.id}{_COPY_SEPARATOR}{number}",
        "type": wait.wait_event_type,
        "payload": emission.payload,
        "created_at": wait.now_us,
    }


def _update_instances(tx: Tx, event_counts: dict[int, int], values: dict[str, Any]) -> None:
    """Set these values, and add the number of events to each instance's version. Nearly always one statement."""
    i = tx.t.instance
    for count in sorted(set(event_counts.values())):
        ids = [pk for pk, its in event_counts.items() if its == count]
        tx.execute(sa.update(i).where(i.c.id.in_(ids)).values(version=i.c.version + count, **values))


def _due_run(owner: Any) -> DueRun:
    return DueRun(RunRef(owner.workflow, owner.instance_id, owner.run_number), owner.queue)


# --- after a crash ------------------------------------------------------------------------------


@statement
def _select_abandoned(s: Store) -> Any:
    e = s.tables.emission.c
    return sa.select(e.id).where(e.next_check_at <= s.statement_clock()).order_by(e.next_check_at).limit(1)


def find_abandoned(tx: Tx) -> str | None:
    """Return an emission that no process has advanced for its lease, or None."""
    found: str | None = tx.run(_select_abandoned).scalar()
    return found
