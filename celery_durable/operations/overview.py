"""The verbs that look at all instances at once, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_durable.model import Status
from celery_durable.operations.base import OperationsBase
from celery_durable.store import overview
from celery_durable.store.engine import Tx
from celery_durable.store.overview import EventWait, Lease, Overdue


@dataclass(frozen=True, slots=True)
class Stats:
    """How many instances are where. ``counts``: workflow, status, how many; those with none are left out."""

    counts: Sequence[tuple[str, Status, int]]
    overdue: Overdue


class OverviewOperations(OperationsBase):
    """The verbs."""

    def stats(self) -> Stats:
        """Counts by workflow and status, and what is due: two reads of indexes, as long as there are instances."""

        def work(tx: Tx) -> Stats:
            return Stats(overview.counts(tx, scope=self._scope), overview.overdue(tx, scope=self._scope))

        return self._store.read(work)

    def leases(self, *, limit: int = 100) -> list[Lease]:
        """Who works on what, those whose leases end first first."""
        return self._store.read(
            lambda tx: overview.leases(tx, limit=limit, lease=self._settings.lease, scope=self._scope)
        )

    def waits(self, *, workflow: str | None = None, event_type: str | None = None, limit: int = 100) -> list[EventWait]:
        """Which steps wait for an event, those of the newest instances first."""
        asked: dict[str, Any] = {"workflow": workflow, "event_type": event_type, "limit": limit, "scope": self._scope}
        return self._store.read(lambda tx: overview.waits(tx, **asked))
