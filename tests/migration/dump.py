"""Dumps of a store: SQL that makes the tables, as the migration does, and then inserts the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from celery_durable.store import migrate
from celery_durable.store.engine import Store

FOLDER = Path(__file__).parent / "dumps"


def write(store: Store, path: Path) -> None:
    """Write the tables of a store with all their rows."""
    dialect = store.engine.dialect
    lines = [migrate.render_sql(store)]
    with store.engine.connect() as connection:
        for table in store.tables.metadata.sorted_tables:
            lines.append(f"DELETE FROM {table.name};\n")
            for row in connection.execute(sa.select(table).order_by(*table.primary_key)).mappings():
                insert = sa.insert(table).values(dict(row))
                lines.append(f"{insert.compile(dialect=dialect, compile_kwargs={'literal_binds': True})};\n")
            if dialect.name == "postgresql" and table.autoincrement_column is not None:
                highest = f"(SELECT max(id) FROM {table.name})"
                lines.append(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), {highest});\n")
    path.write_text("".join(lines), encoding="utf-8")


def load(engine: sa.Engine, path: Path) -> None:
    """Run a dump in an empty database."""
    with engine.begin() as connection:
        for statement in path.read_text(encoding="utf-8").split(";\n"):
            if text := statement.strip():
                _execute(connection, text)


def _execute(connection: sa.Connection, statement: str) -> Any:
    # Without parameters, so that no driver looks for placeholders in it.
    cursor: Any = connection.connection.cursor()
    try:
        cursor.execute(statement)
    finally:
        cursor.close()
