"""SQLAlchemy engines as the store needs them, for each driver: isolation, lock timeouts, dead connections."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import sqlite3
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from celery_durable.errors import ConfigInvalid
from celery_durable.runtime import real_monotonic
from celery_durable.store.engine.statements import run_on_driver
from celery_durable.store.schema.dialects import MARIADB, POSTGRESQL, SQLITE, Database, database_from_url
from celery_durable.store.watchdog import WatchedSocket, watch_socket_of

logger = logging.getLogger("celery_durable.store")

_LOCK_TIMEOUT_SECONDS = 5
_SQLITE_BUSY_SECONDS = 30
SQLITE_SYNCHRONOUS = "FULL"
"""Whether a commit waits for the disk. Tests set OFF."""
_CONNECT_SECONDS = 3
"""The default limit for connecting to one address. The first queries on a new connection have the limit again."""

_LIBPQ_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""Options for drivers that use libpq, which detect an idle connection whose server no longer answers."""

_REQUIRED = {"charset": ("utf8mb4",), "client_encoding": ("utf8", "utf-8")}
"""The values that a URL may give these parameters: others cannot store every text."""
_NOT_IN_URL = ("autocommit", "prepare_threshold", "isolation_level", "check_same_thread")
"""Parameters that the store sets as it needs them."""
_OTHER_ISOLATION = r"default_transaction_isolation\s*=(?!\W*read\W+committed)"

# Kept connections (`Connections.keep`) come from the same pool. The pool has no limit of its own, because the number of
# threads limits it. It closes a connection that is returned while `pool_size` others are idle: with a size of five, 16
# threads that took turns connected again for every eighth transaction.
_POOL = {"pool_size": 20, "max_overflow": -1}


def check_url(url: str | sa.URL | None) -> sa.URL:
    """Return the URL of a store's database; raises ConfigInvalid if it is missing, unreadable, or SQLite in memory."""
    if url is None:
        raise ConfigInvalid(
            "durable_database_url", None, "set it to your database, for example postgresql+psycopg://user@host/db"
        )
    try:
        where = sa.make_url(url)
    except (exc.ArgumentError, ValueError):  # ValueError: the port is no number
        raise ConfigInvalid(
            "durable_database_url", "***", "it is no URL such as postgresql+psycopg://user@host/db"
        ) from None  # the text may have a password
    try:
        where.get_dialect()
    except exc.NoSuchModuleError:
        raise ConfigInvalid(
            "durable_database_url",
            where.drivername,
            "SQLAlchemy knows no such driver; use postgresql+psycopg, mysql+pymysql or sqlite",
        ) from None
    if where.get_backend_name() == "sqlite" and where.database in (None, "", ":memory:"):
        raise ConfigInvalid(
            "durable_database_url", str(url), "in memory each thread has a database of its own; name a file"
        )
    return where


def check_is_sync(engine: sa.Engine) -> None:
    """Raise ConfigInvalid if the driver of an engine is for async code only."""
    if engine.dialect.is_async:
        raise ConfigInvalid(
            "durable_database_url",
            engine.url.drivername,
            "this driver is for async code only; use postgresql+psycopg, mysql+pymysql or sqlite",
        )


