"""Steps of linear workflows can ask a person, too."""

from __future__ import annotations

from alembic.operations import Operations

from celery_durable.store.migrations import online_changes

revision = "0007"
down_revision = "0006"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    if op.get_context().dialect.name not in ("postgresql", "sqlite"):
        return  # MariaDB has no partial indexes
    online_changes.replace_index(
        op,
        f"{prefix}ix_workflow_step_asked",
        f"{prefix}ix_workflow_step_asking",
        f"{prefix}workflow_step",
        ["instance_pk"],
        schema=schema,
        where="ask IS NOT NULL AND status IN ('waiting', 'WAITING')",
    )
