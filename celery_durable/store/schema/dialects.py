"""Differences between PostgreSQL, MariaDB and SQLite: what each can do, clocks, upserts, types, rows as a parameter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from celery_durable.errors import UnsupportedDatabase

T = TypeVar("T")

CLOCK_PARAM = "durable_clock_us"


# --- the clock (LAW 4) --------------------------------------------------------------------------


class clock(FunctionElement[int]):  # noqa: N801  # SQL functions read like functions
    """The current time in microseconds since the epoch. It advances in a transaction and after a lock wait."""

    type = sa.BigInteger()
    name = "durable_clock"
    inherit_cache = True


class statement_clock(FunctionElement[int]):  # noqa: N801
    """The time at which the statement started, by which a database can search an index.

    It cannot by `clock`, whose value changes meanwhile. Measured with 1M rows: 0.4 ms, and 2,000 ms with `clock`.
    """

    type = sa.BigInteger()
    name = "durable_statement_clock"
    inherit_cache = True


@compiles(clock, "postgresql")
def _pg_clock(*_: Any, **__: Any) -> str:
    return "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"


@compiles(statement_clock, "postgresql")
def _pg_statement_clock(*_: Any, **__: Any) -> str:
    return "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"


# UTC_TIMESTAMP and NOW are fixed during a statement. SYSDATE advances, but uses the session's time zone. The
# difference of NOW and SYSDATE is right in every zone, so a caller's own session may keep its zone.
@compiles(clock, "mysql", "mariadb")
def _maria_clock(*_: Any, **__: Any) -> str:
    return (
        "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6))"
        " + TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)))"
    )


@compiles(statement_clock, "mysql", "mariadb")
def _maria_statement_clock(*_: Any, **__: Any) -> str:
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6))"


# 'now' is fixed for one statement and advances between statements; julianday has milliseconds.
@compiles(clock, "sqlite")
@compiles(statement_clock, "sqlite")
def _sqlite_clock(*_: Any, **__: Any) -> str:
    return "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"


# --- the databases ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Database:
    name: str
    update_returns: bool
    has_one_writer: bool
    """Whether only one write transaction can run at a time for the whole file."""


POSTGRESQL = Database("postgresql", update_returns=True, has_one_writer=False)
MARIADB = Database("mariadb", update_returns=False, has_one_writer=False)
SQLITE = Database("sqlite", update_returns=True, has_one_writer=True)

_MIN_VERSIONS = {"postgresql": (15, 0), "mariadb": (10, 6), "sqlite": (3, 35)}


def database_from_url(url: sa.URL) -> Database:
    """Return the kind of database that a URL names; raises UnsupportedDatabase."""
    match url.get_backend_name():
        case "postgresql":
            return POSTGRESQL
        case "mysql" | "mariadb":
            return MARIADB
        case "sqlite":
            return SQLITE
        case other:
            raise UnsupportedDatabase(other)


def check_server(connection: sa.Connection) -> None:
    """Raise UnsupportedDatabase if the server is MySQL or older than the minimum version."""
    dialect: Any = connection.dialect
    version = tuple(dialect.server_version_info or ())
    is_mysql = dialect.name == "mysql" and not getattr(dialect, "is_mariadb", False)
    name = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
    if is_mysql or version[:2] < _MIN_VERSIONS.get(name, (0, 0)):
        found = f"{name} {'.'.join(map(str, version))}"
        raise UnsupportedDatabase(found)


def insert_or_nothing(database: Database, table: sa.Table, values: dict[str, Any], key: tuple[str, ...]) -> Any:
    """Build an INSERT that does nothing if ``key`` is taken. It does not abort the transaction."""
    insert = _insert(database, table).values(values)
    return insert.prefix_with("IGNORE") if database is MARIADB else insert.on_conflict_do_nothing(index_elements=key)


def insert_rows_or_nothing(
    database: Database, table: sa.Table, values: dict[str, Any], source: Any, key: tuple[str, ...]
) -> Any:
    """Build an INSERT of a row for each row of ``source``, in their order. It skips rows whose ``key`` is taken."""
    # Without the condition, SQLite would take ON CONFLICT for a join's ON.
    rows = sa.select(*(sa.type_coerce(value, table.c[name].type).label(name) for name, value in values.items()))
    insert = _insert(database, table).from_select(list(values), rows.select_from(source).where(sa.true()))
    return insert.prefix_with("IGNORE") if database is MARIADB else insert.on_conflict_do_nothing(index_elements=key)


def _insert(database: Database, table: sa.Table) -> Any:
    """Build the dialect's own INSERT. Only the dialect in use is imported: each takes 20 ms."""
    name = "mysql" if database is MARIADB else database.name
    return import_module(f"sqlalchemy.dialects.{name}").insert(table)


