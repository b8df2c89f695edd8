"""Reads for operators across all instances: counts, due runs, leases and waits. Bounded (`bounds`), without locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable import values
from celery_durable.model import (
    PRIVATE_TYPE_PATTERN,
    RUNNABLE,
    Count,
    DueRuns,
    EventWait,
    FailureText,
    RunRef,
    Scope,
    Status,
    StatusCount,
    StepStatus,
    StepType,
    StuckRun,
    WaitFilter,
    duration_us,
    from_us,
    from_us_or_none,
    is_of_child,
)
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.engine.bounds import Range
from celery_durable.store.instances import lists
from celery_durable.store.instances.lists import InstanceFilter
from celery_durable.store.runs import schedule
from celery_durable.store.runs.history import get_failed_step, to_error_info
from celery_durable.store.runs.schedule import Agenda, QueueAgenda
from celery_durable.store.schema import dialects
from celery_durable.store.schema.tables import OPEN_ASK, OPEN_EVENT_WAIT

LIVE_STATUSES = (Status.ACTIVE, Status.WAITING, Status.PAUSED)
_RUNNABLE = [status.value for status in RUNNABLE]
_WAITING = (*sorted(RUNNABLE), Status.PAUSED)
"""The statuses of instances whose waits are open."""
_SWEPT_WITHIN = timedelta(minutes=1)
"""A due run without a message is swept within this time: `tasks.flow_control` tries a queue again after a minute."""


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A claimed run, with the Celery task and the node of the worker that holds it."""

    ref: RunRef
    task_id: str
    node: str
    lease_until: datetime
    crash_count: int


# --- counts -------------------------------------------------------------------------------------


def count_instances(tx: Tx, *, scope: Scope | None = None) -> list[StatusCount]:
    """Count the instances of each workflow by status, without zeros. Each count ends at 10,000.

    With a scope, only the newest 10,000 instances are examined that its index finds.
    """
    if scope is None:
        counts = count_by_status(tx, bounds.read_workflow_names(tx), list(Status))
    else:
        counted = lists.count_examined(tx, InstanceFilter(scope=scope), "workflow", "status")
        counts = {(workflow, Status(status)): count for (workflow, status), count in counted.items()}
    return [
        StatusCount(number.count, number.is_exact, workflow=workflow, status=status)
        for (workflow, status), number in sorted(counts.items())
        if number.count
    ]


def count_by_status(
    tx: Tx, workflows: Collection[str], statuses: Collection[Status] = LIVE_STATUSES
) -> dict[tuple[str, Status], Count]:
    """Count the instances of these workflows in these statuses. Each count ends at 10,000."""
    keys = [(workflow, status) for workflow in workflows for status in statuses]
    i, bound = tx.t.instance.c, bounds.MAX_EXAMINED
    counts: list[Any] = []
    one: sa.ColumnElement[int] = sa.literal_column("1").label("one")
    for number, (workflow, status) in enumerate(keys):
        is_in = (i.workflow == workflow, i.status == status.value, bounds.in_lists(i))
        few = sa.select(one).where(*is_in).order_by(i.id).limit(bound + 1).subquery()
        number_column: sa.ColumnElement[int] = sa.literal_column(str(number)).label("number")
        counts.append(sa.select(number_column, sa.func.count().label("n")).select_from(few))
    rows = tx.execute(sa.union_all(*counts)).all() if counts else ()
    return {keys[row.number]: Count(min(row.n, bound), row.n <= bound) for row in rows}


def count_overdue(tx: Tx, *, scope: Scope | None = None) -> DueRuns:
    """Count the runs that a worker should have claimed: those swept soon, and those with a message under way."""
    return read_overdue(tx, schedule.read(tx), scope=scope)[0]


