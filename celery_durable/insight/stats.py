"""Operations that read across all instances, for operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timedelta
from typing import cast

from celery_durable.insight.explain.waits import find_near_type
from celery_durable.model import (
    DueRuns,
    EventWait,
    FailureText,
    Heartbeat,
    LimitRecord,
    Page,
    QueueLength,
    Stats,
    StatusCount,
    StuckRun,
    TaskQueue,
    WaitFilter,
)
from celery_durable.operations.context import OperationContext, check_limit
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.engine import Tx, server_info
from celery_durable.store.instances import limit_reads, overview
from celery_durable.store.instances.overview import ClaimedRun
from celery_durable.store.runs import outbox, schedule
from celery_durable.store.runs.schedule import Agenda

_ANY_WAIT = WaitFilter()
_MAX_LIMITS = _MAX_OTHERS = 100


@dataclass(frozen=True, slots=True)
class Health:
    """What the database says, at one moment, about its processes and their work."""

    now: datetime
    heartbeats: tuple[Heartbeat, ...]
    """Those of dispatchers and workers, most recently seen first."""
    is_read_only: bool
    agenda: Agenda
    due: DueRuns
    stuck: Sequence[StuckRun]
    """Of each workflow the run that is due, or whose worker's lease has ended, longest; earliest first."""
    given_up: int
    """How many messages of the outbox were given up."""
    task_queues: Mapping[str, TaskQueue]
    limits: Sequence[LimitRecord]
    """The first 100 limits and keys for which steps wait, in order."""


class StatsOperations:
    """The operations that read across all instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read(self, queues: Mapping[str, int | None] | None = None) -> Stats:
        """Count instances by workflow and status, and due runs, to 10,000. ``queues``: the lengths of queues."""

        def work(tx: Tx) -> Stats:
            return Stats(
                overview.count_instances(tx, scope=self._context.scope),
                overview.count_overdue(tx, scope=self._context.scope),
                [QueueLength(*each) for each in (queues or {}).items()],
            )

        return self._context.read_list(work)

    def health(self) -> Health:
        """Read the state of processes and of their work. A replica, which lags, would make work look late."""

        def work(tx: Tx) -> Health:
            now, beats = heartbeats.read(tx)
            agenda = schedule.read(tx)
            due, stuck = overview.read_overdue(tx, agenda, scope=self._context.scope)
            return Health(
                now,
                beats,
                server_info.is_read_only(tx),
                agenda,
                due,
                stuck,
                outbox.count_given_up(tx),
                self._read_task_queues(tx, now, beats),
                limit_reads.read_limits(tx, is_awaited=True, limit=_MAX_LIMITS),
            )

        return self._context.store.read(work)

    def task_queues(self) -> dict[str, TaskQueue]:
        """Return the queues in which tasks of steps wait: for how long, how many, and whether a worker consumes them.

        The oldest 1,000 tasks are examined. Workers of applications without Durable are unknown here.
        """
        return self._context.store.read(lambda tx: self._read_task_queues(tx, *heartbeats.read(tx)))

    def _read_task_queues(self, tx: Tx, now: datetime, beats: Sequence[Heartbeat]) -> dict[str, TaskQueue]:
        consumed = {queue for beat in beats if not beat.is_silent(now) for queue in beat.queues}
        found: dict[str, TaskQueue] = {}
        for named, task, sent_at, count in lost_tasks.read_oldest_sent(tx):
            queue = named or (None if task is None else self._context.find_task_queue(task))
            if queue is not None:
                known = found.get(queue, TaskQueue(timedelta(0), 0, is_consumed=queue in consumed))
                found[queue] = replace(known, age=max(known.age, now - sent_at), count=known.count + count)
        return found

    def counts(self) -> list[StatusCount]:
        """Count instances by workflow and status, without zeros, to 10,000."""
        return self._context.read_list(lambda tx: overview.count_instances(tx, scope=self._context.scope))

    def failures(self, workflows: Collection[str]) -> list[FailureText]:
        """Group the errored instances of these workflows by failed step, error and the beginning of its message."""
        scope = self._context.scope
        return self._context.read_list(lambda tx: overview.group_failures(tx, workflows, scope=scope))

    def leases(self, *, limit: int = 100) -> list[ClaimedRun]:
        """Return the runs that workers hold, earliest end of the lease first."""
        return self._context.read_list(
            lambda tx: overview.read_leases(
                tx, limit=limit, lease=self._context.settings.lease, scope=self._context.scope
            )
        )

    def waits(self, chosen: WaitFilter = _ANY_WAIT, *, cursor: str | None = None, limit: int = 25) -> Page[EventWait]:
        """Return a page of the steps that wait for an event, those of the newest instances first."""
        check_limit(limit)
        cursors = self._context.cursors("waits", *astuple(chosen))
        after = None if cursor is None else cast("tuple[int, str]", cursors.read(cursor))
        found, last = self._context.read_list(
            lambda tx: overview.read_waits(tx, chosen, after=after, limit=limit, scope=self._context.scope)
        )
        return Page(tuple(found), None if last is None else cursors.write(*last))

    def late_waits(self, *, limit: int) -> list[EventWait]:
        """Return the steps that have waited for an event for more than half of their time, earliest end first."""
        scope = self._context.scope
        return self._context.read_list(lambda tx: overview.read_late_waits(tx, limit=limit, scope=scope))

    def mistyped_events(self) -> list[tuple[EventWait, str]]:
        """Return steps that wait for an event, with an event of their run whose type is nearly the same."""
        scope = self._context.scope
        found = self._context.read_list(lambda tx: overview.read_other_events(tx, limit=_MAX_OTHERS, scope=scope))
        return [(wait, other) for wait, other in found if find_near_type(wait.wait_event_type, [other]) is not None]
