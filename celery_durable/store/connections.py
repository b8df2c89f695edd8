"""A store's connections: one per thread that advances runs; the others come from the pool while they are needed.

A thread that advances runs keeps a connection for single statements in autocommit, and uses it for transactions too.
Together with the renewal of leases that makes two connections per process of a Celery worker's prefork pool (LAW 8). A
connection that is idle for a minute is closed.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from celery_durable.runtime import real_monotonic
from celery_durable.store import watchdog
from celery_durable.store.faults import CommitInDoubt, is_connection_useless
from celery_durable.store.libpq import PreparedStatements, prepared_statements_of
from celery_durable.store.watchdog import WatchedSocket, watch_socket_of

logger = logging.getLogger("celery_durable.store")

IDLE_SECONDS = 60.0
_NEVER = float("inf")


class WatchedConnection:
    """A connection and the socket by which the watchdog can cut it. For SQLite the socket is None.

    ``prepared_statements``: those of a kept connection, if it can run them without a cursor.
    """

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
    """The connections of one engine.

    ``owns_engine`` is False if the application made the engine. ``reuses_kept_connection`` says that a thread uses its
    kept connection for transactions and reads too. It is True for PostgreSQL only: only there are connections kept, and
    a change of the isolation level costs no round trip.
    """

    def __init__(
        self, engine: sa.Engine, *, owns_engine: bool, has_sockets: bool, reuses_kept_connection: bool
    ) -> None:
        self._engine, self._owns_engine, self.has_sockets, self._reuses_kept_connection = (
            engine,
            owns_engine,
            has_sockets,
            reuses_kept_connection,
        )
        # By thread id. Not a threading.local: it would release the connection of an ended thread, and after a fork the
        # parent's connection. The pool would then send to the server over the parent's socket. All connections in this
        # dict are idle. A thread takes its connection out to use it, so no other thread can close it meanwhile.
        self._kept: dict[int, WatchedConnection] = {}
        self._last_used_at = _NEVER
        """When the pool was last used; infinite if the pool is empty."""
        _all_connections.add(self)

    # --- the kept connection of a thread -------------------------------------------------------------------------

    def take_or_open(self, deadline: float) -> WatchedConnection:
        """Take the calling thread's kept connection, or open one. End its use with `keep` or `return_to_pool`."""
        kept = self._take_kept() or self._open_kept(deadline)
        kept.arm(deadline)
        return kept

    def _take_kept(self) -> WatchedConnection | None:
        kept = self._kept.pop(threading.get_ident(), None)
        if kept is not None and (kept.conn.closed or kept.conn.invalidated):
            self.return_to_pool(kept)
            return None
        return kept

    def _open_kept(self, deadline: float) -> WatchedConnection:
        kept = self._checkout()
        kept.arm(deadline)
        try:
            self._set_isolation_level(kept.conn, "AUTOCOMMIT")
            if self._owns_engine:
                kept.prepared_statements = prepared_statements_of(kept.conn)
        except BaseException:
            self.return_to_pool(kept)
            raise
        kept.disarm()
        return kept

    def keep(self, kept: WatchedConnection, *, if_new: bool = True) -> None:
        """Keep the connection for the thread's next statement. Connections of the application's engine are not kept.

        ``if_new``: keep it even if `take_or_open` has just opened it.
        """
        was_kept, kept.last_used_at = kept.last_used_at > 0, real_monotonic()
        may_keep = self._owns_engine and (if_new or was_kept)
        if kept.disarm() and may_keep and threading.get_ident() not in self._kept:
            self._kept[threading.get_ident()] = kept
        else:
            self.return_to_pool(kept)

    def return_to_pool(self, kept: WatchedConnection) -> None:
        """Return a connection to the pool. The pool's reset detects whether the connection still works."""
        self._last_used_at = real_monotonic()
        try:
            # The engine has a new pool. The old one would never close this connection.
            if kept.pool is not self._engine.pool:
                kept.conn.invalidate()
            kept.conn.close()
        finally:
            if kept.watched_socket is not None:
                kept.watched_socket.close()

    def release_kept(self) -> None:
        """Return the thread's kept connection to the pool, so that the thread holds none while it uses another."""
        if (kept := self._take_kept()) is not None:
            self.return_to_pool(kept)

    # --- for one use ----------------------------------------------------------------------------

    @contextmanager
    def for_reading(self, deadline: float) -> Iterator[sa.Connection]:
        """Yield a connection in autocommit: the thread's kept one, or else one from the pool."""
        kept = self._take_kept() if self._reuses_kept_connection else None
        if kept is None:
            with self.borrow(deadline, "AUTOCOMMIT") as conn:
                yield conn
        else:
            with self._use_kept(kept, deadline):
                yield kept.conn

    @contextmanager
    def for_transaction(self, deadline: float) -> Iterator[sa.Connection]:
        """Yield a connection to start a transaction on: the thread's kept one, or else one from the pool."""
        kept = self._take_kept() if self._reuses_kept_connection else None
        if kept is None:
            with self.borrow(deadline) as conn:
                yield conn
            return
        with self._use_kept(kept, deadline):
            kept.conn.rollback()  # ends SQLAlchemy's own transaction state of autocommit; no round trip
            self._switch_isolation_level(kept.conn, "READ COMMITTED")
            yield kept.conn
            self._switch_isolation_level(kept.conn, "AUTOCOMMIT")

    @contextmanager
    def _use_kept(self, kept: WatchedConnection, deadline: float) -> Iterator[None]:
        kept.arm(deadline)
        try:
            yield
        except BaseException:  # a statement or a transaction may be unfinished: the pool resets the connection
            self.return_to_pool(kept)
            raise
        self.keep(kept)

    @contextmanager
    def borrow(self, deadline: float, isolation_level: str | None = None) -> Iterator[sa.Connection]:
        """Yield a connection from the pool and return it at the end of the block."""
        borrowed = self._checkout()
        borrowed.arm(deadline)
        try:
            if isolation_level is not None:
                self._set_isolation_level(borrowed.conn, isolation_level)
            yield borrowed.conn
        except (exc.DBAPIError, CommitInDoubt) as error:
            # SQLAlchemy does not know the errors of a Galera node without a majority.
            if is_connection_useless(error) and not borrowed.conn.closed:
                borrowed.conn.invalidate()
            raise
        finally:
            with self.wrap_driver_errors():
                self.return_to_pool(borrowed)  # still watched: the pool's rollback is a statement too

    def _checkout(self) -> WatchedConnection:
        self._last_used_at, pool = real_monotonic(), self._engine.pool
        with self.wrap_driver_errors():
            conn = self._engine.connect()
        return WatchedConnection(conn, self._watch_socket(conn), pool)

    def _set_isolation_level(self, conn: sa.Connection, isolation_level: str) -> None:
        with self.wrap_driver_errors():
            try:
                conn.execution_options(isolation_level=isolation_level)
            except BaseException:
                conn.invalidate()
                raise

    def _switch_isolation_level(self, conn: sa.Connection, isolation_level: str) -> None:
        """Switch the driver's connection only: SQLAlchemy would store each switch until the connection is returned."""
        dialect: Any = conn.dialect
        with self.wrap_driver_errors():
            dialect.set_isolation_level(conn.connection.dbapi_connection, isolation_level)

    def _watch_socket(self, conn: sa.Connection) -> WatchedSocket | None:
        return watch_socket_of(conn.connection.driver_connection) if self.has_sockets else None

    # --- closing --------------------------------------------------------------------------------

    def close_idle(self, now: float) -> None:
        """Close connections that have been idle for `IDLE_SECONDS`. Runs on the watchdog's thread."""
        for thread, kept in list(self._kept.items()):
            if now - kept.last_used_at > IDLE_SECONDS and (taken := self._kept.pop(thread, None)) is not None:
                taken.conn.invalidate()
                self.return_to_pool(taken)
        is_idle = self._owns_engine and now - self._last_used_at > IDLE_SECONDS
        if is_idle and not self._is_pool_in_use():
            self._last_used_at = _NEVER
            self._engine.dispose()

    def _is_pool_in_use(self) -> bool:
        """Whether a connection is in use, for example by a migration, which uses the engine itself.

        If the pool were replaced now, this connection would never be closed.
        """
        pool = self._engine.pool
        kept = sum(each.pool is pool for each in list(self._kept.values()))
        return isinstance(pool, sa.QueuePool) and pool.checkedout() > kept

    def reconnect(self) -> None:
        """Make this thread's next statements use new connections, which may reach another server."""
        self.release_kept()
        if self._owns_engine:
            self._engine.dispose()

    def close(self) -> None:
        """Close the idle connections. No other thread may be using them."""
        while self._kept:
            self.return_to_pool(self._kept.popitem()[1])

    def abandon(self) -> None:
        """Stop using the parent's connections in a forked child, without closing them."""
        _inherited.extend(kept.conn for kept in self._kept.values())
        _inherited.append(self._engine.pool)
        self._kept = {}
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
            self._engine.dispose()  # the pool may hold more lost connections
            raise exc.DBAPIError.instance(None, None, error, driver_error, connection_invalidated=True) from error


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

If Python collected a connection, SQLAlchemy would send a ROLLBACK over the parent's socket. If it collected a
connection in a pool, mysqlclient would send QUIT, and the server would close the parent's connection.
"""


def _close_idle_connections(now: float) -> None:
    for each in list(_all_connections):
        if each.has_sockets:
            each.close_idle(now)


def _after_fork() -> None:
    for each in list(_all_connections):
        each.abandon()


watchdog.register_cleanup(_close_idle_connections)
os.register_at_fork(after_in_child=_after_fork)