def force_index(select: sa.Select[Any], table: sa.Table, name: str) -> sa.Select[Any]:
    """Make MariaDB use the index whose name ends like this: with another one, it would read all rows to sort them."""
    (index,) = (each.name for each in table.indexes if str(each.name).endswith(name))
    for dialect in ("mysql", "mariadb"):
        select = select.with_hint(table, f"FORCE INDEX (`{index}`)", dialect)
    return select


def select_smallest_per_group(
    database: Database,
    table: sa.Table,
    group: str,
    value: str,
    *,
    prefix: Mapping[str, int],
    where: Callable[[Any], Sequence[sa.ColumnElement[bool]]],
    cte: str,
) -> Any:
    """Build a query for the smallest ``value`` of each ``group``, as columns ``name`` and ``at``.

    It takes a few index searches per group, however many rows there are. The index must start with the columns of
    ``prefix``, and continue with the group and the value. ``where`` returns the condition of a partial index, for the
    columns of an alias. ``cte`` names the recursive CTE. A group with NULL values only has NULL in ``at``, or is
    missing.

    MariaDB answers GROUP BY with a loose index scan, but does not search an index range for each outer row. PostgreSQL
    and SQLite do the opposite, so for them a recursive CTE steps from one group to the next.
    """
    if database is MARIADB:
        c = table.c
        # Conditions in WHERE, even on the prefix, can prevent the loose scan. HAVING does not.
        grouped = sa.select(c[group].label("name"), sa.func.min(c[value]).label("at"))
        grouped = grouped.group_by(*(c[name] for name in prefix), c[group])
        return grouped.having(*(c[name] == _literal(number) for name, number in prefix.items())) if prefix else grouped

    def row_conditions(other: Any) -> list[sa.ColumnElement[bool]]:
        prefix_conditions = [other.c[name] == _literal(number) for name, number in prefix.items()]
        return [*prefix_conditions, *where(other.c), other.c[value].is_not(None)]

    first, following, members = table.alias(), table.alias(), table.alias()

    def next_group(rows: Any, *after: sa.ColumnElement[bool]) -> Any:
        one = sa.select(rows.c[group]).where(*row_conditions(rows), *after).order_by(rows.c[group])
        return one.limit(sa.literal_column("1"))

    groups = sa.select(next_group(first).scalar_subquery().label("name")).cte(cte, recursive=True)
    after = next_group(following, following.c[group] > groups.c.name).correlate(groups).scalar_subquery()
    groups = groups.union_all(sa.select(after).where(groups.c.name.is_not(None)))
    smallest = (
        sa.select(members.c[value])
        .where(*row_conditions(members), members.c[group] == groups.c.name)
        .order_by(members.c[value])
    )
    at = smallest.limit(sa.literal_column("1")).correlate(groups).scalar_subquery().label("at")
    return sa.select(groups.c.name, at).where(groups.c.name.is_not(None))


def _literal(number: int) -> sa.ColumnElement[Any]:
    return sa.literal_column(str(number))


def byte_length(database: Database, text: sa.ColumnElement[str]) -> sa.ColumnElement[int]:
    """Build the length of a text in UTF-8, in bytes."""
    if database is SQLITE:  # octet_length came with SQLite 3.43
        return sa.func.length(sa.cast(text, sa.LargeBinary))
    return sa.func.octet_length(text)


def insert_or_update(
    database: Database, table: sa.Table, values: dict[str, Any], key: tuple[str, ...], keep: tuple[str, ...] = ()
) -> Any:
    """Build an INSERT that updates the row if ``key`` is taken, except for the columns ``keep``."""
    changed = [name for name in values if name not in (*key, *keep)]
    if database is MARIADB:
        insert = _insert(database, table).values(values)
        return insert.on_duplicate_key_update({name: insert.inserted[name] for name in changed})
    upsert = _insert(database, table).values(values)
    return upsert.on_conflict_do_update(index_elements=key, set_={name: upsert.excluded[name] for name in changed})


