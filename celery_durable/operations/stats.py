"""Operations that read across all instances, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from celery_durable.model import Status
from celery_durable.operations.context import OperationContext
from celery_durable.store import overview
from celery_durable.store.engine import Tx
from celery_durable.store.overview import ClaimedRun, EventWait, Overdue


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of instances as (workflow, status, count) without zeros, and the overdue runs."""

    counts: Sequence[tuple[str, Status, int]]
    overdue: Overdue


class StatsOperations:
    """The operations that read across all instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read(self) -> Stats:
        """Count the instances by workflow and status, and the overdue runs.

        The cost grows with the number of instances.

        Returns:
            The counts, within the caller's scope.
        """

        def work(tx: Tx) -> Stats:
            return Stats(
                overview.count_instances(tx, scope=self._context.scope),
                overview.count_overdue(tx, scope=self._context.scope),
            )

        return self._context.store.read(work)

    def leases(self, *, limit: int = 100) -> list[ClaimedRun]:
        """Return the runs that workers hold, earliest end of the lease first.

        Args:
            limit: The largest number of runs to return.

        Returns:
            Each claimed run with its worker node, its Celery task and the end of its lease.
        """
        return self._context.store.read(
            lambda tx: overview.read_leases(
                tx, limit=limit, lease=self._context.settings.lease, scope=self._context.scope
            )
        )

    def waits(self, *, workflow: str | None = None, event_type: str | None = None, limit: int = 100) -> list[EventWait]:
        """Return the steps that wait for an event, those of the newest instances first.

        Args:
            workflow: Return only steps of this workflow.
            event_type: Return only steps that wait for this type.
            limit: The largest number of steps to return.

        Returns:
            Each step with its instance, its deadline and its event type.
        """
        return self._context.store.read(
            lambda tx: overview.read_waits(
                tx, workflow=workflow, event_type=event_type, limit=limit, scope=self._context.scope
            )
        )
