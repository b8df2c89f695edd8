"""Reads for operators across all instances: counts, due runs, leases and waits. They take no locks.

Each one is bounded (`bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.errors import FilterTooBroad
from celery_durable.model import (
    PRIVATE_TYPE_PATTERN,
    RUNNABLE,
    Count,
    EventWait,
    Overdue,
    RunRef,
    Scope,
    Status,
    StepStatus,
    StepType,
    duration_us,
    from_us,
    from_us_or_none,
)
from celery_durable.store import bounds, dialects, instance_search, schedule, scopes
from celery_durable.store.bounds import MAX_EXAMINED, Range
from celery_durable.store.engine import Tx
from celery_durable.store.instance_search import InstanceFilter
from celery_durable.store.schedule import QueueAgenda
from celery_durable.store.schema import OPEN_EVENT_WAIT

_RUNNABLE = [status.value for status in RUNNABLE]
_WAITING = (*sorted(RUNNABLE), Status.PAUSED)
"""The statuses of instances whose waits are open."""
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


# --- counts -------------------------------------------------------------------------------------


def count_instances(tx: Tx, *, scope: Scope | None = None) -> list[tuple[str, Status, Count]]:
    """Count the instances of each workflow by status, without zeros.

    Each count ends at 10,000. With a scope, only the newest 10,000 instances are examined that its index finds.
    """
    if scope is None:
        return count_by_status(tx, bounds.read_workflow_names(tx), list(Status))
    counted = instance_search.count_examined(tx, InstanceFilter(scope=scope), "workflow", "status")
    return [
        (workflow, Status(status), Count(each.number, each.is_exact))
        for each in counted
        for workflow, status in [each.key]
        if each.number
    ]


def count_by_status(tx: Tx, workflows: Sequence[str], statuses: Sequence[Status]) -> list[tuple[str, Status, Count]]:
    """Count the instances of these workflows in these statuses, without zeros. Each count ends at 10,000."""
    groups = [(workflow, status) for workflow in sorted(workflows) for status in sorted(statuses)]
    i = tx.t.instance.c
    counts: list[Any] = []
    one: sa.ColumnElement[int] = sa.literal_column("1").label("one")
    for number, (workflow, status) in enumerate(groups):
        is_in = (i.workflow == workflow, i.status == status.value, bounds.in_lists(i))
        few = sa.select(one).where(*is_in).order_by(i.id)
        counts.append(
            sa.select(sa.literal_column(str(number)).label("number"), sa.func.count().label("n")).select_from(
                few.limit(MAX_EXAMINED + 1).subquery()
            )
        )
    rows = tx.execute(sa.union_all(*counts)).all() if counts else ()
    found = {row.number: row.n for row in rows}
    return [
        (workflow, status, Count(min(found[number], MAX_EXAMINED), found[number] <= MAX_EXAMINED))
        for number, (workflow, status) in enumerate(groups)
        if found[number]
    ]


def count_overdue(tx: Tx, *, scope: Scope | None = None) -> Overdue:
    """Count the runs that a worker should have claimed.

    These are runs that are swept soon, and runs with a dispatch message under way. Both are examined in the order in
    which they are swept or were sent.
    """
    now = tx.store.statement_clock()
    soon = now + duration_us(_SWEPT_WITHIN)
    queues = schedule.read(tx).queues
    ranges = [
        *_ranges_due_within(queues, lambda c: (c.next_check_at <= soon,)),
        *(
            Range(
                {"queue": name},
                "sent_at",
                where=lambda c: (c.sent_at.is_not(None), c.claim_token.is_(None), c.next_check_at > soon),
            )
            for name, queue in queues.items()
            if queue.oldest_sent_at is not None
        ),
    ]
    if not ranges:
        return Overdue(Count(0), None)
    limit = bounds.divide(ranges)
    columns = ("id", "instance_id", "run_at", "claim_token", "status")
    c = bounds.build_union(tx.t.instance, ranges, *columns, limit=limit).c
    in_scope = scopes.conditions(tx.t, scope, of=c)
    is_due = sa.and_(c.run_at <= now, c.claim_token.is_(None), c.status.in_(_RUNNABLE), *in_scope)
    query = sa.select(
        sa.func.count().label("examined"),
        sa.func.sum(sa.case((is_due, 1), else_=0)).label("n"),
        sa.func.min(sa.case((is_due, c.run_at))).label("oldest"),
    )
    parts = tx.execute(query.group_by(c.part)).all()
    oldest = min((part.oldest for part in parts if part.oldest is not None), default=None)
    count = Count(sum(int(part.n) for part in parts), all(part.examined < limit for part in parts))
    return Overdue(count, from_us_or_none(oldest))


def _ranges_due_within(
    queues: Mapping[str, QueueAgenda],
    where: Callable[[Any], Sequence[sa.ColumnElement[bool]]],
    *,
    is_reversed: bool = False,
) -> list[Range]:
    """Return the ranges of the index of due runs that these conditions cut."""
    return [
        Range({"priority": priority, "queue": name}, "next_check_at", is_reversed=is_reversed, where=where)
        for name, queue in queues.items()
        for priority in sorted(queue.due)
    ]


# --- lists --------------------------------------------------------------------------------------


def read_leases(tx: Tx, *, limit: int, lease: timedelta, scope: Scope | None = None) -> list[ClaimedRun]:
    """Return claims, those that end first in front. Expired claims that no sweep has seen yet are included.

    ``lease`` is the length of a lease: a claim is swept when it ends. So claims are among the runs that are swept
    within this time, the latest of which are examined. An expired claim is missing if it lies behind 10,000 due runs.
    """
    until = tx.store.statement_clock() + duration_us(lease)
    ranges = _ranges_due_within(schedule.read(tx).queues, lambda c: (c.next_check_at <= until,), is_reversed=True)
    if not ranges:
        return []
    columns = (
        "id", "workflow", "instance_id", "run_number", "claim_token", "claim_task_id", "claimed_by", "lease_until",
        "crash_count",
    )  # fmt: skip
    examined = bounds.build_union(tx.t.instance, ranges, *columns, limit=bounds.divide(ranges))
    c = examined.c
    query = sa.select(examined).where(c.claim_token.is_not(None), *scopes.conditions(tx.t, scope, of=c))
    return [
        ClaimedRun(_ref(row), row.claim_task_id, row.claimed_by, from_us(row.lease_until), row.crash_count)
        for row in tx.execute(query.order_by(c.lease_until, c.id).limit(limit))
    ]


def read_waits(
    tx: Tx, *, workflow: str | None, event_type: str | None, limit: int, scope: Scope | None = None
) -> list[EventWait]:
    """Return open waits for events that users send, those of the newest instances first; raises FilterTooBroad.

    An index of open waits finds those for one event type, where the database has partial indexes. All others are found
    by the instances that have not ended.
    """
    found: Sequence[Any] = ()
    for examined in _examinations(tx, workflow=workflow, event_type=event_type, limit=limit):
        found, is_all = _choose_waits(tx, examined, workflow=workflow, event_type=event_type, scope=scope, limit=limit)
        if is_all or len(found) == limit:
            return [_to_wait(row) for row in found]
    raise FilterTooBroad(f"{len(found)} waits", MAX_EXAMINED, "name a workflow, an event type or both")


def _to_wait(row: Any) -> EventWait:
    return EventWait(
        _ref(row),
        Status(row.status),
        row.name,
        row.wait_event_type,
        # The row of a linear step exists since the run started; the step waits since its handler was called.
        from_us(row.created_at if row.started_at is None else row.started_at),
        from_us_or_none(row.wake_at),
    )


_FIRST = 10
"""How many rows are examined first for each wait that the list may show."""
_STEP_COLUMNS = ("name", "type", "wait_event_type", "started_at", "created_at", "wake_at", "seq", "step_key")


class _ExaminedWaits(NamedTuple):
    """What a list of waits examines, newest first.

    ``examined`` is the CTE of waits, or of instances whose steps are then read. ``found`` is the subquery of the steps
    with their instances. ``bound`` is how many of each range count; one more tells that there are more.
    """

    examined: Any
    found: Any
    pk: str
    """The column of ``examined`` with the key of an instance."""
    bound: int

    def select_cut(self) -> Any:
        """Select the instance up to which all are examined: of the ranges with more, the one that ended first."""
        c = self.examined.c
        cut = sa.select(sa.func.min(c[self.pk]).label("pk")).group_by(c.part).having(sa.func.count() > self.bound)
        return sa.select(sa.func.max(cut.subquery("cuts").c.pk).label("pk"))


def _examinations(tx: Tx, *, workflow: str | None, event_type: str | None, limit: int) -> Iterator[_ExaminedWaits]:
    """Yield what to examine, one after the other, until enough is found.

    Nearly always the first ones are enough, and PostgreSQL looks up all, however few the list shows. The waits of a
    rare workflow may lie behind many others of the same type, but its instances are few.
    """
    if event_type is None or tx.store.database is dialects.MARIADB:
        yield _examine_instances(tx, workflow, bound=MAX_EXAMINED)
        return
    first = min(_FIRST * limit, MAX_EXAMINED)
    yield _examine_waits(tx, event_type, bound=first)
    if workflow is not None:
        yield _examine_instances(tx, workflow, bound=first)
    if first < MAX_EXAMINED:
        yield _examine_waits(tx, event_type, bound=MAX_EXAMINED)


def _examine_waits(tx: Tx, event_type: str, *, bound: int) -> _ExaminedWaits:
    """Examine the open waits for an event type."""
    i, s = tx.t.instance, tx.t.step
    is_open: Any = sa.text(OPEN_EVENT_WAIT)
    waits = Range({"wait_event_type": event_type}, "instance_pk", is_reversed=True, where=lambda _: (is_open,))
    names = ("instance_pk", "run_number", "status", *_STEP_COLUMNS)
    steps = bounds.build_union(s, [waits], *names, limit=bound + 1)
    examined = sa.select(*(each.label("step_status" if each.name == "status" else each.name) for each in steps.c))
    steps = examined.cte("steps")
    is_its = sa.and_(i.c.id == steps.c.instance_pk, i.c.run_number == steps.c.run_number)
    columns = (i.c.id, i.c.workflow, i.c.instance_id, i.c.status)
    return _ExaminedWaits(
        steps, bounds.look_up(tx.store.database, steps, i, *columns, is_it=is_its), "instance_pk", bound
    )


def _examine_instances(tx: Tx, workflow: str | None, *, bound: int) -> _ExaminedWaits:
    """Examine the instances that have not ended, of a workflow or of all; ``bound`` is for all ranges together."""
    i, s = tx.t.instance, tx.t.step
    workflows = (bounds.read_workflow_names(tx) or [""]) if workflow is None else [workflow]
    ranges = [
        Range({"workflow": name, "status": each.value}, "id", is_reversed=True)
        for name in workflows
        for each in _WAITING
    ]
    each_bound = max(bound // len(ranges), 1)
    instance_columns = ("id", "workflow", "instance_id", "run_number", "status")
    instances = sa.select(bounds.build_union(i, ranges, *instance_columns, limit=each_bound + 1)).cte("instances")
    is_its = sa.and_(s.c.instance_pk == instances.c.id, s.c.run_number == instances.c.run_number)
    its = (s.c.status.label("step_status"), *(s.c[name] for name in _STEP_COLUMNS))
    return _ExaminedWaits(
        instances, bounds.look_up(tx.store.database, instances, s, *its, is_it=is_its), "id", each_bound
    )


def _choose_waits(
    tx: Tx,
    examined: _ExaminedWaits,
    *,
    workflow: str | None,
    event_type: str | None,
    scope: Scope | None,
    limit: int,
) -> tuple[Sequence[Any], bool]:
    """Return the rows of the newest waits among the examined ones, and whether these are all that there are.

    Behind the cut, there may be others in between, so no row from there counts.
    """
    c = examined.found.c
    conditions = [
        c.type.in_([each.value for each in (StepType.WAIT, StepType.LINEAR)]),
        c.step_status.in_([each.value for each in (StepStatus.WAITING, StepStatus.LINEAR_WAITING)]),
        c.wait_event_type.not_like(PRIVATE_TYPE_PATTERN),
        c.status.in_([each.value for each in _WAITING]),
        *([] if workflow is None else [c.workflow == workflow]),
        *([] if event_type is None else [c.wait_event_type == event_type]),
        *scopes.conditions(tx.t, scope, of=c),
    ]
    chosen = sa.select(examined.found).where(*conditions).order_by(c.id.desc(), c.seq, c.step_key).limit(limit)
    cut, w = examined.select_cut().subquery("cut"), chosen.subquery("chosen")
    query = sa.select(cut.c.pk.label("cut_pk"), *w.c).select_from(cut.outerjoin(w, sa.true()))
    rows = tx.execute(query.order_by(w.c.id.desc(), w.c.seq, w.c.step_key)).all()  # one without a wait if there is none
    cut_pk = rows[0].cut_pk
    found = [row for row in rows if row.id is not None and (cut_pk is None or row.id > cut_pk)]
    return found, cut_pk is None


def _ref(row: sa.Row[tuple[object, ...]]) -> RunRef:
    return RunRef(row.workflow, row.instance_id, row.run_number)
