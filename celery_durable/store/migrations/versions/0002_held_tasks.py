"""Lost tasks are found by the lists that workers write, without inventories and markers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from celery_durable.store.migrations import online_changes

revision = "0002"
down_revision = "0001"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    heartbeat, item = f"{prefix}workflow_heartbeat", f"{prefix}workflow_item"
    for table, name in ((heartbeat, "listed_at"), (heartbeat, "silent_at"), (item, "missing_at")):
        online_changes.add_column(op, table, sa.Column(name, sa.BigInteger), schema=schema)
    for name in ("inventory", "answered_inventory", "received_markers"):
        online_changes.drop_column(op, heartbeat, name, schema=schema)
