"""Runs can be asked to stop, so that they can clean up."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from celery_durable.store.migrations import online_changes

revision = "0003"
down_revision = "0002"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    online_changes.add_column(
        op, f"{prefix}workflow_run", sa.Column("cancel_requested_at", sa.BigInteger), schema=schema
    )