def make_engine(url: sa.URL, *, prepared_statements: bool, init_command: str | None = None) -> sa.Engine:
    """Make the store's own engine: READ COMMITTED, lock timeouts, detection of dead connections.

    The parameters of the URL are kept, and replace the defaults here. Raises ConfigInvalid for those with which the
    store cannot work. ``prepared_statements`` is False behind a pooler in transaction mode: no prepared statements, no
    settings of a session. ``init_command``: as in the URL of MariaDB.

    REPEATABLE READ, MariaDB's default, would read outdated rows there (see `bypass_snapshot`). On PostgreSQL it would
    raise an error for each row that a lease renewal changed meanwhile.
    """
    database, asked = database_from_url(url), {name: _join(value) for name, value in url.query.items()}
    _check_parameters(asked)
    if database is SQLITE:
        engine = sa.create_engine(url, connect_args=_without(asked, {"timeout": _SQLITE_BUSY_SECONDS}), **_POOL)
        event.listen(engine, "connect", _configure_sqlite)
        return engine
    connect_seconds = _find_connect_seconds(database, asked)
    defaults: dict[str, Any] = {"connect_timeout": connect_seconds}
    if database is POSTGRESQL:
        if url.get_driver_name() in ("psycopg", "psycopg2"):
            defaults |= _LIBPQ_KEEPALIVE
        connect_args = _without(asked, defaults)
        if url.get_driver_name() == "psycopg":
            connect_args["prepare_threshold"] = 0 if prepared_statements else None
        options = _build_options(asked, has_lock_timeout=prepared_statements)
        if options:
            connect_args["options"] = options
    else:
        connect_args = _without(asked, defaults) | {
            "charset": "utf8mb4",
            "init_command": f"SET SESSION innodb_lock_wait_timeout={_LOCK_TIMEOUT_SECONDS}, time_zone='+00:00'",
        }
        init_command = asked.get("init_command", init_command)
    engine = sa.create_engine(
        url, isolation_level="READ COMMITTED", connect_args=connect_args, pool_recycle=1800, **_POOL
    )
    if database is POSTGRESQL:
        event.listen(engine, "connect", make_cooperative, insert=True)
    elif init_command:  # before SQLAlchemy sets the isolation level
        event.listen(engine, "connect", functools.partial(_run_init_command, init_command), insert=True)
    if database is POSTGRESQL and not prepared_statements:
        event.listen(engine, "begin", _set_lock_timeout)
    if url.get_driver_name() == "pymysql":
        event.listen(engine, "do_connect", _connect_watched)
    event.listen(engine, "connect", functools.partial(_watch_first_statements, connect_seconds), insert=True)
    event.listen(engine, "connect", _stop_watching_first_statements)
    return engine


def _join(value: str | tuple[str, ...]) -> str:
    """Return a parameter that the URL may name several times, as PostgreSQL's ``options``."""
    return value if isinstance(value, str) else " ".join(value)


def _without(asked: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in defaults.items() if name not in asked}


def _check_parameters(asked: Mapping[str, str]) -> None:
    """Raise ConfigInvalid for a parameter of the URL with which the store cannot work."""
    for name, allowed in _REQUIRED.items():
        if name in asked and asked[name].lower() not in allowed:
            remedy = f"workflows need {name}={allowed[0]}, which is the default"
            raise ConfigInvalid("durable_database_url", f"{name}={asked[name]}", remedy)
    for name in _NOT_IN_URL:
        if name in asked:
            remedy = f"Durable sets {name} itself: remove it from the URL"
            if name == "prepare_threshold":
                remedy += ". To switch prepared statements off, set durable_prepared_statements = False"
            raise ConfigInvalid("durable_database_url", f"{name}={asked[name]}", remedy)


def _find_connect_seconds(database: Database, asked: Mapping[str, str]) -> float:
    """Return the limit for connecting: that of the URL, of libpq's environment, or the default."""
    from_environment = os.environ.get("PGCONNECT_TIMEOUT") if database is POSTGRESQL else None
    text = asked.get("connect_timeout") or from_environment or str(_CONNECT_SECONDS)
    if not text.isdecimal():
        raise ConfigInvalid("durable_database_url", f"connect_timeout={text}", "it is no whole number of seconds")
    return int(text) or _CONNECT_SECONDS


def _build_options(asked: Mapping[str, str], *, has_lock_timeout: bool) -> str:
    """Return the settings of a PostgreSQL session. With ``options`` libpq ignores PGOPTIONS, so it is added."""
    text = asked.get("options") or os.environ.get("PGOPTIONS", "")
    if re.search(_OTHER_ISOLATION, text, re.IGNORECASE):
        remedy = "Durable needs READ COMMITTED: remove default_transaction_isolation from the URL and from PGOPTIONS"
        raise ConfigInvalid("durable_database_url", text, remedy)
    ours = f"-c lock_timeout={_LOCK_TIMEOUT_SECONDS}s" if has_lock_timeout else ""
    return f"{ours} {text}".strip()


