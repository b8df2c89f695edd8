"""Reads for operators across all instances: counts, due runs, leases and waits. Takes no locks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from celery_durable.model import (
    PRIVATE_TYPE_PATTERN,
    RUNNABLE,
    RunRef,
    Scope,
    Status,
    StepStatus,
    StepType,
    from_us,
    from_us_or_none,
)
from celery_durable.store import schedule, scopes
from celery_durable.store.engine import Tx

_RUNNABLE = [status.value for status in RUNNABLE]
_SWEPT_WITHIN = timedelta(minutes=1)
"""A due run without a dispatch message under way is swept within this time.

A queue that refused messages is tried again after at most a minute (`tasks.flow_control`).
"""


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A claimed run, with the Celery task and the node of the worker that holds it."""

    ref: RunRef
    task_id: str
    node: str
    lease_until: datetime
    crash_count: int


@dataclass(frozen=True, slots=True)
class EventWait:
    """A step that waits for an event."""

    ref: RunRef
    status: Status
    step: str
    event_type: str
    since: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Overdue:
    """The number of runs that are due and unclaimed, and since when the oldest is."""

    count: int
    oldest: datetime | None


def count_instances(tx: Tx, *, scope: Scope | None = None) -> list[tuple[str, Status, int]]:
    """Count the instances of each workflow by status; read from an index."""
    i = tx.t.instance.c
    query = sa.select(i.workflow, i.status, sa.func.count().label("n")).group_by(i.workflow, i.status)
    query = query.where(*scopes.conditions(tx.t, scope))
    rows = tx.execute(query.order_by(i.workflow, i.status))
    return [(row.workflow, Status(row.status), row.n) for row in rows]


def count_overdue(tx: Tx, *, scope: Scope | None = None) -> Overdue:
    """Count the runs that a worker should have claimed.

    These are runs that are swept soon, and runs with a dispatch message under way.
    """
    i, now = tx.t.instance.c, tx.store.statement_clock()
    is_due = (i.run_at <= now, i.claim_token.is_(None), i.status.in_(_RUNNABLE), *scopes.conditions(tx.t, scope))
    is_near = (priority, queue, is_soon) = schedule.conditions_due_within(tx, within=_SWEPT_WITHIN)
    is_sent = (priority, queue, i.sent_at.is_not(None), i.next_check_at.is_not(None), sa.not_(is_soon))
    due = sa.union_all(*(sa.select(i.run_at).where(*part, *is_due) for part in (is_near, is_sent))).subquery().c
    row = tx.execute(sa.select(sa.func.count().label("n"), sa.func.min(due.run_at).label("oldest"))).one()
    return Overdue(row.n, from_us_or_none(row.oldest))


def read_leases(tx: Tx, *, limit: int, lease: timedelta, scope: Scope | None = None) -> list[ClaimedRun]:
    """Return claims, those that end first in front. Expired claims that no sweep has seen yet are included.

    ``lease`` is the length of a lease. A claim's ``next_check_at`` is no further ahead than that.
    """
    i = tx.t.instance.c
    columns = (
        i.workflow,
        i.instance_id,
        i.run_number,
        i.claim_task_id,
        i.claimed_by,
        i.lease_until,
        i.crash_count,
    )
    where = (
        *schedule.conditions_due_within(tx, within=lease),
        i.claim_token.is_not(None),
        *scopes.conditions(tx.t, scope),
    )
    query = sa.select(*columns).where(*where).order_by(i.lease_until, i.id).limit(limit)
    return [
        ClaimedRun(_ref(row), row.claim_task_id, row.claimed_by, from_us(row.lease_until), row.crash_count)
        for row in tx.execute(query)
    ]


def read_waits(
    tx: Tx, *, workflow: str | None, event_type: str | None, limit: int, scope: Scope | None = None
) -> list[EventWait]:
    """Return open waits for events that users send, those of the newest instances first."""
    i, s = tx.t.instance.c, tx.t.step.c
    current = (s.instance_pk == i.id, s.run_number == i.run_number)
    types, statuses = (StepType.WAIT, StepType.LINEAR), (StepStatus.WAITING, StepStatus.LINEAR_WAITING)
    open_ = (
        s.type.in_([each.value for each in types]),
        s.status.in_([each.value for each in statuses]),
        s.wait_event_type.not_like(PRIVATE_TYPE_PATTERN),
    )
    # The row of a linear step exists since the run started; the step waits since its handler was called.
    since = sa.func.coalesce(s.started_at, s.created_at).label("created_at")
    query = (
        sa.select(i.workflow, i.instance_id, i.run_number, i.status, s.name, s.wait_event_type, since, s.wake_at)
        .join_from(tx.t.instance, tx.t.step, sa.and_(*current))
        .where(i.status.in_((*_RUNNABLE, Status.PAUSED.value)), *open_, *scopes.conditions(tx.t, scope))
        .order_by(i.id.desc(), s.seq, s.step_key)
        .limit(limit)
    )
    if workflow is not None:
        query = query.where(i.workflow == workflow)
    if event_type is not None:
        query = query.where(s.wait_event_type == event_type)
    return [
        EventWait(
            _ref(row),
            Status(row.status),
            row.name,
            row.wait_event_type,
            from_us(row.created_at),
            from_us_or_none(row.wake_at),
        )
        for row in tx.execute(query)
    ]


def _ref(row: sa.Row[tuple[object, ...]]) -> RunRef:
    return RunRef(row.workflow, row.instance_id, row.run_number)
