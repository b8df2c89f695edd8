"""The tables to which the steps of engine tests write."""

from __future__ import annotations

import functools

import sqlalchemy as sa
from sqlalchemy.schema import CreateTable

METADATA = sa.MetaData()
ledger = sa.Table(
    "author_ledger",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("instance", sa.String(100), nullable=False),
    sa.Column("run", sa.Integer, nullable=False),
    sa.Column("step", sa.String(256), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
)
"""What the steps named "book..." write. It has no unique key: a step that is done twice shows."""
names = sa.Table("author_names", METADATA, sa.Column("name", sa.String(100), primary_key=True))
"""A table with a unique key, to violate."""


@functools.cache
def empty_tables(dialect_name: str) -> list[str]:
    """What makes the authors' tables in a new database, and empties those that an earlier world has left."""
    dialect = sa.make_url(f"{dialect_name}://").get_dialect()()
    made = [str(CreateTable(table, if_not_exists=True).compile(dialect=dialect)) for table in METADATA.sorted_tables]
    return made + [f"DELETE FROM {table.name}" for table in METADATA.sorted_tables]