def _run_init_command(command: str, connection: Any, _: Any) -> None:
    """Run the application's ``init_command`` on a new connection to MariaDB, and check what it may break."""
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(command)
        cursor.execute("SELECT @@character_set_client, @@autocommit")
        charset, autocommit = cursor.fetchone()
    connection.rollback()
    if charset != "utf8mb4" or autocommit:
        remedy = "it must leave character_set_client at utf8mb4 and autocommit off"
        raise ConfigInvalid("durable_database_url", f"init_command={command}", remedy)


_WATCHED_SOCKET = "celery_durable.watched_socket"


def _watch_first_statements(seconds: float, connection: Any, record: Any) -> None:
    """Let the watchdog cut a new connection on which SQLAlchemy's first statements, such as for the version, hang."""
    watched_socket = watch_socket_of(connection, closes_after_cut=True)
    if watched_socket is not None:
        watched_socket.arm(real_monotonic() + seconds)
        record.info[_WATCHED_SOCKET] = watched_socket


def _stop_watching_first_statements(_: Any, record: Any) -> None:
    watched_socket = record.info.pop(_WATCHED_SOCKET, None)
    if watched_socket is not None:
        watched_socket.disarm()
        watched_socket.close()


def _connect_watched(dialect: Any, _record: Any, args: Any, params: dict[str, Any]) -> Any:
    """Connect PyMySQL over a socket that the watchdog cuts if the server accepts and then sends nothing.

    PyMySQL's connect_timeout covers only the TCP connection (PyMySQL/PyMySQL#1177), and its read_timeout would apply to
    every later statement too.
    """
    if args or params.get("unix_socket") or "host" not in params:
        return None  # SQLAlchemy connects
    connect, connection_type = dialect.loaded_dbapi.connect, dialect.loaded_dbapi.connections.Connection
    if connect is connection_type:  # otherwise it is wrapped, for example to trace statements
        connect = _share_tls_context(connection_type)
    connection, seconds = connect(**params, defer_connect=True), params.get("connect_timeout", _CONNECT_SECONDS)
    try:
        sock = socket.create_connection((connection.host, connection.port), seconds)
    except OSError as error:
        text = f"Can't connect to the server on {connection.host!r} ({error})"
        raise dialect.loaded_dbapi.OperationalError(2003, text) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.settimeout(None)
    watched_socket = WatchedSocket(sock.fileno())
    watched_socket.arm(real_monotonic() + seconds)
    try:
        connection.connect(sock)
    finally:
        watched_socket.disarm()
        watched_socket.close()
    return connection


@functools.cache
def _share_tls_context(connection_type: Any) -> Any:
    """Return PyMySQL's connection class with one TLS context for all connections without TLS options.

    Since version 1.2, PyMySQL uses TLS if the server offers it, and reads the system's certificates for each
    connection: 30 ms of CPU, although it does not even check the server's.
    """

    class Connection(connection_type):  # type: ignore[misc]
        shared_context: Any = None

        def _create_ssl_ctx(self, sslp: Any) -> Any:
            if sslp:
                return super()._create_ssl_ctx(sslp)
            if Connection.shared_context is None:
                Connection.shared_context = super()._create_ssl_ctx(sslp)
            return Connection.shared_context

    return Connection


def _set_lock_timeout(connection: sa.Connection) -> None:
    """Set the lock timeout in each transaction: a pooler in transaction mode rejects session settings.

    Statements in autocommit have the lock timeout of the database role.
    """
    driver: Any = connection.connection.driver_connection
    if not driver.autocommit:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_SECONDS}s'")


def configure_transactions(engine: sa.Engine, *, owns_engine: bool) -> sa.Engine:
    """Return an engine with the store's transactions. An application's engine is copied, with its pool."""
    if database_from_url(engine.url) is SQLITE:
        writing = engine.execution_options()
        event.listen(writing, "begin", _begin_immediate)
        return writing
    return engine if owns_engine else engine.execution_options(isolation_level="READ COMMITTED")


def begin_immediate(connection: sa.Connection) -> None:
    """Take SQLite's write lock now, waiting for it. A transaction that reads first and then writes would not wait."""
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:
        run_on_driver(connection, "BEGIN IMMEDIATE")


