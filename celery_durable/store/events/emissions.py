"""Emissions to topics: an emission is a row that exists until its last waiter has the payload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import EmissionMismatch
from celery_durable.model import (
    DueRun,
    Emission,
    Receiver,
    RunRef,
    Scope,
    Status,
    StepStatus,
    TopicEvent,
    TopicWait,
    WakeReason,
    duration_us,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.instances import lifecycle
from celery_durable.store.schema import dialects
from celery_durable.store.schema.step_format import is_of_step

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

    If an emission with this id is under way, it continues, or EmissionMismatch is raised. If no process advances it for
    ``lease``, the sweep does.
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


def lock(tx: Tx, emission_id: str) -> Emission | None:
    """Lock an emission and return it, or None if it is over; if the commit of a batch is in doubt, this waits."""
    row = tx.run(_lock_emission, id=emission_id).first()
    if row is None:
        return None
    return Emission(
        id=row.id,
        topic=row.topic,
        payload=row.payload,
        scope=None if row.scope is None else Scope.from_text(row.scope),
        cursor_pk=row.cursor_pk,
        end_pk=row.end_pk,
        delivered_count=row.delivered_count,
        created_at=from_us(row.created_at),
    )


def advance(tx: Tx, emission: Emission, *, cursor_pk: int, delivered_count: int, lease: timedelta) -> None:
    """Record that the instances up to ``cursor_pk`` have the emission. The sweep continues it after ``lease``."""
    next_check_us = duration_us(lease)
    tx.run(_advance_cursor, id=emission.id, after=cursor_pk, delivered=delivered_count, next_check_us=next_check_us)


def delete(tx: Tx, emission: Emission) -> None:
    """Delete an emission that is over."""
    tx.run(_delete_emission, id=emission.id)


# --- deliver ------------------------------------------------------------------------------------


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


def read_next_waiters(tx: Tx, emission: Emission, *, limit: int) -> list[int]:
    """Return the keys of the next instances. Instances outside the emitter's scope are passed over."""
    given = {"topic": emission.topic, "after": emission.cursor_pk, "last": emission.end_pk, "limit": limit}
    if emission.scope is None:
        found: Iterable[Any] = tx.run(_select_next_waiters, **given)
    else:
        is_receiver = (
            tx.t.instance.c.id == tx.t.topic_wait.c.instance_pk,
            *bounds.scope_conditions(tx.t, emission.scope),
        )
        found = tx.execute(_select_next_waiters.build(tx.store).where(*is_receiver), **given)
    return [int(row.instance_pk) for row in found]


def lock_receivers(tx: Tx, pks: Sequence[int]) -> dict[int, Receiver]:
    """Lock these instances in ascending order of their keys, and return them by key."""
    i = tx.t.instance
    columns = ("id", "workflow", "instance_id", "run_number", "status", "claim_token", "version", "queue")
    lock = sa.select(*(i.c[name] for name in columns)).where(i.c.id.in_(pks)).order_by(i.c.id)
    return {row.id: _to_receiver(row) for row in tx.execute(lock.with_for_update(key_share=True))}


def _to_receiver(row: Any) -> Receiver:
    due_run = DueRun(RunRef(row.workflow, row.instance_id, row.run_number), row.queue)
    return Receiver(row.id, due_run, Status(row.status), row.claim_token is not None, row.version)


def read_waits(tx: Tx, emission: Emission, pks: Sequence[int]) -> list[TopicWait]:
    """Return the waits of these instances that were open when the emission started. The instances are locked."""
    return [
        TopicWait(
            pk=row.instance_pk,
            run_number=row.run_number,
            step_key=row.step_key,
            status=None if row.status is None else StepStatus(row.status),
            event_type=row.wait_event_type,
            ends_at=from_us_or_none(row.wake_at),
            has_emission=row.earlier_seq is not None,
            now=from_us(row.now_us),
        )
        for row in tx.execute(_select_waits(tx, emission, pks))
    ]


def _select_waits(tx: Tx, emission: Emission, pks: Sequence[int]) -> sa.Select[Any]:
    """Select the waits that were open when the emission started, with their step and any earlier event."""
    w, st, e = tx.t.topic_wait, tx.t.step, tx.t.event
    its_event = sa.and_(
        e.c.instance_pk == w.c.instance_pk, e.c.run_number == w.c.run_number, e.c.event_id == emission.id
    )
    return (
        sa.select(
            w.c.instance_pk, w.c.run_number, w.c.step_key, st.c.status, st.c.wait_event_type, st.c.wake_at,
            e.c.seq.label("earlier_seq"), tx.store.clock().label("now_us"),
        )
        .select_from(w.outerjoin(st, is_of_step(w, st)).outerjoin(e, its_event))
        .where(w.c.topic == emission.topic, w.c.instance_pk.in_(pks), w.c.opened_at <= to_us(emission.created_at))
        .order_by(w.c.instance_pk, st.c.seq)
    )  # fmt: skip


@statement
def _insert_event(s: Store) -> Any:
    columns = ("instance_pk", "run_number", "seq", "event_id", "type", "payload", "created_at")
    return sa.insert(s.tables.event).values({name: param(name) for name in columns}).inline()


def insert_events(tx: Tx, emission: Emission, events: Sequence[TopicEvent]) -> None:
    """Insert the events of a batch."""
    tx.run_many(
        _insert_event,
        [
            {
                "instance_pk": event.wait.pk,
                "run_number": event.wait.run_number,
                "seq": event.seq,
                "event_id": event.id,
                "type": event.wait.event_type,
                "payload": emission.payload,
                "created_at": to_us(event.wait.now),
            }
            for event in events
        ],
    )


def make_due(tx: Tx, event_counts: Mapping[int, int], *, grace: timedelta) -> None:
    """Make instances due that have got events. Without a grace, only a sweep sends their dispatch messages."""
    grace_us = duration_us(grace)
    due = lifecycle.due_values(
        tx.store.clock(), wake_reason=WakeReason.EVENT.value, grace_us=grace_us, is_published=grace_us > 0
    )
    _update_instances(tx, event_counts, due | {"updated_at": tx.store.clock()})


def bump_versions(tx: Tx, event_counts: Mapping[int, int]) -> None:
    """Count the events of instances that are not made due."""
    _update_instances(tx, event_counts, {})


def _update_instances(tx: Tx, event_counts: Mapping[int, int], values: dict[str, Any]) -> None:
    """Set these values, and add the number of events to each instance's version. Nearly always one statement."""
    i = tx.t.instance
    for count in sorted(set(event_counts.values())):
        ids = [pk for pk, its in event_counts.items() if its == count]
        tx.execute(sa.update(i).where(i.c.id.in_(ids)).values(version=i.c.version + count, **values))


# --- after a crash ------------------------------------------------------------------------------


@statement
def _select_abandoned(s: Store) -> Any:
    e = s.tables.emission.c
    return sa.select(e.id).where(e.next_check_at <= s.statement_clock()).order_by(e.next_check_at).limit(1)


def find_abandoned(tx: Tx) -> str | None:
    """Return an emission that no process has advanced for its lease, or None."""
    found: str | None = tx.run(_select_abandoned).scalar()
    return found
