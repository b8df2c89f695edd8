"""A SQLAlchemy engine whose connection is Django's: its statements use Django's cursors, and Django ends transactions.

So Django connects, refuses statements in a transaction that must be rolled back, logs and counts queries, and notices a
lost connection.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from django.db import connections, utils
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy import event, exc
from sqlalchemy.pool import NullPool

from celery_durable.store.engine import drivers

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


# The engine's own connections to a database of Django's settings.
#
# They are made from the parameters that Django's backend computes, so OPTIONS, service files and backends that compute
# passwords apply. They are not Django's connections: claims and leases do not depend on what the application does with
# those, and need READ COMMITTED and a lock timeout.


_PLACE = ("host", "port", "dbname", "database", "db", "user", "username", "password", "passwd", "unix_socket")
"""Parameters that SQLAlchemy takes from the URL. Django's replace them at each connect: tests switch the database."""
_DJANGOS_OWN = ("cursor_factory", "context", "prepare_threshold", "conv", "charset", "init_command", "detect_types")
"""Parameters by which Django changes what its own cursors return or send, and `init_command`, which `drivers` runs."""


def make_own_engine(alias: str, *, prepared_statements: bool, keeps_connections: bool = True) -> sa.Engine:
    """Make the engine of the store on the database of this alias."""
    init_command = connections[alias].settings_dict.get("OPTIONS", {}).get("init_command")
    engine = drivers.make_engine(_make_url(alias), prepared_statements=prepared_statements, init_command=init_command)
    event.listen(engine, "do_connect", functools.partial(_set_parameters, alias), insert=True)

    @event.listens_for(engine, "connect")
    def remember_place(_: Any, record: Any) -> None:
        record.info["place"] = _find_place(alias)

    @event.listens_for(engine, "checkout")
    def refuse_other_place(_: Any, record: Any, __: Any) -> None:
        if record.info["place"] != _find_place(alias):  # a test runner has switched the database
            raise exc.DisconnectionError

    if not keeps_connections:
        event.listen(engine, "checkin", lambda _, record: record.invalidate())
    return engine


def _make_url(alias: str) -> sa.URL:
    wrapper = connections[alias]
    settings = wrapper.settings_dict
    url = sa.URL.create(find_driver(wrapper), database=str(settings["NAME"]) or None)
    if wrapper.vendor == "sqlite":
        return url
    return url.set(host=settings["HOST"] or None, port=int(settings["PORT"]) if settings["PORT"] else None)


def _find_place(alias: str) -> tuple[Any, ...]:
    settings = connections[alias].settings_dict
    return settings["HOST"], settings["PORT"], settings["NAME"]


def _set_parameters(alias: str, _dialect: Any, _record: Any, args: list[Any], params: dict[str, Any]) -> None:
    """Replace what SQLAlchemy took from the URL by the parameters of Django's settings as they are now."""
    ours = {name: value for name, value in params.items() if name not in _PLACE}
    # A new wrapper: the thread's own may be in use, and computing parameters changes its attributes.
    djangos = connections.create_connection(alias).get_connection_params()
    djangos = {name: value for name, value in djangos.items() if name not in _DJANGOS_OWN}
    if "options" in ours and "options" in djangos:
        djangos["options"] = f"{ours['options']} {djangos['options']}"
    if "timeout" in ours:  # SQLite's wait for its lock
        djangos["timeout"] = max(ours["timeout"], djangos.get("timeout", 0))
    args.clear()
    params.clear()
    params.update(ours | djangos)
