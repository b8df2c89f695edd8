"""Indexes and columns that a migration adds to tables in use, while workers write to them.

PostgreSQL builds such an index CONCURRENTLY, which no transaction may contain. So `migrate.upgrade` gives each
migration a transaction of its own, and builds the index between two of them. A new column takes no time, but waits
until no transaction uses the table, with every later statement behind it. So it waits for two seconds only, and is
tried again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:  # workers and web processes do not load Alembic
    from alembic.operations import Operations

ONLINE = "durable_online"
"""The option of the migration context that says whether an index may be built outside a transaction."""
_COLUMN_LOCK_WAIT_SECONDS = 2
"""How long a new column waits for the transactions that use the table: less than any statement of a worker waits."""
_LOCK_WAIT_SECONDS = 10
"""How long MariaDB waits for the transactions that use the table. Other statements wait behind it."""


def create_index(
    op: Operations, name: str, table: str, columns: list[str], *, schema: str | None, where: str | None = None
) -> None:
    """Create an index of a table in use. ``where`` is the condition of a partial index; MariaDB has none.

    An interrupted migration may be repeated: it keeps an index that exists, and replaces one that is unfinished.
    """
    context = op.get_context()
    condition = None if where is None else sa.text(where)
    match context.dialect.name:
        case "postgresql" if context.opts[ONLINE]:
            with context.autocommit_block():
                if not context.as_sql and _is_unfinished(op, name, schema):
                    op.drop_index(name, table, schema=schema, postgresql_concurrently=True)
                op.create_index(
                    name,
                    table,
                    columns,
                    schema=schema,
                    if_not_exists=True,
                    postgresql_where=condition,
                    postgresql_concurrently=True,
                )
        case "postgresql" | "sqlite":
            op.create_index(
                name,
                table,
                columns,
                schema=schema,
                if_not_exists=True,
                postgresql_where=condition,
                sqlite_where=condition,
            )
        case _:
            # It fails, instead of blocking writers, if MariaDB cannot build the index beside them.
            built = sa.Table(table, sa.MetaData(), *(sa.Column(each) for each in columns), schema=schema)
            create = sa.schema.CreateIndex(sa.Index(name, *built.c), if_not_exists=True)
            ddl = str(create.compile(dialect=context.dialect)).strip()
            op.execute(f"SET STATEMENT lock_wait_timeout = {_LOCK_WAIT_SECONDS} FOR {ddl} ALGORITHM=INPLACE LOCK=NONE")


def replace_index(
    op: Operations, replaced: str, name: str, table: str, columns: list[str], *, schema: str | None, where: str
) -> None:
    """Replace an index of a table in use by a partial one. An interrupted migration may be repeated.

    In a transaction of the caller, the old index is dropped first: the drop's strong lock taken last could deadlock
    with a writer that waits for the new index.
    """
    create = functools.partial(create_index, op, name, table, columns, schema=schema, where=where)
    drop = functools.partial(drop_index, op, replaced, table, schema=schema)
    for change in (create, drop) if op.get_context().opts[ONLINE] else (drop, create):
        change()


def drop_index(op: Operations, name: str, table: str, *, schema: str | None) -> None:
    """Drop an index of a table in use. An interrupted migration may be repeated."""
    context = op.get_context()
    if context.dialect.name == "postgresql" and context.opts[ONLINE]:
        with context.autocommit_block():
            op.drop_index(name, table, schema=schema, if_exists=True, postgresql_concurrently=True)
    else:
        op.drop_index(name, table, schema=schema, if_exists=True)


def add_column(op: Operations, table: str, column: sa.Column[Any], *, schema: str | None) -> None:
    """Add a column to a table in use, again if interrupted. It fails if transactions use the table for two seconds."""
    context = op.get_context()
    if context.dialect.name == "sqlite":
        op.add_column(table, column, schema=schema)
        return
    name = context.dialect.identifier_preparer.format_table(sa.Table(table, sa.MetaData(), schema=schema))
    kind = column.type.compile(context.dialect)
    change = f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {column.name} {kind}".replace(":", "\\:")
    if context.dialect.name != "postgresql":
        op.execute(f"SET STATEMENT lock_wait_timeout = {_COLUMN_LOCK_WAIT_SECONDS} FOR {change}")
        return
    if context.opts[ONLINE]:
        op.execute(f"SET LOCAL lock_timeout = '{_COLUMN_LOCK_WAIT_SECONDS}s'")
    op.execute(change)


def drop_column(op: Operations, table: str, name: str, *, schema: str | None) -> None:
    """Drop a column that nothing needs any more. It waits for the table as `add_column` does."""
    context = op.get_context()
    match context.dialect.name:
        case "postgresql" | "sqlite":
            if context.dialect.name == "postgresql" and context.opts[ONLINE]:
                op.execute(f"SET LOCAL lock_timeout = '{_COLUMN_LOCK_WAIT_SECONDS}s'")
            op.drop_column(table, name, schema=schema)
        case _:
            of = context.dialect.identifier_preparer.format_table(sa.Table(table, sa.MetaData(), schema=schema))
            op.execute(
                f"SET STATEMENT lock_wait_timeout = {_COLUMN_LOCK_WAIT_SECONDS} FOR ALTER TABLE {of}"
                f" DROP COLUMN IF EXISTS {name}"
            )


def _is_unfinished(op: Operations, name: str, schema: str | None) -> bool:
    """Whether an interrupted CREATE INDEX CONCURRENTLY has left an invalid index of this name."""
    query = sa.text(
        "SELECT NOT i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relname = :name AND n.nspname = coalesce(:schema, current_schema())"
    )
    found = op.get_bind().execute(
        query.bindparams(sa.bindparam("schema", type_=sa.String)), {"name": name, "schema": schema}
    )
    return bool(found.scalar())
