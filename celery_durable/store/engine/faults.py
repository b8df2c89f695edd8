"""Errors of the database: what they mean, whether anything was applied, and whether a retry may succeed."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from celery_durable.errors import SchemaOutdated, StoreUnavailable

logger = logging.getLogger("celery_durable.store")


class Fault(Enum):
    """What a database error means for the transaction that raised it."""

    RETRY = auto()  # a deadlock, a serialization failure, a lock timeout: nothing was applied, and a retry may succeed
    NO_WRITES = auto()  # a standby, a read-only server, or a full disk: nothing was applied
    CONNECTION_LOST = auto()  # the connection is gone or useless: the outcome of the current statement is unknown
    UNIQUE = auto()  # a unique constraint was violated
    # Another constraint was violated, or an earlier error was ignored. The transaction cannot commit.
    CONSTRAINT = auto()
    MISSING_TABLE = auto()
    OTHER = auto()


_PG_RETRY = frozenset({"40001", "40P01", "55P03"})
DEALLOCATED = "is_of_deallocated_statement"
"""The attribute of an error that says that a prepared statement of this package is gone, so a retry prepares it."""
_PG_LOST = frozenset({"57P01", "57P02", "57P03", "53300"})
_MARIA_RETRY = frozenset({1020, 1205, 1213})
# A Galera node that loses the majority answers 1180 to a COMMIT that it may have sent to other nodes already. Later it
# answers 1047 to every statement, even to ROLLBACK. A new connection may reach another node.
_GALERA_LOST = frozenset({1047, 1180})
_MARIA_LOST = frozenset({1040, 1053, 1927, 2002, 2003, 2006, 2013, 2055}) | _GALERA_LOST
# The server is read-only, or its disk is full.
_PG_NO_WRITES = frozenset({"25006", "53100"})
_MARIA_NO_WRITES = frozenset({1021, 1114, 1290, 1836})
_SQLITE_RETRY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SQLITE_UNIQUE = frozenset({sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY})


def classify_fault(error: exc.DBAPIError) -> Fault:
    """Classify a database error by its code."""
    origin: Any = error.orig
    sqlstate = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)  # psycopg, psycopg2
    code = origin.args[0] if isinstance(origin, Exception) and origin.args and isinstance(origin.args[0], int) else None
    sqlite_code = getattr(origin, "sqlite_errorcode", None)
    if (
        sqlstate in _PG_RETRY
        or getattr(origin, DEALLOCATED, False)
        or code in _MARIA_RETRY
        or (sqlite_code is not None and sqlite_code & 0xFF in _SQLITE_RETRY)
    ):
        return Fault.RETRY
    if sqlstate in _PG_NO_WRITES or code in _MARIA_NO_WRITES:
        return Fault.NO_WRITES
    if error.connection_invalidated or sqlstate in _PG_LOST or (sqlstate or "").startswith("08") or code in _MARIA_LOST:
        return Fault.CONNECTION_LOST
    if isinstance(error, exc.OperationalError) and sqlstate is None and code is None and sqlite_code is None:
        return Fault.CONNECTION_LOST  # an error of libpq, not of the server: no connection
    if sqlstate == "23505" or code == 1062 or sqlite_code in _SQLITE_UNIQUE:
        return Fault.UNIQUE
    if isinstance(error, exc.IntegrityError) or sqlstate == "25P02":
        return Fault.CONSTRAINT
    if sqlstate == "42P01" or code == 1146 or (sqlite_code is not None and str(origin).startswith("no such table")):
        return Fault.MISSING_TABLE
    return Fault.OTHER


def handle_driver_error(
    error: BaseException, conn: sa.Connection, sql: str, values: tuple[Any, ...] = (), cursor: Any = None
) -> None:
    """Raise what SQLAlchemy raises for an error of the driver, and drop dead connections; else return."""
    if not isinstance(error, Exception) or isinstance(error, conn.dialect.loaded_dbapi.Error):
        conn._handle_dbapi_exception(error, sql, values, cursor, None)  # noqa: SLF001  # nothing public does


def raise_if_table_missing(error: exc.DBAPIError, names: Iterable[str], *, revision: str) -> None:
    """Raise SchemaOutdated if one of the tables with these names is missing. Return for any other error."""
    is_ours = (re.search(rf"\b{re.escape(name)}\b", str(error.orig)) for name in names)
    if classify_fault(error) is Fault.MISSING_TABLE and any(is_ours):
        raise SchemaOutdated(None, revision) from error


class CommitInDoubt(Exception):
    """The connection was lost during a commit, so the transaction may or may not have been applied."""

    def __init__(self, cause: exc.DBAPIError) -> None:
        self.cause = cause
        super().__init__(str(cause.orig))


def is_connection_useless(error: exc.DBAPIError | CommitInDoubt) -> bool:
    """Whether the connection that raised the error must not be used again, even if it is still open."""
    return isinstance(error, CommitInDoubt) or classify_fault(error) is Fault.CONNECTION_LOST


def is_transient(error: BaseException) -> bool:
    """Whether the database is to blame and a later try may succeed, as after a deadlock or a lost connection."""
    if isinstance(error, (StoreUnavailable, exc.TimeoutError)):  # the second is of the application's pool
        return True
    return isinstance(error, exc.DBAPIError) and classify_fault(error) in (
        Fault.RETRY,
        Fault.CONNECTION_LOST,
        Fault.NO_WRITES,
    )


def find_driver_error(error: BaseException) -> BaseException:
    """Return the driver's own error, whose text has neither the statement nor its values, or the error itself."""
    cause = error.__cause__ if isinstance(error, StoreUnavailable) and error.__cause__ is not None else error
    return getattr(cause, "orig", None) or cause


def describe_fault(error: BaseException) -> str:
    """Return the driver's own error in one line, for logs."""
    found = find_driver_error(error)
    if isinstance(found, StoreUnavailable):
        return found.reason or "no answer in time"
    return str(found).strip().partition("\n")[0] or type(found).__name__


def build_unavailable(error: exc.DBAPIError, *, is_in_doubt: bool = False) -> StoreUnavailable:
    """Return what an operation raises for a transient error of the database after its last try."""
    return StoreUnavailable(describe_fault(error), is_in_doubt=is_in_doubt)


def is_unique_violation(error: BaseException) -> bool:
    """Whether a unique constraint was violated."""
    return isinstance(error, exc.DBAPIError) and classify_fault(error) is Fault.UNIQUE


def is_rejection(error: BaseException) -> bool:
    """Whether the database rejects the transaction: a constraint, or an earlier error that was ignored in it."""
    if isinstance(error, exc.DBAPIError):
        return classify_fault(error) in (Fault.UNIQUE, Fault.CONSTRAINT)
    return isinstance(error, exc.PendingRollbackError)


def is_commit_in_doubt(error: BaseException) -> bool:
    """Whether the connection was lost during a commit."""
    return isinstance(error, CommitInDoubt)


def log_commit_in_doubt(cause: exc.DBAPIError) -> None:
    """Log that a commit is in doubt, before its outcome is looked up. Without its parameters, which may be private."""
    logger.warning("The outcome of a commit is unknown, looking it up: %s", str(cause.orig).strip())