def roll_back_and_block_writes(connection: sqlite3.Connection) -> None:
    """End the transaction of a connection that another thread uses, and block all later writes of that connection.

    Writes are blocked first: after a rollback alone, each further statement of that thread would commit by itself. This
    waits for a running statement. While a query is only partly read, an interrupt would also hit every later statement
    of the connection, including the two here.
    """
    try:
        connection.execute("PRAGMA query_only=ON")
        connection.rollback()
    except sqlite3.Error as error:
        logger.warning("SQLite's write lock is kept by a body that outlived its step, until it ends: %s", error)


def _begin_immediate(connection: sa.Connection) -> None:
    options = connection.get_execution_options()
    if not options.get(IS_READING) and options.get("isolation_level") != "AUTOCOMMIT":
        begin_immediate(connection)


def _configure_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={SQLITE_SYNCHRONOUS}")


IS_READING = "celery_durable_is_reading"
"""The execution option of a connection to SQLite that begins no transaction."""
_AUTOCOMMIT: Mapping[str, Any] = MappingProxyType({"isolation_level": "AUTOCOMMIT"})


class ConnectionMode:
    """Changes connections of one kind of database: ``reading_options`` are those of pooled ones that only read."""

    reading_options: Mapping[str, Any] = _AUTOCOMMIT
    kept_options: Mapping[str, Any] = MappingProxyType({})

    def begin_reading(self, conn: sa.Connection) -> None:
        """Prepare a kept connection for statements that only read."""

    def end_reading(self, conn: sa.Connection) -> None:
        """Leave a kept connection without locks and without a snapshot."""

    def begin_transactions(self, conn: sa.Connection) -> None:
        """Prepare a kept connection for a transaction."""

    def end_transactions(self, conn: sa.Connection) -> None:
        """Change a kept connection back after its transaction."""


class _PostgresqlMode(ConnectionMode):
    """A kept connection is in autocommit, for single statements. A change costs no round trip."""

    kept_options = _AUTOCOMMIT

    def begin_transactions(self, conn: sa.Connection) -> None:
        conn.rollback()  # ends SQLAlchemy's own transaction state of autocommit; no round trip
        self._switch_isolation_level(conn, "READ COMMITTED")

    def end_transactions(self, conn: sa.Connection) -> None:
        self._switch_isolation_level(conn, "AUTOCOMMIT")

    @staticmethod
    def _switch_isolation_level(conn: sa.Connection, isolation_level: str) -> None:
        """Switch the driver's connection only: SQLAlchemy would store each switch until the connection is returned."""
        dialect: Any = conn.dialect
        dialect.set_isolation_level(conn.connection.dbapi_connection, isolation_level)


class _SqliteMode(ConnectionMode):
    """A connection is in autocommit until BEGIN IMMEDIATE, which `begin_immediate` sends for each transaction.

    SQLAlchemy's AUTOCOMMIT would set a pragma when it is returned, and SQLite then compiles each cached statement anew.
    """

    reading_options = kept_options = MappingProxyType({IS_READING: True})

    def begin_transactions(self, conn: sa.Connection) -> None:
        conn.rollback()  # ends SQLAlchemy's own transaction state of the reads
        conn.execution_options(**{IS_READING: False})

    def end_transactions(self, conn: sa.Connection) -> None:
        conn.execution_options(**self.kept_options)


class _MariadbMode(ConnectionMode):
    """A kept connection stays out of autocommit, because a change costs a round trip: a read ends with a rollback."""

    def begin_reading(self, conn: sa.Connection) -> None:
        conn.begin()  # no round trip

    def end_reading(self, conn: sa.Connection) -> None:
        conn.rollback()


MODES: Mapping[Database, ConnectionMode] = {
    POSTGRESQL: _PostgresqlMode(),
    MARIADB: _MariadbMode(),
    SQLITE: _SqliteMode(),
}


def make_cooperative(connection: Any, _: object) -> None:
    """Make a new connection wait as the process's threads do; for SQLAlchemy's event ``connect``."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("select"):
        return
    from psycopg import waiting  # noqa: PLC0415  # only processes of an eventlet worker get here

    def wait(gen: Any, *args: Any, **kwargs: Any) -> Any:
        return waiting.wait_selector(gen, connection.pgconn.socket, *args, **kwargs)

    connection.wait = wait
