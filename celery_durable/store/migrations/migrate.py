"""Migrations of the tables, with Alembic's scripts but without its global `op` and `context`.

In an application's own migration (`upgrade_connection`), Alembic's globals belong to that one. So the scripts here get
an `op` as an argument. Migrations only go forward. What one may change: docs/development/migrations.md.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import sqlalchemy as sa

from celery_durable.errors import SchemaIncomplete, SchemaOutdated
from celery_durable.store.engine import Store, Tx, drivers
from celery_durable.store.engine.faults import Fault, classify_fault
from celery_durable.store.migrations.online_changes import ONLINE
from celery_durable.store.schema.tables import REVISION

logger = logging.getLogger("celery_durable.store")

_SCRIPTS = Path(__file__).parent
_LOCK_NAME = "celery_durable.migrate"
_LOCK_KEY = 0x6475_7261_626C_65  # "durable"
_LOCK_TIMEOUT_SECONDS = 86_400
_LOCK_TIMEOUT_IN_TRANSACTION = "10min"
_LOCK_POLL_SECONDS = 0.2


def upgrade(store: Store) -> tuple[str | None, str]:
    """Migrate a store's tables while workers use them. Returns the revision before (None: no tables) and after."""
    if store.database.name != "postgresql":
        return store.transact(
            lambda tx: upgrade_connection(tx.conn, schema=store.schema, prefix=store.prefix), timeouts=None
        )
    # It asks for the lock again and again: a statement that waits keeps a snapshot, and PostgreSQL builds no index
    # CONCURRENTLY while there are older snapshots.
    while (found := store.transact(lambda tx: _upgrade_online(tx, store), timeouts=None)) is None:
        store.runtime.sleep(_LOCK_POLL_SECONDS)
    return found


def _upgrade_online(tx: Tx, store: Store) -> tuple[str | None, str] | None:
    """Migrate on a second connection, where an index can be built outside a transaction; ``tx`` only holds the lock.

    Returns None if another migration has it, or if a new column did not get the lock of its table.
    """
    if not tx.execute(sa.select(sa.func.pg_try_advisory_xact_lock(_LOCK_KEY))).scalar_one():
        return None
    before = _read_version_row(tx.conn, store.schema, store.prefix)
    if _is_new_enough(before):
        return before, before
    # A portal keeps its snapshot until the next statement, also of a finished query. This statement has none.
    tx.conn.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
    with store.engine.connect() as connection:
        try:
            if store.keeps_session_settings:
                # Before it builds an index, PostgreSQL waits for the transactions that use the table, as for locks.
                connection.exec_driver_sql("SET lock_timeout = 0")
                connection.exec_driver_sql("SET statement_timeout = 0")
                connection.commit()
            # Else the timeouts of the role apply. An index that did not get its locks is built again.
            _run_scripts({"connection": connection}, {ONLINE: True}, store.schema, store.prefix)
        except sa.exc.OperationalError as exc:
            if classify_fault(exc) is not Fault.RETRY:
                raise
            logger.info("The migration waits for transactions that use its table, and is tried again: %s", exc.orig)
            return None
        finally:
            connection.invalidate()  # closes it, so that these settings are in no pool
    return before, REVISION


def upgrade_connection(
    connection: sa.Connection, *, schema: str | None = None, prefix: str = ""
) -> tuple[str | None, str]:
    """Migrate the tables in the caller's transaction, for example in a migration of the application.

    The caller commits, but on MariaDB every statement that changes tables commits at once. On PostgreSQL, new indexes
    of large tables block their writers until the commit, and replaced ones their readers, too; `upgrade` does not.
    Returns the revisions before and after.
    """
    with _migration_lock(connection):
        before = _read_version_row(connection, schema, prefix)
        if _is_new_enough(before):
            return before, before
        _run_scripts({"connection": connection}, {ONLINE: False}, schema, prefix)
        return before, REVISION


