"""Columns and indexes that differ between the databases."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import mysql


def big_id() -> sa.types.TypeEngine[int]:
    """A 64-bit key. SQLite generates values only for columns of type INTEGER."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def long_text() -> sa.types.TypeEngine[str]:
    """Text without a small limit: MariaDB's TEXT holds only 64 KiB."""
    return sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def partial_index(name: str, *columns: str, where: str) -> sa.Index:
    """Return an index of the rows for which ``where`` holds; of all rows on MariaDB, which has no partial indexes."""
    return sa.Index(name, *columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))


def partial_index_only(name: str, *columns: str, where: str) -> sa.Index:
    """Return an index of the rows for which ``where`` holds; MariaDB gets none."""
    index = partial_index(name, *columns, where=where)
    return index.ddl_if(dialect=("postgresql", "sqlite"))  # type: ignore[arg-type]  # its type lacks tuples


def full_index_only(name: str, *columns: str) -> sa.Index:
    """Return an index of all rows that only MariaDB gets, in place of a partial index."""
    return sa.Index(name, *columns).ddl_if(dialect=("mysql", "mariadb"))  # type: ignore[arg-type]  # as above