def read_overdue(tx: Tx, agenda: Agenda, *, scope: Scope | None = None) -> tuple[DueRuns, list[StuckRun]]:
    """Return what `count_overdue` does, and of each workflow the run that is due, or whose lease has ended, longest."""
    now = tx.store.statement_clock()
    soon = now + duration_us(_SWEPT_WITHIN)
    ranges = [
        *_ranges_due_within(agenda.queues, lambda c: (c.next_check_at <= soon,)),
        *(
            Range(
                {"queue": name},
                "sent_at",
                where=lambda c: (c.sent_at.is_not(None), c.claim_token.is_(None), c.next_check_at > soon),
            )
            for name, queue in agenda.queues.items()
            if queue.oldest_sent_at is not None
        ),
    ]
    if not ranges:
        return DueRuns(0), []
    limit = bounds.divide(ranges)
    columns = ("id", "workflow", "instance_id", "run_at", "claim_token", "lease_until", "status")
    c = bounds.build_union(tx.t.instance, ranges, *columns, limit=limit).c
    is_claimed = c.claim_token.is_not(None)
    since = sa.case((is_claimed, c.lease_until), else_=c.run_at)
    is_late = sa.and_(since <= now, c.status.in_(_RUNNABLE), *bounds.scope_conditions(tx.t, scope, of=c))
    # All times have 16 digits, so the least text is that of the earliest time.
    text = sa.cast(since, sa.String(16)).concat(c.instance_id)
    keys = (c.part, c.workflow, sa.case((is_claimed, 1), else_=0).label("is_claimed"))
    query = sa.select(
        *keys,
        sa.func.count().label("examined"),
        sa.func.sum(sa.case((is_late, 1), else_=0)).label("n"),
        sa.func.min(sa.case((is_late, text))).label("first"),
    )
    rows = tx.execute(query.group_by(*keys)).all()
    examined = Counter[int]()
    for row in rows:
        examined[row.part] += row.examined
    firsts = sorted((row.first, row.workflow, row.is_claimed) for row in rows if row.first is not None)
    stuck = {
        (workflow, is_claimed): StuckRun(workflow, first[16:], from_us(int(first[:16])))
        for first, workflow, is_claimed in reversed(firsts)
    }
    oldest = min((each.since for (_, is_claimed), each in stuck.items() if not is_claimed), default=None)
    count = sum(int(row.n) for row in rows if not row.is_claimed)
    due = DueRuns(count, all(each < limit for each in examined.values()), oldest=oldest)
    return due, sorted(stuck.values(), key=lambda each: each.since)


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


# --- failures -----------------------------------------------------------------------------------

_MAX_TEXTS = 200
"""How many different failures are read, the most frequent ones."""
_FAILURE_BOUNDS = 4
"""A quarter of the bound is examined: each instance costs a search for its run."""
_MESSAGE_LENGTH = 200


