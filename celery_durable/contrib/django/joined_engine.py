"""A SQLAlchemy engine whose connection is Django's: its statements use Django's cursors, and Django ends transactions.

It uses Django's cursor and not the driver's. So Django connects, refuses statements in a transaction that must be
rolled back, logs queries, counts them in ``assertNumQueries``, and notices a lost connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from django.db import connections, utils
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy import exc
from sqlalchemy.pool import NullPool

_ERRORS = (
    "Error",
    "InterfaceError",
    "DatabaseError",
    "DataError",
    "OperationalError",
    "IntegrityError",
    "InternalError",
    "ProgrammingError",
    "NotSupportedError",
)


def find_driver(wrapper: BaseDatabaseWrapper) -> str:
    """Return SQLAlchemy's name for the database and driver of a Django connection."""
    module = wrapper.Database.__name__  # type: ignore[attr-defined]  # each backend has it
    match wrapper.vendor:
        case "postgresql":
            return "postgresql+psycopg" if module == "psycopg" else "postgresql+psycopg2"
        case "mysql":
            return "mariadb+pymysql" if module == "pymysql" else "mariadb+mysqldb"
        case vendor:
            return vendor


class _JoinedConnection:
    """What SQLAlchemy uses as the driver's connection. It cannot end Django's transaction."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def cursor(self, *_: Any, **__: Any) -> Any:
        return connections[self._alias].cursor()

    def __getattr__(self, name: str) -> Any:
        return getattr(connections[self._alias].connection, name)

    def commit(self) -> None:
        """Leave the transaction open."""

    rollback = close = commit


class _Driver:
    """The driver's module, with Django's exceptions in place of its own."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        vars(self).update({name: getattr(utils, name) for name in _ERRORS})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def make_joined_engine(alias: str) -> sa.Engine:
    """Make an engine whose only connection is the calling thread's Django connection of this alias."""
    url = sa.make_url(find_driver(connections[alias]) + "://")
    dialect_class = url.get_dialect()
    # Django's cursors take %s on every database, SQLite included.
    dialect: Any = dialect_class(dbapi=_Driver(dialect_class.import_dbapi()), paramstyle="pyformat")  # type: ignore[call-arg]
    # Not `create_engine`: it would send statements of its own and roll back the first transaction, which is Django's.
    dialect.do_begin = dialect.do_commit = dialect.do_rollback = dialect.do_close = lambda *_: None
    dialect.is_disconnect = lambda *_: False  # Django decides when its connection is closed
    pool = NullPool(lambda: _JoinedConnection(alias), dialect=dialect, reset_on_return=None)
    return sa.Engine(pool, dialect, url)


def to_database_error(error: BaseException) -> BaseException:
    """Return an error of Django's, or SQLAlchemy's around it, as SQLAlchemy's with the driver's error in ``orig``."""
    if isinstance(error, utils.Error):
        error = exc.DBAPIError.instance(None, None, error, utils.Error)
    if isinstance(error, exc.DBAPIError) and isinstance(error.orig, utils.Error):
        cause = error.orig.__cause__
        error.orig = cause if isinstance(cause, Exception) else error.orig
    return error


@contextmanager
def raise_as_django() -> Iterator[None]:
    """Raise Django's own exceptions, which the application handles, instead of SQLAlchemy's around them."""
    try:
        yield
    except exc.DBAPIError as error:
        if isinstance(error.orig, utils.Error):
            raise error.orig from error.orig.__cause__
        raise
