"""Reads for operators across all instances: counts, due runs, leases and waits. Bounded (`bounds`), without locks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable import values
from celery_durable.errors import FilterTooBroad
from celery_durable.model import (
    PRIVATE_TYPE_PATTERN,
    RUNNABLE,
    Count,
    DueRuns,
    EventWait,
    FailureText,
    OverdueRun,
    RunRef,
    Scope,
    Status,
    StatusCount,
    StepStatus,
    StepType,
    duration_us,
    from_us,
    from_us_or_none,
)
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.engine.bounds import Range
from celery_durable.store.instances import lists
from celery_durable.store.instances.lists import InstanceFilter
from celery_durable.store.runs import schedule
from celery_durable.store.runs.history import get_failed_step, to_error_info
from celery_durable.store.runs.schedule import QueueAgenda
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
    if (found := _examine_due(tx, scope)) is None:
        return DueRuns(0)
    c, is_due, limit = found
    query = sa.select(
        sa.func.count().label("examined"),
        sa.func.sum(sa.case((is_due, 1), else_=0)).label("n"),
        sa.func.min(sa.case((is_due, c.run_at))).label("oldest"),
    )
    parts = tx.execute(query.group_by(c.part)).all()
    oldest = min((part.oldest for part in parts if part.oldest is not None), default=None)
    is_exact = all(part.examined < limit for part in parts)
    return DueRuns(sum(int(part.n) for part in parts), is_exact, oldest=from_us_or_none(oldest))


def read_overdue(tx: Tx, *, limit: int, scope: Scope | None = None) -> list[OverdueRun]:
    """Return the runs that `count_overdue` counts, those first that are due for the longest time."""
    if (found := _examine_due(tx, scope)) is None:
        return []
    c, is_due, _ = found
    query = sa.select(c.workflow, c.instance_id, c.run_at).where(is_due).order_by(c.run_at, c.id).limit(limit)
    return [OverdueRun(row.workflow, row.instance_id, from_us(row.run_at)) for row in tx.execute(query)]


def _examine_due(tx: Tx, scope: Scope | None) -> tuple[Any, Any, int] | None:
    """Return the columns of the runs to examine, the condition of the due ones, and the bound of each range."""
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
        return None
    limit = bounds.divide(ranges)
    columns = ("id", "workflow", "instance_id", "run_at", "claim_token", "status")
    c = bounds.build_union(tx.t.instance, ranges, *columns, limit=limit).c
    in_scope = bounds.scope_conditions(tx.t, scope, of=c)
    return c, sa.and_(c.run_at <= now, c.claim_token.is_(None), c.status.in_(_RUNNABLE), *in_scope), limit


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


def group_failures(tx: Tx, *, scope: Scope | None = None) -> list[FailureText]:
    """Group the errored instances by workflow, error and failed steps, the largest group first.

    Of each workflow, the newest instances are examined. A group is not exact if its workflow has more.
    """
    names = bounds.read_workflow_names(tx)
    if not names:
        return []
    ranges = [Range({"workflow": name, "status": Status.ERRORED.value}, "id", is_reversed=True) for name in names]
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
    query = sa.select(*groups.c, i.c.instance_id, i.c.updated_at).join(i, i.c.id == groups.c.newest_pk)
    return [
        FailureText(
            int(row.n),
            int(row.examined) < limit,
            workflow=row.workflow,
            step=get_failed_step(row.failed_steps),
            error=to_error_info(row.error_name, row.message),
            newest_id=row.instance_id,
            newest_at=from_us(row.updated_at),
        )
        for row in tx.execute(query.order_by(groups.c.n.desc(), groups.c.newest_pk.desc()))
    ]


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


_MAX_WAITS = 1_000
"""How many waits the list of an event type examines. PostgreSQL looks up the instances of all of them."""
_INSTANCE_COLUMNS = ("id", "workflow", "instance_id", "status")
_STEP_COLUMNS = (
    "instance_pk", "name", "wait_event_type", "started_at", "created_at", "wake_at", "seq", "step_key", "ask",
)  # fmt: skip


def read_waits(
    tx: Tx,
    *,
    workflow: str | None,
    event_type: str | None,
    to: str | None = None,
    is_asking: bool = False,
    limit: int,
    scope: Scope | None = None,
) -> list[EventWait]:
    """Return open waits for events that users send, those of the newest instances first; raises FilterTooBroad.

    ``is_asking``: only those that ask a person; ``to``: only those that ask this one. The index of such waits or that
    of an event type, if partial, drives their lists. The open instances drive every other list.
    """
    is_asking = is_asking or to is not None
    if tx.store.database is dialects.MARIADB or not (event_type is not None or is_asking):
        bound = bounds.MAX_EXAMINED
        found, cut = _examine_instances(tx, workflow)
    else:
        bound = min(max(_MAX_WAITS, limit), bounds.MAX_EXAMINED)
        of_type: dict[str, object] = {} if is_asking else {"wait_event_type": event_type}
        is_open: Any = sa.text(OPEN_ASK if is_asking else OPEN_EVENT_WAIT)
        driving = Range(of_type, "instance_pk", is_reversed=True, where=lambda _: (is_open,))
        found, cut = _examine_waits(tx, driving, bound)
    c = found.c
    conditions = [
        *_is_awaited(c),
        *([] if workflow is None else [c.workflow == workflow]),
        *([] if event_type is None else [c.wait_event_type == event_type]),
        *([c.ask.is_not(None)] if is_asking else []),
        *([] if to is None else [dialects.ends_with(tx.store.database, c.ask, values.write_addressee(to))]),
        *bounds.scope_conditions(tx.t, scope, of=c),
    ]
    w = sa.select(found).where(*conditions).order_by(c.id.desc(), c.seq, c.step_key).limit(limit).subquery("chosen")
    query = sa.select(cut.c.cut_pk, *w.c).select_from(cut.outerjoin(w, sa.true()))
    rows = tx.execute(query.order_by(w.c.id.desc(), w.c.seq, w.c.step_key)).all()  # one without a wait if there is none
    cut_pk = rows[0].cut_pk
    waits = [_to_wait(row) for row in rows if row.id is not None and (cut_pk is None or row.id > cut_pk)]
    if cut_pk is not None and len(waits) < limit:
        remedy = "name a workflow or an event type. If the filter has both, try each alone"
        raise FilterTooBroad(f"{len(waits)} waits", bound, remedy)
    return waits


def read_late_waits(tx: Tx, *, limit: int, scope: Scope | None = None) -> list[EventWait]:
    """Return open waits for events after half of their time, those that end first in front.

    Only the first waits of their index are examined; without a partial index, those of the newest open instances.
    """
    if tx.store.database is dialects.MARIADB:
        found, _ = _examine_instances(tx, None)
    else:
        is_open: Any = sa.text(OPEN_EVENT_WAIT)
        driving = Range({}, "wait_event_type", then="instance_pk", where=lambda _: (is_open,))
        found, _ = _examine_waits(tx, driving, _MAX_WAITS)
    c = found.c
    since = sa.func.coalesce(c.started_at, c.created_at)
    is_late = since + c.wake_at <= 2 * tx.store.statement_clock()
    query = sa.select(found).where(*_is_awaited(c), is_late, *bounds.scope_conditions(tx.t, scope, of=c))
    return [_to_wait(row) for row in tx.execute(query.order_by(c.wake_at, c.id, c.seq).limit(limit))]


def _is_awaited(c: Any) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions for a wait of an open instance for an event that users send."""
    return c.wait_event_type.not_like(PRIVATE_TYPE_PATTERN), c.status.in_([each.value for each in _WAITING])