def group_failures(tx: Tx, workflows: Collection[str], *, scope: Scope | None = None) -> list[FailureText]:
    """Group the errored instances of these workflows by error and failed steps, the largest group first.

    Of each workflow, the newest instances are examined. A group is not exact if its workflow has more.
    """
    if not workflows:
        return []
    ranges = [Range({"workflow": name, "status": Status.ERRORED.value}, "id", is_reversed=True) for name in workflows]
    i, r, limit = tx.t.instance, tx.t.run, max(bounds.divide(ranges) // _FAILURE_BOUNDS, 1)
    examined = bounds.build_union(i, ranges, "id", "workflow", "instance_id", "run_number", limit=limit)
    message = sa.func.substr(r.c.error_message, 1, _MESSAGE_LENGTH).label("message")
    is_its = sa.and_(r.c.instance_pk == examined.c.id, r.c.run_number == examined.c.run_number)
    c = bounds.look_up(tx.store.database, examined, r, r.c.error_name, r.c.failed_steps, message, is_it=is_its).c
    count, newest = sa.func.count().label("n"), sa.func.max(c.id).label("newest_pk")
    of_workflow = sa.func.sum(sa.func.count()).over(partition_by=c.workflow).label("examined")
    groups = (
        sa.select(c.workflow, c.error_name, c.failed_steps, c.message, count, newest, of_workflow)
        .where(*bounds.scope_conditions(tx.t, scope, of=c))
        .group_by(c.workflow, c.error_name, c.failed_steps, c.message)
        .order_by(sa.desc("n"), sa.desc("newest_pk"))
        .limit(_MAX_TEXTS)
        .subquery("failures")
    )
    query = sa.select(*groups.c, i.c.instance_id, i.c.run_number, i.c.updated_at).join(i, i.c.id == groups.c.newest_pk)
    rows = tx.execute(query.order_by(groups.c.n.desc(), groups.c.newest_pk.desc())).all()
    of_children = _find_steps_of_children(tx, rows)
    return [
        FailureText(
            int(row.n),
            int(row.examined) < limit,
            workflow=row.workflow,
            step=get_failed_step(row.failed_steps),
            error=to_error_info(row.error_name, row.message),
            newest_id=row.instance_id,
            newest_at=from_us(row.updated_at),
            is_of_child=row.newest_pk in of_children,
        )
        for row in rows
    ]


def _find_steps_of_children(tx: Tx, failed: Sequence[Any]) -> set[int]:
    """Return the keys of those of these failed instances whose first failed step was the work of a child."""
    st, steps = tx.t.step.c, [(row.newest_pk, row.run_number, get_failed_step(row.failed_steps)) for row in failed]
    named = [each for each in steps if each[2] is not None]
    is_it = sa.tuple_(st.instance_pk, st.run_number, st.step_key).in_(named)
    rows = tx.execute(sa.select(st.instance_pk, st.wait_event_type).where(is_it)) if named else ()
    return {row.instance_pk for row in rows if is_of_child(row.wait_event_type)}


# --- lists --------------------------------------------------------------------------------------


def read_leases(tx: Tx, *, limit: int, lease: timedelta, scope: Scope | None = None) -> list[ClaimedRun]:
    """Return claims, those that end first in front. Expired claims that no sweep has seen yet are included.

    ``lease`` is the length of a lease: a claim is swept within this time, so the latest of the runs that are swept by
    then are examined. An expired claim is missing if it lies behind 10,000 due runs.
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
    query = sa.select(examined).where(c.claim_token.is_not(None), *bounds.scope_conditions(tx.t, scope, of=c))
    return [
        ClaimedRun(_ref(row), row.claim_task_id, row.claimed_by, from_us(row.lease_until), row.crash_count)
        for row in tx.execute(query.order_by(c.lease_until, c.id).limit(limit))
    ]


_INSTANCE_COLUMNS = ("id", "workflow", "instance_id", "status")
_STEP_COLUMNS = (
    "instance_pk", "name", "wait_event_type", "started_at", "created_at", "wake_at", "step_key", "ask",
)  # fmt: skip

WaitPosition = tuple[int, str]
"""The keys of an instance and of a step. After it come the later keys of its steps, then older instances."""


def read_waits(
    tx: Tx, chosen: WaitFilter, *, after: WaitPosition | None = None, limit: int, scope: Scope | None = None
) -> tuple[list[EventWait], WaitPosition | None]:
    """Return open waits for events that users send, those of the newest instances first, and where the list continues.

    The index of questions or that of an event type, if partial, drives its lists; the open instances drive all others.
    """
    if tx.store.database is dialects.MARIADB or not (chosen.event_type is not None or chosen.asks):
        found, last = _examine_instances(tx, chosen.workflow, after)
    else:
        found, last = _examine_waits(tx, chosen, after)
    c, end = found.c, None if chosen.to is None else values.write_addressee(chosen.to)
    conditions = [
        *_is_awaited(c),
        *([] if chosen.workflow is None else [c.workflow == chosen.workflow]),
        *([] if chosen.event_type is None else [c.wait_event_type == chosen.event_type]),
        *([c.ask.is_not(None)] if chosen.asks else []),
        *([] if end is None else [dialects.ends_with(tx.store.database, c.ask, end)]),
        *bounds.scope_conditions(tx.t, scope, of=c),
        *_after(c.instance_pk, c.step_key, after),
        *([] if last is None else [sa.not_(sa.and_(*_after(c.instance_pk, c.step_key, last)))]),
    ]
    query = sa.select(found).where(*conditions).order_by(c.instance_pk.desc(), c.step_key).limit(limit + 1)
    rows = tx.execute(query).all()
    if len(rows) > limit:
        last = rows[limit - 1].instance_pk, rows[limit - 1].step_key
    return [_to_wait(row) for row in rows[:limit]], last


def _after(pk: Any, key: Any, after: WaitPosition | None) -> list[sa.ColumnElement[bool]]:
    return [] if after is None else [sa.or_(pk < after[0], key > after[1]), pk <= after[0]]


_MAX_WAITS = 1_000
"""How many waits of each index are examined at once. PostgreSQL looks up the instances of all."""


def read_late_waits(tx: Tx, *, limit: int, scope: Scope | None = None) -> list[EventWait]:
    """Return open waits for events after half of their time, those that end first in front, among those examined."""
    c = (found := _examine_first_waits(tx)).c
    since = sa.func.coalesce(c.started_at, c.created_at)
    is_late = since + c.wake_at <= 2 * tx.store.statement_clock()
    query = sa.select(found).where(*_is_awaited(c), is_late, *bounds.scope_conditions(tx.t, scope, of=c))
    return [_to_wait(row) for row in tx.execute(query.order_by(c.wake_at, c.instance_pk, c.step_key).limit(limit))]


def read_other_events(tx: Tx, *, limit: int, scope: Scope | None = None) -> list[tuple[EventWait, str]]:
    """Return open waits with the type of an event that their run has got and not consumed, among those examined."""
    e = tx.t.event
    found = bounds.look_up(
        tx.store.database,
        waits := _examine_first_waits(tx),
        e,
        e.c.type,
        is_it=sa.and_(
            e.c.instance_pk == waits.c.instance_pk,
            e.c.run_number == waits.c.run_number,
            e.c.type != waits.c.wait_event_type,
            e.c.type.not_like(PRIVATE_TYPE_PATTERN),
            e.c.consumed_by_step_key.is_(None),
        ),
    )
    query = sa.select(found).where(*_is_awaited(found.c), *bounds.scope_conditions(tx.t, scope, of=found.c))
    rows = tx.execute(query.order_by(found.c.instance_pk.desc(), found.c.step_key, found.c.type).limit(limit))
    return [(_to_wait(row), row.type) for row in rows]


def _examine_first_waits(tx: Tx) -> Any:
    """Return a subquery of the oldest waits that ask a person, and of the first ones by event type.

    Without partial indexes: those of the newest open instances.
    """
    if tx.store.database is dialects.MARIADB:
        return _examine_instances(tx, None, None)[0]
    s = tx.t.step.c
    asked = _select_waits(tx, OPEN_ASK).order_by(s.instance_pk).limit(_MAX_WAITS)
    first = _select_waits(tx, OPEN_EVENT_WAIT).order_by(s.wait_event_type, s.instance_pk).limit(_MAX_WAITS)
    both = sa.union(*(sa.select(each.subquery()) for each in (asked, first)))
    return _look_up_instances(tx, sa.select(both.subquery()), 2 * _MAX_WAITS)


def _is_awaited(c: Any) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions for a wait of an open instance for an event that users send."""
    return c.wait_event_type.not_like(PRIVATE_TYPE_PATTERN), c.status.in_([each.value for each in _WAITING])


def _examine_waits(tx: Tx, chosen: WaitFilter, after: WaitPosition | None) -> tuple[Any, WaitPosition | None]:
    """Return a subquery of the next waits of an index with their instances, and the last of them if there are more."""
    s = tx.t.step.c
    of_type = [] if chosen.asks else [s.wait_event_type == chosen.event_type]
    query = _select_waits(tx, OPEN_ASK if chosen.asks else OPEN_EVENT_WAIT)
    query = query.where(*of_type, *_after(s.instance_pk, s.step_key, after))
    # An earlier run, which may have the same step, comes last: a list continues after the step.
    query = query.order_by(s.instance_pk.desc(), s.step_key, s.run_number.desc())
    end = query.with_only_columns(s.instance_pk, s.step_key).offset(bounds.MAX_EXAMINED - 1).limit(1)
    last = tx.execute(end).first()
    found = _look_up_instances(tx, query, bounds.MAX_EXAMINED)
    return found, None if last is None else (last.instance_pk, last.step_key)


def _select_waits(tx: Tx, condition: str) -> sa.Select[Any]:
    """Build the SELECT of the waits in the partial index with this condition."""
    s = tx.t.step.c
    is_open: Any = sa.text(condition)
    return sa.select(s.run_number, *(s[name] for name in _STEP_COLUMNS)).where(is_open)


def _look_up_instances(tx: Tx, waits: sa.Select[Any], limit: int) -> Any:
    """Return a subquery of the first waits, with their instances."""
    i, examined = tx.t.instance, waits.limit(limit).subquery("waits")
    is_its = sa.and_(i.c.id == examined.c.instance_pk, i.c.run_number == examined.c.run_number)
    columns = (i.c[name] for name in _INSTANCE_COLUMNS)
    return bounds.look_up(tx.store.database, examined, i, *columns, is_it=is_its)


def _examine_instances(tx: Tx, workflow: str | None, after: WaitPosition | None) -> tuple[Any, WaitPosition | None]:
    """Return a subquery of the waits of the next instances, and where a list continues if there are more instances."""
    i, s = tx.t.instance, tx.t.step
    names = (bounds.read_workflow_names(tx) or [""]) if workflow is None else [workflow]
    statuses = [{"workflow": name, "status": each.value} for name in names for each in _WAITING]

    def is_next(c: Any) -> Sequence[sa.ColumnElement[bool]]:
        return () if after is None else (c.id <= after[0],)

    ranges = [Range(each, "id", is_reversed=True, where=is_next) for each in statuses]
    bound = bounds.divide(ranges)
    examined = bounds.build_union(i, ranges, "run_number", *_INSTANCE_COLUMNS, limit=bound)
    ends = sa.select(sa.func.min(examined.c.id).label("pk")).group_by(examined.c.part)
    end = tx.execute(sa.select(sa.func.max(ends.having(sa.func.count() == bound).subquery().c.pk))).scalar()
    is_open_wait = sa.and_(
        s.c.instance_pk == examined.c.id,
        s.c.run_number == examined.c.run_number,
        s.c.type.in_([each.value for each in (StepType.WAIT, StepType.LINEAR)]),
        s.c.status.in_([each.value for each in (StepStatus.WAITING, StepStatus.LINEAR_WAITING)]),
    )
    columns = (s.c[name] for name in _STEP_COLUMNS)
    found = bounds.look_up(tx.store.database, examined, s, *columns, is_it=is_open_wait)
    return found, None if end is None else (end - 1, "")


def _to_wait(row: Any) -> EventWait:
    return EventWait(
        workflow=row.workflow,
        instance_id=row.instance_id,
        run_number=row.run_number,
        status=Status(row.status),
        wait_event_type=row.wait_event_type,
        step_name=row.name,
        step_key=row.step_key,
        # The row of a linear step exists since the run started; the step waits since its handler was called.
        since=from_us(row.created_at if row.started_at is None else row.started_at),
        wake_at=from_us_or_none(row.wake_at),
        **values.read_ask(row.ask),
    )


def _ref(row: sa.Row[tuple[object, ...]]) -> RunRef:
    return RunRef(row.workflow, row.instance_id, row.run_number)
