"""A table of the attempts that did not succeed, and of the deaths of workers.

Workers of the previous version write nothing to it, and go on.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    # MariaDB commits each statement by itself. An interrupted migration may be repeated.
    is_mariadb = op.get_context().dialect.name in ("mysql", "mariadb")
    options: dict[str, Any] = {"schema": schema, "if_not_exists": is_mariadb}
    op.create_table(
        f"{prefix}workflow_attempt",
        sa.Column("id", BIG_ID, primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280)),
        sa.Column("item", sa.Integer),
        sa.Column("attempt", sa.Integer),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("error_name", sa.String(255), nullable=False),
        sa.Column("error_message", LONG_TEXT, nullable=False),
        sa.Column("traceback", LONG_TEXT),
        sa.Column("file", sa.String(255)),
        sa.Column("line", sa.Integer),
        sa.Column("node", sa.String(255)),
        sa.Column("pid", sa.BigInteger),
        sa.Column("task_id", sa.String(255)),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_nopad_bin",
        mariadb_engine="InnoDB",
        mariadb_charset="utf8mb4",
        mariadb_collate="utf8mb4_nopad_bin",
        **options,
    )
    op.create_index(
        f"{prefix}ix_workflow_attempt_run",
        f"{prefix}workflow_attempt",
        ["instance_pk", "run_number", "id"],
        **options,
    )
