"""Counts of instances that have not ended, by status, for monitors. Each count ends at 10,000 (`bounds`)."""

from __future__ import annotations

from collections.abc import Collection

from celery_durable.model import Count, Status
from celery_durable.store import overview
from celery_durable.store.engine import Tx

LIVE_STATUSES = (Status.ACTIVE, Status.WAITING, Status.PAUSED)


def count_live(tx: Tx, workflows: Collection[str]) -> dict[tuple[str, Status], Count]:
    """Count the active, waiting and paused instances of each workflow, by workflow and status. 0 if there is none."""
    counts = {(workflow, status): Count(0) for workflow in workflows for status in LIVE_STATUSES}
    found = overview.count_by_status(tx, list(workflows), LIVE_STATUSES)
    return counts | {(workflow, status): count for workflow, status, count in found}
