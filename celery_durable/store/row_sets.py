"""Rows as one parameter: statements that read or change many rows at once.

The rows are a JSON list of objects. So a statement is compiled once for any number of rows, and takes one round trip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.store.dialects import MARIADB, SQLITE, Database

_MAX_ROWS, _MAX_CHARACTERS = 1_000, 2_000_000
"""The bounds of one statement. A server refuses statements that are too long: MariaDB's default is 16 MiB."""


def encode(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as the text of the parameter."""
    return json.dumps(rows, ensure_ascii=False)


def encode_in_parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows as texts, each small enough for the parameter of one statement."""
    part: list[str] = []
    characters = 0
    for text in (json.dumps(row, ensure_ascii=False) for row in rows):
        if part and (len(part) == _MAX_ROWS or characters + len(text) > _MAX_CHARACTERS):
            yield f"[{','.join(part)}]"
            part, characters = [], 0
        part.append(text)
        characters += len(text)
    if part:
        yield f"[{','.join(part)}]"


def build(
    database: Database, parameter: Any, columns: Mapping[str, sa.types.TypeEngine[Any]], *, name: str = "given"
) -> Any:
    """Build a table of the rows in the text ``parameter``, in their order. A missing key is NULL."""
    if database is MARIADB:
        return _build_for_mariadb(parameter, columns, name)
    if database is SQLITE:
        each = sa.func.json_each(parameter).table_valued("value").alias(f"{name}_json")
        fields = (sa.func.json_extract(each.c.value, f"$.{key}").label(key) for key in columns)
        return sa.select(*fields).subquery(name)
    rows = sa.func.json_to_recordset(sa.cast(parameter, sa.JSON))
    described = (sa.column(key, type_) for key, type_ in columns.items())
    return rows.table_valued(*described, name=name).render_derived(with_types=True)


def update(database: Database, table: sa.Table, rows: Any, values: Mapping[str, Any], *, key: str = "pk") -> Any:
    """Build an UPDATE of the rows of ``table`` whose ``id`` is the ``key`` of one of the rows of `build`."""
    is_same = table.c.id == rows.c[key]
    if database is MARIADB:
        # An outer join is read in this order. Otherwise MariaDB may read, and lock, the whole table first.
        joined = rows.outerjoin(table, is_same)
        return sa.update(joined).values({table.c[name]: value for name, value in values.items()})
    return sa.update(table).where(is_same).values(values)


def _build_for_mariadb(parameter: Any, columns: Mapping[str, sa.types.TypeEngine[Any]], name: str) -> Any:
    types = {sa.BigInteger: "BIGINT", sa.Integer: "INT", sa.String: "VARCHAR(255)", sa.Text: "LONGTEXT"}
    described = ", ".join(f"{key} {types[type(type_)]} PATH '$.{key}'" for key, type_ in columns.items())
    rows = sa.func.json_table(parameter, sa.literal_column(f"'$[*]' COLUMNS ({described})"))
    return rows.table_valued(*(sa.column(key, type_) for key, type_ in columns.items()), name=name)
