"""Columns and indexes that differ between the databases."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable.store.dialects import MARIADB, Database

_LONG_TEXT_BYTES = 2**32 - 1
"""MariaDB makes a column LONGTEXT, the type that holds so many. To name that type imports its dialect."""


def choose_options(database: Database | None, **options: Any) -> dict[str, Any]:
    """Return the options of a table or an index that are for this database; all of them for None.

    SQLAlchemy imports the dialect of each option that it is given. All three take 30 ms of CPU more than one.
    """
    if database is None:
        return options
    names = ("mysql", "mariadb") if database is MARIADB else (database.name,)
    return {name: value for name, value in options.items() if name.partition("_")[0] in names}


def big_id() -> sa.types.TypeEngine[int]:
    """A 64-bit key. SQLite generates values only for columns of type INTEGER."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def long_text() -> sa.types.TypeEngine[str]:
    """Text without a small limit: MariaDB's TEXT holds only 64 KiB."""
    return sa.Text().with_variant(sa.Text(_LONG_TEXT_BYTES), "mysql", "mariadb")


def partial_index(database: Database | None, name: str, *columns: str, where: str) -> sa.Index:
    """Return an index of the rows for which ``where`` holds; of all rows on MariaDB, which has no partial indexes."""
    condition = sa.text(where)
    return sa.Index(name, *columns, **choose_options(database, postgresql_where=condition, sqlite_where=condition))


def partial_index_only(database: Database | None, name: str, *columns: str, where: str) -> sa.Index:
    """Return an index of the rows for which ``where`` holds; MariaDB gets none."""
    index = partial_index(database, name, *columns, where=where)
    return index.ddl_if(dialect=("postgresql", "sqlite"))  # type: ignore[arg-type]  # its type lacks tuples


def full_index_only(name: str, *columns: str) -> sa.Index:
    """Return an index of all rows that only MariaDB gets, in place of a partial index."""
    return sa.Index(name, *columns).ddl_if(dialect=("mysql", "mariadb"))  # type: ignore[arg-type]  # as above
