"""An instance can be asked to run once more when its run ends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from celery_durable.store.migrations import online_changes
from celery_durable.store.schema.dialects import long_text

revision = "0005"
down_revision = "0004"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    online_changes.add_column(op, f"{prefix}workflow_instance", sa.Column("next_run", long_text()), schema=schema)
