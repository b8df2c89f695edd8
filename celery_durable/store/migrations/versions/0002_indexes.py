"""Indexes for what people read across all instances: waits by event type, and instances by their end.

Both are built while workers write to the tables.
"""

from __future__ import annotations

from alembic.operations import Operations

from celery_durable.store import online_changes

revision = "0002"
down_revision = "0001"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    online_changes.create_index(
        op,
        f"{prefix}ix_workflow_run_completed",
        f"{prefix}workflow_run",
        ["completed_at"],
        schema=schema,
        where="completed_at IS NOT NULL",
    )
    # MariaDB has no partial indexes, and an entry for each step would cost more than the search for waits gains.
    if op.get_context().dialect.name in ("postgresql", "sqlite"):
        online_changes.create_index(
            op,
            f"{prefix}ix_workflow_step_waiting",
            f"{prefix}workflow_step",
            ["wait_event_type", "instance_pk"],
            schema=schema,
            where="status IN ('waiting', 'WAITING') AND type IN ('waitForEvent', 'linear')",
        )
