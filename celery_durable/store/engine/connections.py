"""A store's connections: those of its own engine are kept between their uses, and any thread uses them.

A thread takes one for a single statement, reads or a transaction. So a process of a prefork pool has two, with the
renewal of leases (LAW 8). Sessions of steps, migrations and everything on an engine of the application take connections
from the pool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from celery_durable.errors import StoreUnavailable
from celery_durable.housekeeping import Job, prepare_forks, reset_in_child
from celery_durable.runtime import real_monotonic
from celery_durable.store.engine.drivers import MODES
from celery_durable.store.engine.faults import CommitInDoubt, is_connection_useless
from celery_durable.store.engine.libpq import PreparedStatements, prepared_statements_of
from celery_durable.store.schema.dialects import Database
from celery_durable.store.watchdog import WatchedSocket, watch_socket_of

logger = logging.getLogger("celery_durable.store")

IDLE_SECONDS = 60.0
_CLEANUP_SECONDS = 5.0
MAX_KEPT = 20
"""How many connections are kept, if that many threads have used the database at the same time."""
_NEVER = float("inf")
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class WatchedConnection:
    """A connection and the socket by which the watchdog can cut it. For SQLite the socket is None."""

    __slots__ = ("conn", "last_used_at", "pool", "prepared_statements", "watched_socket")

    def __init__(self, conn: sa.Connection, watched_socket: WatchedSocket | None, pool: sa.Pool) -> None:
        self.conn, self.watched_socket, self.pool, self.last_used_at = conn, watched_socket, pool, 0.0
        self.prepared_statements: PreparedStatements | None = None

    def arm(self, deadline: float) -> None:
        """Let the watchdog cut the connection at ``deadline``, unless it is returned before."""
        if self.watched_socket is not None:
            self.watched_socket.arm(deadline)

    def disarm(self) -> bool:
        """Stop the deadline that `arm` set. Returns False if the watchdog cut the connection."""
        return self.watched_socket is None or self.watched_socket.disarm()


class Connections:
    """The connections of one engine. If the application made it (``owns_engine``), none is kept."""

    def __init__(self, engine: sa.Engine, database: Database, *, owns_engine: bool) -> None:
        self._engine, self._owns_engine, self._mode = engine, owns_engine, MODES[database]
        self.has_sockets = not database.has_one_writer
        self._kept: set[WatchedConnection] = set()
        # The kept connections that no thread uses, ordered by their last use. The last one is taken first, so that the
        # others become idle. A list, since its methods are atomic: a thread that has one out is its only user.
        self._idle: list[WatchedConnection] = []
        self._last_used_at = _NEVER
        """When the pool was last used; infinite if the pool is empty."""
        _all_connections.add(self)
        reset_in_child(self)
        prepare_forks(self)

    # --- kept connections ----------------------------------------------------------------------------------------

    def take_or_open(self, deadline: float) -> WatchedConnection:
        """Take a kept connection, or open one. End its use with `keep` or `return_to_pool`."""
        kept = self._take_idle() or self._open_kept(deadline)
        kept.arm(deadline)
        return kept

    def _take_idle(self) -> WatchedConnection | None:
        while True:
            try:
                idle = self._idle.pop()
            except IndexError:
                return None
            is_open = not (idle.conn.closed or idle.conn.invalidated)
            checks = idle.pool.dispatch.checkout
            if is_open and (not checks or self._passes(idle, checks)):
                return idle
            self._close(idle)

    @staticmethod
    def _passes(idle: WatchedConnection, checks: Iterable[Any]) -> bool:
        """Whether the pool's listeners accept it. Django's engine has one, for each use of a connection."""
        pooled: Any = idle.conn.connection
        try:
            for check in checks:
                check(pooled.dbapi_connection, pooled._connection_record, pooled)  # noqa: SLF001
        except exc.DisconnectionError:
            return False
        return True

    def _open_kept(self, deadline: float) -> WatchedConnection:
        kept = self._checkout()
        kept.arm(deadline)
        try:
            self._set_options(kept.conn, self._mode.kept_options)
            if self._owns_engine:
                kept.prepared_statements = prepared_statements_of(kept.conn)
        except BaseException:
            self.return_to_pool(kept)
            raise
        kept.disarm()
        return kept

    def keep(self, kept: WatchedConnection) -> None:
        """Keep a connection of the own engine for its next use, up to `MAX_KEPT`, or return it to the pool."""
        kept.last_used_at = real_monotonic()
        may_keep = kept in self._kept or len(self._kept) < MAX_KEPT
        if kept.disarm() and may_keep and self._owns_engine:
            self._kept.add(kept)
            self._idle.append(kept)
        else:
            self.return_to_pool(kept)

    def return_to_pool(self, kept: WatchedConnection) -> None:
        """Return a connection to the pool. The pool's reset detects whether the connection still works."""
        if kept.conn.invalidated:  # the server has closed it, and probably the others too
            self._close_all_idle()
        self._return(kept)

    def _return(self, kept: WatchedConnection) -> None:
        self._last_used_at = real_monotonic()
        self._kept.discard(kept)
        try:
            # The engine has a new pool. The old one would never close this connection.
            if kept.pool is not self._engine.pool:
                kept.conn.invalidate()
            kept.conn.close()
        finally:
            if kept.watched_socket is not None:
                kept.watched_socket.close()

    def release_idle(self) -> None:
        """Return a kept connection to the pool, so that a session which takes one from there opens no other."""
        if (idle := self._take_idle()) is not None:
            self.return_to_pool(idle)

    # --- for one use ----------------------------------------------------------------------------

    @contextmanager
    def for_reading(self, deadline: float) -> Iterator[sa.Connection]:
        """Yield a connection for statements that only read, each of which sees what was committed before it."""
        if not self._owns_engine:
            with self.borrow(deadline, self._mode.reading_options) as conn:
                yield conn
            return
        with self._use_kept(deadline) as conn:
            self._mode.begin_reading(conn)
            yield conn
            self._mode.end_reading(conn)

    @contextmanager
    def for_transaction(self, deadline: float) -> Iterator[sa.Connection]:
        if not self._owns_engine:
            with self.borrow(deadline) as conn:
                yield conn
            return
        with self._use_kept(deadline) as conn:
            with self.wrap_driver_errors():
                self._mode.begin_transactions(conn)
            yield conn
            with self.wrap_driver_errors():
                self._mode.end_transactions(conn)

    @contextmanager
    def _use_kept(self, deadline: float) -> Iterator[sa.Connection]:
        kept = self.take_or_open(deadline)
        try:
            yield kept.conn
        except BaseException as error:  # a statement or a transaction may be unfinished: the pool resets the connection
            _invalidate_if_useless(kept.conn, error)
            with self.wrap_driver_errors():
                self.return_to_pool(kept)
            raise
        self.keep(kept)

    @contextmanager
    def borrow(self, deadline: float, options: Mapping[str, Any] = _NO_OPTIONS) -> Iterator[sa.Connection]:
        """Yield a connection from the pool, with execution options, and return it at the end of the block."""
        borrowed = self._checkout()
        borrowed.arm(deadline)
        try:
            if options:
                self._set_options(borrowed.conn, options)
            yield borrowed.conn
        except BaseException as error:
            _invalidate_if_useless(borrowed.conn, error)
            raise
        finally:
            with self.wrap_driver_errors():
                self.return_to_pool(borrowed)  # still watched: the pool's rollback is a statement too

    def _checkout(self) -> WatchedConnection:
        self._last_used_at, pool = real_monotonic(), self._engine.pool
        if self._owns_engine and self.has_sockets:
            _closer.start(after=_CLEANUP_SECONDS)
        with self.wrap_driver_errors():
            try:
                conn = self._engine.connect()
            except exc.TimeoutError as error:
                raise StoreUnavailable(str(error).partition(" (Background")[0]) from error
        return WatchedConnection(conn, self._watch_socket(conn), pool)

    def _set_options(self, conn: sa.Connection, options: Mapping[str, Any]) -> None:
        with self.wrap_driver_errors():
            try:
                conn.execution_options(**options)
            except BaseException:
                conn.invalidate()
                raise

    def _watch_socket(self, conn: sa.Connection) -> WatchedSocket | None:
        return watch_socket_of(conn.connection.driver_connection) if self.has_sockets else None

    # --- closing --------------------------------------------------------------------------------

    def close_idle(self, now: float) -> bool:
        """Close connections that have been idle for `IDLE_SECONDS`. Returns whether others may become idle."""
        for idle in list(self._idle):
            if now - idle.last_used_at > IDLE_SECONDS:
                with contextlib.suppress(ValueError):  # a thread has taken it
                    self._idle.remove(idle)
                    self._close(idle)
        is_idle = self._owns_engine and now - self._last_used_at > IDLE_SECONDS
        if is_idle and not self._is_pool_in_use():
            self._last_used_at = _NEVER
            self._engine.dispose()
        return self._owns_engine and (bool(self._kept) or self._last_used_at != _NEVER)

    def _is_pool_in_use(self) -> bool:
        """Whether a connection is in use: it would never be closed if the pool were replaced now."""
        pool = self._engine.pool
        kept = sum(each.pool is pool for each in list(self._kept))
        return isinstance(pool, sa.QueuePool) and pool.checkedout() > kept

    def _close(self, idle: WatchedConnection) -> None:
        if not idle.conn.closed:
            idle.conn.invalidate()
        self._return(idle)

    def _close_all_idle(self) -> None:
        while (idle := self._take_idle()) is not None:
            self._close(idle)

    def reconnect(self) -> None:
        """Make the next statements use new connections, which may reach another server."""
        self._close_all_idle()
        if self._owns_engine:
            self._engine.dispose()

    def close(self) -> None:
        """Close the idle connections. No other thread may be using them."""
        self._close_all_idle()

    def prepare_fork(self) -> None:
        """Close SQLite's idle connections: it locks by files that all connections of a process share.

        The beat inside a worker is a fork that closes all inherited files. Its own connections would then fail.
        """
        if not self.has_sockets and isinstance(self._engine.pool, sa.QueuePool):
            self._close_all_idle()
            self._engine.dispose()

    def reset_in_child(self) -> None:
        """Stop using the parent's connections in a forked child, without closing them."""
        _inherited.extend(kept.conn for kept in self._kept)
        _inherited.append(self._engine.pool)
        self._kept, self._idle = set(), []
        self._last_used_at = _NEVER
        self._engine.dispose(close=False)

    @contextmanager
    def wrap_driver_errors(self) -> Iterator[None]:
        """Raise DBAPIError for a driver's error that SQLAlchemy does not wrap, and replace the pool.

        Such an error occurs if a connection is lost while its isolation level is set or reset. After a failed reset the
        pool would count the connection as in use forever.
        """
        driver_error: type[Exception] = self._engine.dialect.loaded_dbapi.Error
        try:
            yield
        except driver_error as error:
            self._close_all_idle()  # they may be lost, too
            self._engine.dispose()
            raise exc.DBAPIError.instance(None, None, error, driver_error, connection_invalidated=True) from error