def _examine_waits(tx: Tx, driving: Range, bound: int) -> tuple[Any, Any]:
    """Return subqueries of the examined waits with their instances, and of the cut."""
    i, s = tx.t.instance, tx.t.step
    examined = bounds.build_union(s, [driving], "run_number", *_STEP_COLUMNS, limit=bound + 1)
    examined = sa.select(examined).cte("waits")
    is_its = sa.and_(i.c.id == examined.c.instance_pk, i.c.run_number == examined.c.run_number)
    columns = (i.c[name] for name in _INSTANCE_COLUMNS)
    found = bounds.look_up(tx.store.database, examined, i, *columns, is_it=is_its)
    return found, _build_cut(examined, examined.c.instance_pk, bound)


def _examine_instances(tx: Tx, workflow: str | None) -> tuple[Any, Any]:
    """Return subqueries of the waits of the examined instances, and of the cut."""
    i, s = tx.t.instance, tx.t.step
    names = (bounds.read_workflow_names(tx) or [""]) if workflow is None else [workflow]
    statuses = [{"workflow": name, "status": each.value} for name in names for each in _WAITING]
    ranges = [Range(each, "id", is_reversed=True) for each in statuses]
    bound = bounds.divide(ranges)
    examined = bounds.build_union(i, ranges, "run_number", *_INSTANCE_COLUMNS, limit=bound + 1)
    examined = sa.select(examined).cte("instances")
    is_open_wait = sa.and_(
        s.c.instance_pk == examined.c.id,
        s.c.run_number == examined.c.run_number,
        s.c.type.in_([each.value for each in (StepType.WAIT, StepType.LINEAR)]),
        s.c.status.in_([each.value for each in (StepStatus.WAITING, StepStatus.LINEAR_WAITING)]),
    )
    columns = (s.c[name] for name in _STEP_COLUMNS)
    found = bounds.look_up(tx.store.database, examined, s, *columns, is_it=is_open_wait)
    return found, _build_cut(examined, examined.c.id, bound)


def _build_cut(examined: Any, key: sa.ColumnElement[int], bound: int) -> Any:
    """Build the subquery of the instance above which all are examined; null if no range has more than its bound."""
    last = sa.select(sa.func.min(key).label("pk")).group_by(examined.c.part).having(sa.func.count() > bound)
    return sa.select(sa.func.max(last.subquery("last").c.pk).label("cut_pk")).subquery("cut")


def _to_wait(row: Any) -> EventWait:
    asked = values.read_ask(row.ask)
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
        ask=asked.get("ask"),
        to=asked.get("to"),
        schema=asked.get("schema"),
    )


def _ref(row: sa.Row[tuple[object, ...]]) -> RunRef:
    return RunRef(row.workflow, row.instance_id, row.run_number)
