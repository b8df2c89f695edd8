"""Operations that read across all instances, for operators."""

from __future__ import annotations

from celery_durable.model import EventWait, Stats
from celery_durable.operations.context import OperationContext
from celery_durable.store import overview
from celery_durable.store.engine import Tx
from celery_durable.store.overview import ClaimedRun


class StatsOperations:
    """The operations that read across all instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read(self) -> Stats:
        """Count the instances by workflow and status, and the overdue runs.

        Each count ends at 10,000, so the cost does not grow with the number of instances.
        """

        def work(tx: Tx) -> Stats:
            return Stats(
                overview.count_instances(tx, scope=self._context.scope),
                overview.count_overdue(tx, scope=self._context.scope),
            )

        return self._context.read_list(work)

    def leases(self, *, limit: int = 100) -> list[ClaimedRun]:
        """Return the runs that workers hold, earliest end of the lease first."""
        return self._context.read_list(
            lambda tx: overview.read_leases(
                tx, limit=limit, lease=self._context.settings.lease, scope=self._context.scope
            )
        )

    def waits(self, *, workflow: str | None = None, event_type: str | None = None, limit: int = 100) -> list[EventWait]:
        """Return the steps that wait for an event, those of the newest instances first."""
        return self._context.read_list(
            lambda tx: overview.read_waits(
                tx, workflow=workflow, event_type=event_type, limit=limit, scope=self._context.scope
            )
        )
