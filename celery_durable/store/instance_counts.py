"""Counts of instances that have not ended, by status. The query reads only an index."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from celery_durable.model import Status
from celery_durable.store.engine import Tx

LIVE_STATUSES = (Status.ACTIVE, Status.WAITING, Status.PAUSED)


def count_live(tx: Tx, workflows: Collection[str]) -> dict[tuple[str, Status], int]:
    """Count the active, waiting and paused instances of each workflow, by workflow and status. 0 if there is none."""
    counts = {(workflow, status): 0 for workflow in workflows for status in LIVE_STATUSES}
    i = tx.t.instance.c
    where = (i.workflow.in_(list(workflows)), i.status.in_([status.value for status in LIVE_STATUSES]))
    rows = tx.execute(
        sa.select(i.workflow, i.status, sa.func.count().label("n")).where(*where).group_by(i.workflow, i.status)
    )
    return counts | {(row.workflow, Status(row.status)): row.n for row in rows}
