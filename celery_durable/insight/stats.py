"""Operations that read across all instances, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from datetime import datetime, timedelta
from typing import cast

from celery_durable.model import (
    EventWait,
    FailureText,
    Heartbeat,
    OverdueRun,
    Page,
    QueueLength,
    Stats,
    TaskQueue,
    WaitFilter,
)
from celery_durable.operations.context import OperationContext, check_limit
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.engine import Tx
from celery_durable.store.instances import overview
from celery_durable.store.instances.overview import ClaimedRun

_ANY_WAIT = WaitFilter()


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

    def task_queues(self) -> dict[str, TaskQueue]:
        """Return the queues in which tasks of steps wait: for how long, how many, and whether a worker consumes them.

        The oldest 1,000 tasks are examined. Workers of applications without Durable are unknown here.
        """
        now, beats = self._context.store.read(heartbeats.read)
        consumed = {queue for beat in beats if not beat.is_silent(now) for queue in beat.queues}
        found: dict[str, TaskQueue] = {}
        for named, task, sent_at, count in self._context.store.read(lost_tasks.read_oldest_sent):
            queue = named or (None if task is None else self._context.find_task_queue(task))
            if queue is not None:
                known = found.get(queue, TaskQueue(timedelta(0), 0, is_consumed=queue in consumed))
                found[queue] = replace(known, age=max(known.age, now - sent_at), count=known.count + count)
        return found

    def overdue(self, *, limit: int = 100) -> list[OverdueRun]:
        """Return the runs that are due and that no worker has claimed, those first that wait for the longest time."""
        return self._context.read_list(lambda tx: overview.read_overdue(tx, limit=limit, scope=self._context.scope))

    def failures(self) -> list[FailureText]:
        """Group the errored instances by workflow, failed step, error and the first characters of its message."""
        return self._context.read_list(lambda tx: overview.group_failures(tx, scope=self._context.scope))

    def processes(self) -> tuple[datetime, tuple[Heartbeat, ...]]:
        """Return the database's time, and the heartbeats of dispatchers and workers, most recently seen first."""
        return self._context.store.read(heartbeats.read)

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
