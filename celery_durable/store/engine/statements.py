"""Internal statements: built from the tables of a store, compiled once, and run through the driver."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from celery_durable.store.engine.faults import handle_driver_error
from celery_durable.store.schema.dialects import CLOCK_PARAM, MARIADB

_compiled: dict[tuple[object, ...], CompiledStatement] = {}
"""What the stores of this process have compiled, by everything that the text depends on."""


class Statement:
    """An internal statement. ``build``: returns it for a `Store`, as a SQLAlchemy statement."""

    def __init__(self, build: Callable[[Any], Any], name: str) -> None:
        self.build, self.name = build, name


def find_compiled(store: Any, statement: Statement, dialect: sa.Dialect) -> CompiledStatement:
    """Return a statement as compiled for the tables, the clock and the dialect of a `Store`."""
    # SQLAlchemy writes for MariaDB what its version takes. For the others the text needs no connection.
    version = dialect.server_version_info if store.database is MARIADB else None
    key = (statement, store.tables_key, store.runtime.clock is None, dialect.driver, dialect.paramstyle, version)
    found = _compiled.get(key)
    if found is None:
        found = _compiled[key] = CompiledStatement(statement.build(store), dialect)
    return found


def statement(build: Callable[[Any], Any]) -> Statement:
    """Decorate a function that takes a store and returns a SQLAlchemy statement. `Tx.run` passes its `param`s."""
    return Statement(build, build.__name__)


def statement_for(build: Callable[..., Any]) -> Callable[..., Statement]:
    """Decorate a function that builds variants of a statement. It takes a store, and arguments that can be hashed.

    So a step's statement can be built without the columns that are NULL, which are most of them.
    """

    @functools.cache
    def choose(*args: Any) -> Statement:
        return Statement(lambda store: build(store, *args), build.__name__)

    return functools.update_wrapper(choose, build)


def constant(value: str) -> sa.ColumnElement[str]:
    """Return a text in the statement itself, by which PostgreSQL finds a partial index. It is never a caller's."""
    return sa.literal_column(f"'{value}'")


def param(name: str, type_: Any = None) -> sa.BindParameter[Any]:
    """Return a parameter of a Statement. A prefix keeps it apart from the names that SQLAlchemy gives to values."""
    return sa.bindparam(PARAM_PREFIX + name, type_=type_)


if TYPE_CHECKING:
    from psycopg.abc import Transformer
    from psycopg.pq.abc import PGresult

PARAM_PREFIX = "p_"
"""The prefix of parameters. It keeps them apart from the names that SQLAlchemy gives to values."""


class Rows(list[Any]):
    """The rows that a statement returned, as named tuples. ``rowcount``: how many it returned, changed or matched."""

    rowcount: int

    def first(self) -> Any:
        return self[0] if self else None

    def one(self) -> Any:
        (row,) = self
        return row

    def scalar(self) -> Any:
        return self[0][0] if self else None

    def scalar_one(self) -> Any:
        return self.one()[0]


class CompiledStatement:
    """A statement for one driver: its text, and the values of the parameters that a caller does not pass."""

    def __init__(self, expression: Any, dialect: sa.Dialect) -> None:
        compiled = expression.compile(dialect=_make_positional(dialect))
        self.sql: str = compiled.string
        self._order = tuple(name.removeprefix(PARAM_PREFIX) for name in compiled.positiontup or ())
        # Required parameters are left out. If a caller forgets one, `bind` raises instead of writing NULL.
        self._defaults: dict[str, Any] = {
            name.removeprefix(PARAM_PREFIX): bound.effective_value
            for bound, name in compiled.bind_names.items()
            if not bound.required
        }
        self._takes_clock = self._defaults.pop(CLOCK_PARAM, None) is not None
        self._make_row: Callable[[Sequence[Any]], Any] = tuple
        self._returns_rows: bool | None = None

    def bind(self, params: dict[str, Any], clock: Callable[[], int] | None) -> tuple[Any, ...]:
        """Return the values for the driver: the caller's and the others. ``clock``: a test's. Raises KeyError."""
        if self._defaults:
            params = self._defaults | params
        if self._takes_clock and clock is not None:
            params = params | {CLOCK_PARAM: clock()}
        return tuple(map(params.__getitem__, self._order))

    def run(self, conn: sa.Connection, values: tuple[Any, ...]) -> Rows:
        """Run the statement; by SQLAlchemy if a tracing library, for example, listens. Raises its errors."""
        if is_listened_to(conn):
            result = conn.exec_driver_sql(self.sql, values)
            found = Rows(result.all() if result.returns_rows else ())
            found.rowcount = result.rowcount
            return found
        cursor, found = None, Rows()
        try:
            cursor = conn.connection.cursor()
            cursor.execute(self.sql, values)
            if self._returns_rows is None:  # psycopg builds the description anew each time
                self._describe([column[0] for column in cursor.description or ()])
            if self._returns_rows:
                found.extend(map(self._make_row, cursor.fetchall()))
            found.rowcount = cursor.rowcount
            cursor.close()
        except BaseException as error:
            handle_driver_error(error, conn, self.sql, values, cursor)
            # The traceback refers to the cursor. While it has unread rows, SQLite's connection keeps its snapshot, also
            # after the rollback: the next user of the connection would not see later commits.
            if cursor is not None:
                with contextlib.suppress(conn.dialect.loaded_dbapi.Error):
                    cursor.close()
            raise
        return found

    def load(self, result: PGresult, transformer: Transformer) -> Rows:
        """Convert what `PreparedStatements.execute` returned for this statement, with their transformer."""
        rows = Rows()
        if self._returns_rows is None:
            self._describe([(result.fname(column) or b"").decode() for column in range(result.nfields)])
        if self._returns_rows:
            transformer.set_pgresult(result)
            rows.extend(transformer.load_rows(0, result.ntuples, self._make_row))
            transformer.set_pgresult(None)  # it would keep a large result until the next one
        rows.rowcount = result.command_tuples or 0
        return rows

    def _describe(self, names: Sequence[str]) -> None:
        if names:
            self._make_row = functools.partial(tuple.__new__, _row_type(*names))  # its own _make is written in Python
        self._returns_rows = bool(names)


@functools.cache
def _row_type(*names: str) -> Any:
    return namedtuple("row", names, rename=True)  # noqa: PYI024


def run_on_driver(conn: sa.Connection, sql: str) -> None:
    """Run a statement that has no parameters and returns no rows, as `CompiledStatement.run` does."""
    if is_listened_to(conn):
        conn.exec_driver_sql(sql)
        return
    try:
        cursor = conn.connection.cursor()
        cursor.execute(sql)
        cursor.close()
    except BaseException as error:
        handle_driver_error(error, conn, sql)
        raise


def is_listened_to(conn: sa.Connection) -> bool:
    """Return whether the statements of a connection have a listener."""
    dispatch: Any = conn.dispatch
    return bool(dispatch.before_cursor_execute or dispatch.after_cursor_execute)


def _make_positional(dialect: sa.Dialect) -> sa.Dialect:
    """Return the dialect with positional parameters: drivers spend time on looking for names."""
    if dialect.paramstyle not in ("pyformat", "named"):
        return dialect
    positional = copy.copy(dialect)
    positional.paramstyle = "format" if dialect.paramstyle == "pyformat" else "qmark"
    positional.positional = True
    return positional
