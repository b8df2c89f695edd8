"""Internal statements sent through libpq, which psycopg wraps as `psycopg.pq`, without a cursor.

psycopg's cursor takes most of a pass's CPU: 125 us for the statement of a step, 55 us without. Internal statements need
none of its conversions. Only connections of the store's own engine are used this way.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from celery_durable.store.engine.faults import DEALLOCATED, handle_driver_error

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.pq.abc import PGresult

_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
_SUCCESS = (1, 2)  # PGRES_COMMAND_OK, PGRES_TUPLES_OK
_IDLE = 0  # PQTRANS_IDLE
_CONNECTION_OK = 0  # CONNECTION_OK
_SQLSTATE, _FUNCTION = ord("C"), ord("R")  # PG_DIAG_SQLSTATE, PG_DIAG_SOURCE_FUNCTION
_NOT_PREPARED = b"26000"  # invalid_sql_statement_name
_OTHER_TYPES = b"0A000", b"RevalidateCachedQuery"  # "cached plan must not change result type": a column was changed
_KEY = "celery_durable.prepared_statements"
_ids = itertools.count(1)


def prepared_statements_of(conn: sa.Connection) -> PreparedStatements | None:
    """Return a connection's statements; None with another driver or encoding, or greenlets, which libpq blocks."""
    driver: Any = conn.connection.driver_connection
    if conn.dialect.driver != "psycopg" or _has_greenlets() or driver.info.encoding != "utf-8":
        return None
    found: PreparedStatements | None = conn.info.get(_KEY)
    if found is None:
        found = conn.info[_KEY] = PreparedStatements(driver)
    return found


def begin_prepared(conn: sa.Connection) -> PreparedStatements | None:
    """Begin a transaction without a cursor, and return the prepared statements, if the connection has any."""
    prepared_statements = prepared_statements_of(conn)
    if prepared_statements is not None:
        try:
            prepared_statements.begin()
        except BaseException as error:
            handle_driver_error(error, conn, _BEGIN)
            raise
    return prepared_statements


def _has_greenlets() -> bool:
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return (gevent is not None and gevent.is_module_patched("select")) or (
        eventlet is not None and eventlet.is_monkey_patched("select")
    )


class PreparedStatements:
    """The statements that one connection has prepared. It prepares a statement when it first runs it.

    psycopg deallocates them all at a rollback, and after some statements that change tables; a pooler may, too. A
    missing statement, and one whose columns have other types now, is prepared anew, but would end a transaction. So the
    BEGIN is prepared too: it finds out first.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        from psycopg import adapt, errors  # noqa: PLC0415  # applications without psycopg import this module, too

        self._connection, self._errors = connection, errors
        self.transformer = adapt.Transformer(connection)
        """What converts the values of a result, as for a cursor."""
        self._names: dict[str, bytes] = {}

    def begin(self) -> None:
        """Begin a transaction, unless one is open. psycopg does not begin another, and ends it as its own."""
        if self._connection.pgconn.transaction_status == _IDLE:
            self.execute(_BEGIN, ())

    def execute(self, sql: str, values: Sequence[Any]) -> PGresult:
        """Run a statement with ``%s`` for each value, and return libpq's result. Raises psycopg's errors."""
        data: list[Any] = []
        for value in values:
            if type(value) is str:
                encoded = value.encode()
                if b"\0" in encoded:  # libpq would end the text there
                    raise self._errors.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
                data.append(encoded)
            elif type(value) is int:
                data.append(b"%d" % value)
            elif type(value) is bool:
                data.append(b"t" if value else b"f")
            else:  # a member of a StrEnum
                data.append(None if value is None else str.encode(value))
        pgconn = self._connection.pgconn
        try:
            if self._connection.prepare_threshold is None:  # a pooler in transaction mode has no prepared statements
                result = pgconn.exec_params(_number_parameters(sql), data)
            else:
                result = pgconn.exec_prepared(self._names.get(sql) or self._prepare(sql), data)
                if result.status not in _SUCCESS and _is_to_be_prepared_again(result):
                    result = self._execute_again(sql, data, result)
        except MemoryError as error:  # libpq returns no result if it cannot send, which psycopg takes for this
            if pgconn.status == _CONNECTION_OK:
                raise
            raise self._errors.OperationalError(pgconn.get_error_message()) from error
        if result.status not in _SUCCESS:
            raise self._build_error(result)
        return result

    def _execute_again(self, sql: str, data: list[Any], failed: PGresult) -> PGresult:
        """Prepare and run a statement anew. If that has broken a transaction, raise the error."""
        self._names.clear()
        pgconn = self._connection.pgconn
        if pgconn.transaction_status != _IDLE:
            error = self._build_error(failed)
            setattr(error, DEALLOCATED, True)
            raise error
        return pgconn.exec_prepared(self._prepare(sql), data)

    def _prepare(self, sql: str) -> bytes:
        name = f"celery_durable_{next(_ids)}".encode()
        result = self._connection.pgconn.prepare(name, _number_parameters(sql))
        if result.status not in _SUCCESS:
            raise self._build_error(result)
        self._names[sql] = name
        return name

    def _build_error(self, result: PGresult) -> Exception:
        if result.error_field(_SQLSTATE) is None:  # an error of libpq: the connection is lost
            return self._errors.OperationalError(result.get_error_message())
        return self._errors.error_from_result(result)


def _is_to_be_prepared_again(failed: PGresult) -> bool:
    sqlstate = failed.error_field(_SQLSTATE)
    return sqlstate == _NOT_PREPARED or (sqlstate, failed.error_field(_FUNCTION)) == _OTHER_TYPES


@functools.cache
def _number_parameters(sql: str) -> bytes:
    numbers = itertools.count(1)
    return re.sub("%(s|%)", lambda found: f"${next(numbers)}" if found[1] == "s" else "%", sql).encode()