def render_sql(store: Store) -> str:
    """Return the SQL that `upgrade` runs on an empty database, for operators who change tables by hand."""
    script = io.StringIO()
    dialect = store.engine.url.get_dialect()()
    _run_scripts(
        {"dialect": dialect}, {"as_sql": True, "output_buffer": script, ONLINE: True}, store.schema, store.prefix
    )
    return script.getvalue()


def read_revision(store: Store) -> str | None:
    """Return the revision of a store's tables, or None if there are no tables."""
    return store.read(lambda tx: _read_version_row(tx.conn, store.schema, store.prefix))


def check_revision(store: Store) -> None:
    """Raise SchemaOutdated if the tables are older than this code needs."""
    found = read_revision(store)
    if not _is_new_enough(found):
        raise SchemaOutdated(found, REVISION)


def check_tables(store: Store) -> None:
    """Raise SchemaOutdated as `check_revision` does, and SchemaIncomplete if a table or a column is missing."""
    check_revision(store)
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


def _is_new_enough(found: str | None) -> TypeGuard[str]:
    # Revisions have four digits, so they compare as text in the right order.
    return found is not None and found >= REVISION


def version_table(prefix: str) -> str:
    """Return the name of the table that holds the revision."""
    return f"{prefix}workflow_schema_version"


def _read_version_row(connection: sa.Connection, schema: str | None, prefix: str) -> str | None:
    name = version_table(prefix)
    if not sa.inspect(connection).has_table(name, schema=schema):
        return None
    version = sa.table(name, sa.column("version_num", sa.String), schema=schema)
    return connection.execute(sa.select(version.c.version_num)).scalar()


def _run_scripts(target: dict[str, Any], options: dict[str, Any], schema: str | None, prefix: str) -> None:
    # Imported here so that workers and web processes do not load Alembic.
    from alembic.operations import Operations  # noqa: PLC0415
    from alembic.runtime.migration import MigrationContext, MigrationStep  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    scripts = ScriptDirectory(str(_SCRIPTS))

    def steps(heads: Any, _: MigrationContext) -> list[Any]:
        missing = scripts.iterate_revisions("head", heads, implicit_base=True)
        return [MigrationStep.upgrade_from_script(scripts.revision_map, script) for script in reversed(list(missing))]

    options |= {
        "fn": steps,
        "version_table": version_table(prefix),
        "version_table_schema": schema,
        "transaction_per_migration": True,
    }
    context = MigrationContext.configure(**target, opts=options)
    with context.begin_transaction():
        context.run_migrations(op=Operations(context), schema=schema, prefix=prefix)


@contextmanager
def _migration_lock(connection: sa.Connection) -> Iterator[None]:
    """Let one migration of a database run at a time. A second one waits, and then finds the tables up to date."""
    match connection.dialect.name:
        case "postgresql":
            lock_timeout = connection.execute(sa.text("SELECT current_setting('lock_timeout')")).scalar_one()
            set_timeout = sa.text("SELECT set_config('lock_timeout', :value, true)")
            # `upgrade` may hold the lock and wait, for its indexes, until the caller's transaction ends.
            connection.execute(set_timeout, {"value": _LOCK_TIMEOUT_IN_TRANSACTION})
            connection.execute(
                sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY))
            )  # released at the end of the transaction
            connection.execute(set_timeout, {"value": lock_timeout})
            yield
        case "sqlite":
            drivers.begin_immediate(connection)
            yield
        case _:
            connection.execute(sa.select(sa.func.get_lock(_LOCK_NAME, _LOCK_TIMEOUT_SECONDS)))
            try:
                yield
                # Commits the row with the revision, which the next migration reads as soon as it has the lock.
                connection.exec_driver_sql("COMMIT")
            finally:
                if not connection.invalidated:  # the lock of a lost connection is released already
                    connection.execute(sa.select(sa.func.release_lock(_LOCK_NAME)))
