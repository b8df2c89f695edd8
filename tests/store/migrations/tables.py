"""The tables of a database: their names, what the database says of them, and dropping them."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

TABLES = {
    "workflow_instance",
    "workflow_run",
    "workflow_step",
    "workflow_event",
    "workflow_log",
    "workflow_heartbeat",
    "workflow_topic_wait",
    "workflow_emission",
    "workflow_audit",
    "workflow_outbox",
    "workflow_label",
    "workflow_published",
    "workflow_item",
    "workflow_database",
    "workflow_queue",
    "workflow_attempt",
    "workflow_limit",
    "workflow_hold",
}
VERSION_TABLE = "workflow_schema_version"


def drop_all(engine: sa.Engine, schema: str | None = None) -> None:
    """Drop all tables. No reflection, which takes as long as a migration."""
    names = sa.inspect(engine).get_table_names(schema=schema)
    with engine.begin() as connection:
        for name in names:
            connection.execute(sa.schema.DropTable(sa.Table(name, sa.MetaData(schema=schema))))


def described(engine: sa.Engine, schema: str | None = None) -> dict[str, Any]:
    """What the database itself says of its tables."""
    look = sa.inspect(engine)

    def sort(rows: list[Any]) -> list[str]:
        return sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)

    return {
        name: {
            "columns": [
                (c["name"], str(c["type"].compile(engine.dialect)), c["nullable"], c["default"], c.get("autoincrement"))
                for c in look.get_columns(name, schema=schema)
            ],
            "primary key": look.get_pk_constraint(name, schema=schema),
            "unique": sort(look.get_unique_constraints(name, schema=schema)),
            "indexes": sort(look.get_indexes(name, schema=schema)),
            "foreign keys": look.get_foreign_keys(name, schema=schema),
            "checks": look.get_check_constraints(name, schema=schema),
            "options": look.get_table_options(name, schema=schema) if engine.dialect.name == "mysql" else None,
        }
        for name in look.get_table_names(schema=schema)
        if not name.endswith(VERSION_TABLE)
    }
