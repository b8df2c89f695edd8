"""A store's connections: one per thread that advances runs, the rest from the pool for as long as they are needed.

A thread that advances keeps its connection for single statements in autocommit, and has its transactions on it too:
with the renewal of leases that makes two connections in a pool process (LAW 8). What is idle for a minute is closed.
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
    """A connection in use, with its line."""

    __slots__ = ("conn", "line", "pool", "used_at")

    def __init__(self, conn: sa.Connection, line: Line | None, pool: sa.Pool) -> None:
        self.conn, self.line, self.pool, self.used_at = conn, line, pool, 0.0

    def begin(self, deadline: float) -> None:
        """Have the watchdog cut it at ``deadline``, if it is not given back before."""
        if self.line is not None:
            self.line.begin(deadline)

    def end(self) -> bool:
        """Nothing is under way any more; False where it was cut."""
        return self.line is None or self.line.end()


class Connections:
    """Those of one engine. ``is_ours``: made by the store, and not the application's.

    ``shares``: a thread that keeps a connection has its transactions and reads on it too. For PostgreSQL, where
    changing the isolation level costs no round trip, and where alone connections are kept.
    """

    def __init__(self, engine: sa.Engine, *, is_ours: bool, has_sockets: bool, shares: bool) -> None:
        self._engine, self._is_ours, self.has_sockets, self._shares = engine, is_ours, has_sockets, shares
        # By thread. Not a threading.local: it would let go of a connection whose thread ended, or that a
        # fork left behind, and the pool would then speak to the server over a socket that is the parent's.
        # What is in here is idle: who uses a connection takes it out meanwhile, so that nobody closes it.
        self._kept: dict[int, Kept] = {}
        self._used_at = _NEVER
        """When the pool was last used; infinite where there is nothing in it."""
        _all.add(self)

    # --- a thread's own -------------------------------------------------------------------------

    def take(self, deadline: float) -> Kept:
        """The calling thread's connection, to be given to `release_delivery` or `drop`; made where it has none."""
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

    def release_delivery(self, kept: Kept) -> None:
        """Keep it for the thread's next statement. Not where it belongs to a shared pool: its owner fills that."""
        kept.used_at = steady()
        if kept.end() and self._is_ours and threading.get_ident() not in self._kept:
            self._kept[threading.get_ident()] = kept
        else:
            self.drop(kept)

    def drop(self, kept: Kept) -> None:
        """Give it to the pool, which finds out whether it is still good."""
        self._used_at = steady()
        try:
            if kept.pool is not self._engine.pool:  # disposed of meanwhile, so that nobody would close what is in it
                kept.conn.invalidate()
            kept.conn.close()
        finally:
            if kept.line is not None:
                kept.line.close()

    def release(self) -> None:
        """Give the thread's connection to the pool: what comes next needs another one."""
        if (kept := self._pop()) is not None:
            self.drop(kept)

    # --- for a while ----------------------------------------------------------------------------

    @contextmanager
    def for_reading(self, deadline: float) -> Iterator[sa.Connection]:
        """A connection in autocommit: the thread's own if it keeps one, else one of the pool."""
        kept = self._pop() if self._shares else None
        if kept is None:
            with self.borrowed(deadline, "AUTOCOMMIT") as conn:
                yield conn
        else:
            with self._using(kept, deadline):
                yield kept.conn

    @contextmanager
    def for_transaction(self, deadline: float) -> Iterator[sa.Connection]:
        """A connection to begin a transaction on: the thread's own if it keeps one, else one of the pool."""
        kept = self._pop() if self._shares else None
        if kept is None:
            with self.borrowed(deadline) as conn:
                yield conn
            return
        with self._using(kept, deadline):
            kept.conn.rollback()  # of what SQLAlchemy takes for a transaction in autocommit: no round trip
            self._set(kept.conn, "READ COMMITTED")
            yield kept.conn
            self._set(kept.conn, "AUTOCOMMIT")

    @contextmanager
    def _using(self, kept: Kept, deadline: float) -> Iterator[None]:
        kept.begin(deadline)
        try:
            yield
        except BaseException:  # perhaps in the middle of a statement, or of a transaction: the pool resets it
            self.drop(kept)
            raise
        self.release_delivery(kept)

    @contextmanager
    def borrowed(self, deadline: float, isolation_level: str | None = None) -> Iterator[sa.Connection]:
        """A connection from the pool, and back into it."""
        borrowed = self._checkout()
        borrowed.begin(deadline)
        try:
            if isolation_level is not None:
                self._set(borrowed.conn, isolation_level)
            yield borrowed.conn
        finally:
            with self.wrapping():
                self.drop(borrowed)  # watched to the end: the pool rolls back, which is a statement

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
        """Close what has been idle for `IDLE_SECONDS`; on the watchdog's thread."""
        for thread, kept in list(self._kept.items()):
            if now - kept.used_at > IDLE_SECONDS and (taken := self._kept.pop(thread, None)) is not None:
                taken.conn.invalidate()
                self.drop(taken)
        if self._is_ours and now - self._used_at > IDLE_SECONDS:
            self._used_at = _NEVER
            self._engine.dispose()

    def renew(self) -> None:
        """Have what comes next in this thread go over new connections."""
        self.release()
        if self._is_ours:
            self._engine.dispose()

    def close(self) -> None:
        """Close what is idle; only when no other thread is at work."""
        while self._kept:
            self.drop(self._kept.popitem()[1])

    def forget(self) -> None:
        """After a fork: the parent's connections are not ours to use or to close."""
        _inherited.extend(kept.conn for kept in self._kept.values())
        _inherited.append(self._engine.pool)
        self._kept = {}
        self._used_at = _NEVER
        self._engine.dispose(close=False)

    @contextmanager
    def wrapping(self) -> Iterator[None]:
        """Wrap the loss of a connection whose isolation level is set, or set back: SQLAlchemy lets it pass as it is.

        In the second case the connection is also missing from the pool ever after, so that needs a new one.
        """
        driver_error: type[Exception] = self._engine.dialect.loaded_dbapi.Error
        try:
            yield
        except driver_error as error:
            self._engine.dispose()  # the pool has noticed nothing, and may hold more of the kind
            raise exc.DBAPIError.instance(None, None, error, driver_error, connection_invalidated=True) from error


_all: weakref.WeakSet[Connections] = weakref.WeakSet()
_inherited: list[sa.Connection | sa.Pool] = []
"""The parent's connections and pools, held for ever.

When a connection is collected, the pool sends a ROLLBACK down its socket. When one in a pool is, mysqlclient sends
QUIT, and the server closes the connection of the parent.
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