def _invalidate_if_useless(conn: sa.Connection, error: BaseException) -> None:
    """Close a connection that must not be used again. SQLAlchemy does not know the errors of a useless Galera node."""
    if isinstance(error, exc.DBAPIError | CommitInDoubt) and is_connection_useless(error) and not conn.closed:
        conn.invalidate()


def roll_back(transaction: sa.RootTransaction) -> None:
    """Roll back a transaction whose connection may be lost."""
    try:
        transaction.rollback()
    except exc.DBAPIError as error:
        # The transaction ended with the connection. The caller raises the original error.
        logger.info("A rollback found the connection lost: %s", error.orig)


_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()
_inherited: list[sa.Connection | sa.Pool] = []
"""The parent's connections and pools, kept forever.

If Python collected them, SQLAlchemy would send a ROLLBACK over the parent's socket, and mysqlclient QUIT, at which the
server closes the parent's connection.
"""


def _close_idle_connections(now: float) -> bool:
    """Close those of all stores; returns whether others may become idle."""
    is_open = False
    for each in list(_all_connections):
        is_open = (each.has_sockets and each.close_idle(now)) or is_open
    return is_open


_closer = Job(
    "durable-idle-connections",
    lambda: _CLEANUP_SECONDS if _close_idle_connections(real_monotonic()) else math.inf,
)
