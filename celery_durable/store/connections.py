"""A store's connections: one per thread that advances runs; the others come from the pool while they are needed.

A thread that advances runs keeps a connection for single statements in autocommit, and uses it for transactions too.
Together with the renewal of leases that makes two connections per pool process (LAW 8). A connection that is idle for
a minute is closed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import exc

from celery_durable.runtime import steady
from celery_durable.store import watchdog
from celery_durable.store.watchdog import Line, line_of

IDLE_SECONDS = 60.0
_NEVER = float("inf")


class Kept:
    """A connection in use, with its watchdog line."""

    __slots__ = ("conn", "line", "pool", "used_at")

    def __init__(self, conn: sa.Connection, line: Line | None, pool: sa.Pool) -> None:
        self.conn, self.line, self.pool, self.used_at = conn, line, pool, 0.0

    def begin(self, deadline: float) -> None:
        """Let the watchdog cut the connection at ``deadline``, unless it is returned before."""
        if self.line is not None:
            self.line.begin(deadline)

    def end(self) -> bool:
        """End the watch. Returns False if the watchdog cut the connection."""
        return self.line is None or self.line.end()


class Connections:
    """The connections of one engine. ``is_ours`` says that the store made the engine, not the application.

    ``shares`` says that a thread uses its kept connection for transactions and reads too. That is for PostgreSQL:
    changing the isolation level costs no round trip there, and only there are connections kept.
    """

    def __init__(self, engine: sa.Engine, *, is_ours: bool, has_sockets: bool, shares: bool) -> None:
        self._engine, self._is_ours, self.has_sockets, self._shares = engine, is_ours, has_sockets, shares
        # By thread. Not a threading.local, which would release the connection of an ended thread, or of the parent
        # after a fork. The pool would then talk to the server over the parent's socket. All connections in this dict
        # are idle: a thread takes its connection out while it uses it, so that no other thread closes it.
        self._kept: dict[int, Kept] = {}
        self._used_at = _NEVER
        """When the pool was last used; infinite if the pool is empty."""
        _all.add(self)

    # --- a thread's own -------------------------------------------------------------------------

    def take(self, deadline: float) -> Kept:
        """Take the calling thread's connection, or make one. Return it with `keep` or `drop`."""
        kept = self._pop() or self._new_kept(deadline)
        kept.begin(deadline)
        return kept

    def _pop(self) -> Kept | None:
        kept = self._kept.pop(threading.get_ident(), None)
        if kept is not None and (kept.conn.closed or kept.conn.invalidated):
            self.drop(kept)
            return None
        return kept

    def _new_kept(self, deadline: float) -> Kept:
        kept = self._checkout()
        kept.begin(deadline)
        try:
            self._set(kept.conn, "AUTOCOMMIT")
        except BaseException:
            self.drop(kept)
            raise
        kept.end()
        return kept

    def keep(self, kept: Kept) -> None:
        """Keep the connection for the thread's next statement. One from a shared pool goes back to the pool."""
        kept.used_at = steady()
        if kept.end() and self._is_ours and threading.get_ident() not in self._kept:
            self._kept[threading.get_ident()] = kept
        else:
            self.drop(kept)

    def drop(self, kept: Kept) -> None:
        """Return a connection to the pool, which finds out whether it still works."""
        self._used_at = steady()
        try:
            # the pool was disposed of meanwhile, so it would never close the connection
            if kept.pool is not self._engine.pool:
                kept.conn.invalidate()
            kept.conn.close()
        finally:
            if kept.line is not None:
                kept.line.close()

    def release(self) -> None:
        """Return the thread's kept connection to the pool, because the thread needs another kind next."""
        if (kept := self._pop()) is not None:
            self.drop(kept)

    # --- for a while ----------------------------------------------------------------------------

    @contextmanager
    def for_reading(self, deadline: float) -> Iterator[sa.Connection]:
        """Yield a connection in autocommit: the thread's kept one, or else one from the pool."""
        kept = self._pop() if self._shares else None
        if kept is None:
            with self.borrowed(deadline, "AUTOCOMMIT") as conn:
                yield conn
        else:
            with self._using(kept, deadline):
                yield kept.conn

    @contextmanager
    def for_transaction(self, deadline: float) -> Iterator[sa.Connection]:
        """Yield a connection to start a transaction on: the thread's kept one, or else one from the pool."""
        kept = self._pop() if self._shares else None
        if kept is None:
            with self.borrowed(deadline) as conn:
                yield conn
            return
        with self._using(kept, deadline):
            kept.conn.rollback()  # ends what SQLAlchemy takes for a transaction in autocommit: no round trip
            self._set(kept.conn, "READ COMMITTED")
            yield kept.conn
            self._set(kept.conn, "AUTOCOMMIT")

    @contextmanager
    def _using(self, kept: Kept, deadline: float) -> Iterator[None]:
        kept.begin(deadline)
        try:
            yield
        except BaseException:  # It may be in the middle of a statement or a transaction. The pool resets it.
            self.drop(kept)
            raise
        self.keep(kept)

    @contextmanager
    def borrowed(self, deadline: float, isolation_level: str | None = None) -> Iterator[sa.Connection]:
        """Yield a connection from the pool, and return it afterwards."""
        borrowed = self._checkout()
        borrowed.begin(deadline)
        try:
            if isolation_level is not None:
                self._set(borrowed.conn, isolation_level)
            yield borrowed.conn
        finally:
            with self.wrapping():
                self.drop(borrowed)  # watched to the end: the pool's rollback is a statement too

    def _checkout(self) -> Kept:
        self._used_at, pool = steady(), self._engine.pool
        with self.wrapping():
            conn = self._engine.connect()
        return Kept(conn, self._line(conn), pool)

    def _set(self, conn: sa.Connection, isolation_level: str) -> None:
        with self.wrapping():
            try:
                conn.execution_options(isolation_level=isolation_level)
            except BaseException:
                conn.invalidate()
                raise

    def _line(self, conn: sa.Connection) -> Line | None:
        return line_of(conn.connection.driver_connection) if self.has_sockets else None

    # --- the end --------------------------------------------------------------------------------

    def tidy(self, now: float) -> None:
        """Close connections that have been idle for `IDLE_SECONDS`. Runs on the watchdog's thread."""
        for thread, kept in list(self._kept.items()):
            if now - kept.used_at > IDLE_SECONDS and (taken := self._kept.pop(thread, None)) is not None:
                taken.conn.invalidate()
                self.drop(taken)
        if self._is_ours and now - self._used_at > IDLE_SECONDS:
            self._used_at = _NEVER
            self._engine.dispose()

    def renew(self) -> None:
        """Make this thread's next statements use new connections."""
        self.release()
        if self._is_ours:
            self._engine.dispose()

    def close(self) -> None:
        """Close the idle connections. No other thread may be using them."""
        while self._kept:
            self.drop(self._kept.popitem()[1])

    def forget(self) -> None:
        """Forget the parent's connections after a fork. The child must neither use nor close them."""
        _inherited.extend(kept.conn for kept in self._kept.values())
        _inherited.append(self._engine.pool)
        self._kept = {}
        self._used_at = _NEVER
        self._engine.dispose(close=False)

    @contextmanager
    def wrapping(self) -> Iterator[None]:
        """Wrap the driver's error if a connection is lost while its isolation level is set or reset.

        SQLAlchemy does not wrap it. After a failed reset the pool also counts the connection as in use forever. So
        the pool is replaced.
        """
        driver_error: type[Exception] = self._engine.dialect.loaded_dbapi.Error
        try:
            yield
        except driver_error as error:
            self._engine.dispose()  # the pool does not know, and may hold more lost connections
            raise exc.DBAPIError.instance(None, None, error, driver_error, connection_invalidated=True) from error


_all: weakref.WeakSet[Connections] = weakref.WeakSet()
_inherited: list[sa.Connection | sa.Pool] = []
"""The parent's connections and pools, kept forever.

If a connection were collected, the pool would send a ROLLBACK down its socket. If one in a pool were, mysqlclient
would send QUIT, and the server would close the parent's connection.
"""


def _tidy(now: float) -> None:
    for each in list(_all):
        if each.has_sockets:
            each.tidy(now)


def _after_fork() -> None:
    for each in list(_all):
        each.forget()


watchdog.tidy_with(_tidy)
os.register_at_fork(after_in_child=_after_fork)
