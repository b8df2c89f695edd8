"""Migrations of the tables, with Alembic's scripts but without its global `op` and `context`.

Those belong to the caller: an application may call `upgrade_connection` in its own Alembic migration and go on using
its `op` afterwards. The scripts here get theirs as an argument. Migrations only go forward, and within a major
version they only add. A newer database serves older code.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import sqlalchemy as sa

from celery_durable.errors import SchemaIncomplete, SchemaOutdated
from celery_durable.store import dialects
from celery_durable.store.engine import Store
from celery_durable.store.schema import REVISION

_SCRIPTS = Path(__file__).parent / "migrations"
_LOCK_NAME = "celery_durable.migrate"
_LOCK_KEY = 0x6475_7261_626C_65  # "durable"
_A_DAY_SECONDS = 86_400


def upgrade(store: Store) -> tuple[str | None, str]:
    """Migrate a store's tables. Returns the revisions before (None: no tables) and after."""
    return store.transact(
        lambda tx: upgrade_connection(tx.conn, schema=store.schema, prefix=store.prefix), timeouts=None
    )


def upgrade_connection(
    connection: sa.Connection, *, schema: str | None = None, prefix: str = ""
) -> tuple[str | None, str]:
    """Migrate the tables in the caller's transaction, for instance in its own migration; the caller commits.

    Returns the revisions before and after. On MariaDB every statement that changes tables commits at once, including
    what the caller wrote before.
    """
    with _alone(connection):
        before = _found(connection, schema, prefix)
        if _serves(before):
            return before, before
        _run({"connection": connection}, {}, schema, prefix)
        return before, REVISION


def sql(store: Store) -> str:
    """Return the script that `upgrade` would run on an empty database, for operators who change tables themselves."""
    script = io.StringIO()
    dialect = store.engine.url.get_dialect()()
    _run({"dialect": dialect}, {"as_sql": True, "output_buffer": script}, store.schema, store.prefix)
    return script.getvalue()


def current(store: Store) -> str | None:
    """Return the revision of a store's tables, or None if there are none."""
    return store.read(lambda tx: _found(tx.conn, store.schema, store.prefix))


def check(store: Store) -> None:
    """Raise SchemaOutdated if the tables are older than this code needs."""
    found = current(store)
    if not _serves(found):
        raise SchemaOutdated(found, REVISION)


def verify(store: Store) -> None:
    """Raise SchemaOutdated as `check` does, and SchemaIncomplete if a table or a column is missing.

    Unknown tables and columns belong to a newer revision, and are ignored.
    """
    check(store)
    missing = store.read(lambda tx: list(_missing(tx.conn, store)))
    if missing:
        raise SchemaIncomplete(missing)


def _missing(connection: sa.Connection, store: Store) -> Iterator[str]:
    found = sa.inspect(connection).get_multi_columns(schema=store.schema)
    names = {(schema, table): {column["name"] for column in columns} for (schema, table), columns in found.items()}
    for table in store.tables.metadata.sorted_tables:
        columns = names.get((store.schema, table.name))
        if columns is None:
            yield table.name
        else:
            yield from (f"{table.name}.{column.name}" for column in table.columns if column.name not in columns)


def _serves(found: str | None) -> TypeGuard[str]:
    # Revisions have four digits, so they compare as text in the right order.
    return found is not None and found >= REVISION


def _version_table(prefix: str) -> str:
    return f"{prefix}workflow_schema_version"


def _found(connection: sa.Connection, schema: str | None, prefix: str) -> str | None:
    name = _version_table(prefix)
    if not sa.inspect(connection).has_table(name, schema=schema):
        return None
    version = sa.table(name, sa.column("version_num", sa.String), schema=schema)
    return connection.execute(sa.select(version.c.version_num)).scalar()


def _run(target: dict[str, Any], options: dict[str, Any], schema: str | None, prefix: str) -> None:
    # Imported here, so that workers and web processes never load Alembic.
    from alembic.operations import Operations  # noqa: PLC0415
    from alembic.runtime.migration import MigrationContext, MigrationStep  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    scripts = ScriptDirectory(str(_SCRIPTS))

    def steps(heads: Any, _: MigrationContext) -> list[Any]:
        missing = scripts.iterate_revisions("head", heads, implicit_base=True)
        return [MigrationStep.upgrade_from_script(scripts.revision_map, one) for one in reversed(list(missing))]

    options |= {"fn": steps, "version_table": _version_table(prefix), "version_table_schema": schema}
    context = MigrationContext.configure(**target, opts=options)
    with context.begin_transaction():
        context.run_migrations(op=Operations(context), schema=schema, prefix=prefix)


@contextmanager
def _alone(connection: sa.Connection) -> Iterator[None]:
    """Let one migration of a database run at a time. A second one waits, and finds nothing left to do."""
    match connection.dialect.name:
        case "postgresql":
            patience = connection.execute(sa.text("SELECT current_setting('lock_timeout')")).scalar_one()
            set_timeout = sa.text("SELECT set_config('lock_timeout', :value, true)")
            connection.execute(set_timeout, {"value": "0"})
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))  # until the transaction ends
            connection.execute(set_timeout, {"value": patience})
            yield
        case "sqlite":
            dialects.begin_immediate(connection)
            yield
        case _:
            connection.execute(sa.select(sa.func.get_lock(_LOCK_NAME, _A_DAY_SECONDS)))
            try:
                yield
                # Commit the version's row too, before the next migration reads it.
                connection.exec_driver_sql("COMMIT")
            finally:
                if not connection.invalidated:  # otherwise the lock ended with the connection
                    connection.execute(sa.select(sa.func.release_lock(_LOCK_NAME)))
