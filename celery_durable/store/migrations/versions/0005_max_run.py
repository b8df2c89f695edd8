"""A column for how long each run of an instance may take.

Workers of the previous version do not read it. They limit a run as its workflow says.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from celery_durable.store import online_changes

revision = "0005"
down_revision = "0004"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    table = f"{prefix}workflow_instance"
    online_changes.add_column(op, table, sa.Column("max_run_us", sa.BigInteger), schema=schema)