def bypass_snapshot(database: Database, query: sa.Select[Any]) -> sa.Select[Any]:
    """Make ``query`` read the latest committed rows even in a REPEATABLE READ session, MariaDB's default.

    In such a session of the application, locking an instance's row reads its latest version, but a plain SELECT the
    older snapshot: it would miss a wait committed since, and the instance would not wake. PostgreSQL raises an error
    instead.
    """
    return query.with_for_update(read=True) if database is MARIADB else query


_LONG_TEXT_BYTES = 2**32 - 1
"""MariaDB makes a column LONGTEXT, the type that holds so many. To name that type imports its dialect."""


def choose_options(database: Database | None, **options: Any) -> dict[str, Any]:
    """Return the options that are for this database (None: all). SQLAlchemy imports the dialect of each."""
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


def ends_with(database: Database, text: sa.ColumnElement[str], end: str) -> sa.ColumnElement[bool]:
    """Return the condition that a text ends so. LIKE would ignore the case on SQLite."""
    last = sa.func.substr(text, -len(end)) if database is SQLITE else sa.func.right(text, len(end))
    condition: sa.ColumnElement[bool] = last == end
    return condition


def collect_object(database: Database, name: sa.ColumnElement[str], value: sa.ColumnElement[str]) -> Any:
    """Build the text of a JSON object with a key for each row. Without rows it is NULL, or has no keys."""
    functions = {"postgresql": "json_object_agg", "mariadb": "json_objectagg", "sqlite": "json_group_object"}
    return sa.cast(getattr(sa.func, functions[database.name])(name, value), sa.Text)


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


# Rows as one parameter: statements that read or change many rows at once.
#
# The rows are a JSON list of objects. So a statement is compiled once for any number of rows, and takes one round trip.


_MAX_ROWS, _MAX_CHARACTERS = 1_000, 2_000_000
"""The bounds of one statement. A server refuses statements that are too long: MariaDB's default is 16 MiB."""


def encode_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as the text of the parameter."""
    return json.dumps(rows, ensure_ascii=False)


def encode_rows_in_parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows as texts, each small enough for the parameter of one statement."""
    for part in divide([json.dumps(row, ensure_ascii=False) for row in rows], len):
        yield f"[{','.join(part)}]"


def divide(given: Iterable[T], count_characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide what statements insert into parts, each small enough for one statement."""
    part: list[T] = []
    characters = 0
    for each in given:
        size = count_characters(each)
        if part and (len(part) == _MAX_ROWS or characters + size > _MAX_CHARACTERS):
            yield part
            part, characters = [], 0
        part.append(each)
        characters += size
    if part:
        yield part


def build_rows(
    database: Database, parameter: Any, columns: Mapping[str, sa.types.TypeEngine[Any]], *, name: str = "given"
) -> Any:
    """Build a table of the rows in the text ``parameter``, in their order. A missing key is NULL."""
    if database is MARIADB:
        return _build_rows_for_mariadb(parameter, columns, name)
    if database is SQLITE:
        each = sa.func.json_each(parameter).table_valued("value").alias(f"{name}_json")
        fields = (sa.func.json_extract(each.c.value, f"$.{key}").label(key) for key in columns)
        return sa.select(*fields).subquery(name)
    rows = sa.func.json_to_recordset(sa.cast(parameter, sa.JSON))
    described = (sa.column(key, type_) for key, type_ in columns.items())
    return rows.table_valued(*described, name=name).render_derived(with_types=True)


def update_rows(database: Database, table: sa.Table, rows: Any, values: Mapping[str, Any]) -> Any:
    """Build an UPDATE of the rows of ``table`` whose ``id`` is the ``pk`` of one of the rows of `build`."""
    is_same = table.c.id == rows.c.pk
    if database is MARIADB:
        # An outer join is read in this order. Otherwise MariaDB may read, and lock, the whole table first.
        joined = rows.outerjoin(table, is_same)
        return sa.update(joined).values({table.c[name]: value for name, value in values.items()})
    return sa.update(table).where(is_same).values(values)


def _build_rows_for_mariadb(parameter: Any, columns: Mapping[str, sa.types.TypeEngine[Any]], name: str) -> Any:
    types = {sa.BigInteger: "BIGINT", sa.Integer: "INT", sa.String: "VARCHAR(255)", sa.Text: "LONGTEXT"}
    described = ", ".join(f"{key} {types[type(type_)]} PATH '$.{key}'" for key, type_ in columns.items())
    rows = sa.func.json_table(parameter, sa.literal_column(f"'$[*]' COLUMNS ({described})"))
    return rows.table_valued(*(sa.column(key, type_) for key, type_ in columns.items()), name=name)
