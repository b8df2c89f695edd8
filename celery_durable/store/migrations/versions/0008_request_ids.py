"""A request for a run that comes twice has no effect the second time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from celery_durable.store.migrations import online_changes
from celery_durable.store.schema.dialects import long_text

revision = "0008"
down_revision = "0007"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    online_changes.add_column(op, f"{prefix}workflow_run", sa.Column("request_ids", long_text()), schema=schema)
