"""A smaller index of the items of maps, without those that have ended. An answer no longer writes to it.

MariaDB has no partial indexes, so it keeps the index of all items.
"""

from __future__ import annotations

from alembic.operations import Operations

from celery_durable.store import online_changes

revision = "0003"
down_revision = "0002"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    if op.get_context().dialect.name not in ("postgresql", "sqlite"):
        return
    table = f"{prefix}workflow_item"
    online_changes.replace_index(
        op,
        f"{prefix}ix_workflow_item_status",
        f"{prefix}ix_workflow_item_open",
        table,
        ["instance_pk", "run_number", "step_key", "status", "position"],
        schema=schema,
        where="status IN ('pending', 'sent', 'failed')",
    )
