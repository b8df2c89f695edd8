"""Waits can ask a person, and events can be the answer of one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from celery_durable.store.migrations import online_changes
from celery_durable.store.schema.dialects import long_text

revision = "0004"
down_revision = "0003"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    step, event = f"{prefix}workflow_step", f"{prefix}workflow_event"
    online_changes.add_column(op, step, sa.Column("ask", long_text()), schema=schema)
    if op.get_context().dialect.name in ("postgresql", "sqlite"):
        is_open = "ask IS NOT NULL AND status = 'waiting'"
        name = f"{prefix}ix_workflow_step_asked"
        # On PostgreSQL it commits, so no transaction waits for the lock of a table while it has that of another.
        online_changes.create_index(op, name, step, ["instance_pk"], schema=schema, where=is_open)
    online_changes.add_column(op, event, sa.Column("actor", sa.String(255)), schema=schema)
