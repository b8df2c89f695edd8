"""Steps and workflows can share limits: how many hold one at once, and how many start in a time."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0006"
down_revision = "0005"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    is_mariadb = op.get_context().dialect.name in ("mysql", "mariadb")
    table: dict[str, Any] = {
        "schema": schema,
        "if_not_exists": is_mariadb,  # MariaDB commits each statement by itself
        "mysql_engine": "InnoDB",
        "mysql_charset": "utf8mb4",
        "mysql_collate": "utf8mb4_nopad_bin",
        "mariadb_engine": "InnoDB",
        "mariadb_charset": "utf8mb4",
        "mariadb_collate": "utf8mb4_nopad_bin",
    }
    op.create_table(
        f"{prefix}workflow_limit",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("at_once", sa.Integer),
        sa.Column("rate", sa.String(64)),
        sa.Column("set_at_once", sa.Integer),
        sa.Column("set_rate", sa.String(64)),
        sa.Column("set_by", sa.String(255)),
        sa.Column("next_grant_at", sa.BigInteger, nullable=False),
        sa.Column("next_start_at", sa.BigInteger, nullable=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        **table,
    )
    op.create_table(
        f"{prefix}workflow_hold",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fair_key", sa.String(255), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("token", sa.String(36)),
        sa.Column("asked_at", sa.BigInteger, nullable=False),
        sa.Column("granted_at", sa.BigInteger),
        sa.Column("start_at", sa.BigInteger),
        sa.Column("check_at", sa.BigInteger),
        sa.Column("lapses", sa.Integer, nullable=False),
        **table,
    )

    def index(name: str, columns: list[str], where: str | None = None) -> None:
        condition = None if where is None else sa.text(where)
        op.create_index(
            f"{prefix}ix_workflow_hold_{name}",
            f"{prefix}workflow_hold",
            columns,
            schema=schema,
            if_not_exists=is_mariadb,
            postgresql_where=condition,
            sqlite_where=condition,
        )

    if is_mariadb:
        index("state", ["state", "name", "key", "fair_key", "seq"])
    else:
        index("waiting", ["name", "key", "fair_key", "seq"], "state = 'waiting'")
        index("active", ["name", "key"], "state IN ('held', 'granted')")
    index("check", ["check_at"], "check_at IS NOT NULL")
