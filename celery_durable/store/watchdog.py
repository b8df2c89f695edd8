"""Deadlines of internal statements: a watchdog cuts the connection of a statement that is late (LAW 7).

If a database goes silent (a fail-over, a lost route), its connections stay open and a read waits without a timeout.
psycopg offers no read timeout; PyMySQL's would also apply to an author's bulk update. So one thread per process shuts
down the socket of a connection with a late internal statement. The waiting thread gets an OperationalError at once.
The waiting thread is not replaced, because every replacement would leave a thread and a connection behind.

If the watchdog cuts a connection during a commit, the commit is in doubt and is resolved as usual (docs/design.md).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from celery_durable.runtime import steady

logger = logging.getLogger("celery_durable.store")

_LOOK_SECONDS = 0.25
_TIDY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How long an operation may wait for the database: in one try, and in all its tries together."""

    once_seconds: float
    total_seconds: float


# `once_seconds` exceeds the 5 s after which the server gives up waiting for a lock. So the server reports that
# itself.
LOOP = Bound(6.0, 10.0)
"""For loops that run again anyway: sweeps, renewals, heartbeats."""
PASS = Bound(10.0, 25.0)
"""For claims and step boundaries: both fit into the default lease."""
LOAD = Bound(20.0, 25.0)
"""For reading a whole run, which may be large."""
ORDINARY = Bound(10.0, 20.0)
DIRECT = Bound(2.0, 2.0)
"""For a foreign process that waits for the call: an answer when its task ends. The answer can also go as a message."""


class Limit:
    """The time at which the caller stops waiting; `math.inf` means never."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until


_limit: ContextVar[Limit | None] = ContextVar("celery_durable_database_limit", default=None)


@contextlib.contextmanager
def answer_within(seconds: float | None) -> Iterator[Limit]:
    """Make all operations inside the block end by one time, whatever their own bounds are. None means no bound."""
    limit = Limit(math.inf if seconds is None else steady() + seconds)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def own_bounds() -> Iterator[None]:
    """Restore the operations' own bounds inside the block, for a pass that runs eagerly in a request."""
    token = _limit.set(None)
    try:
        yield
    finally:
        _limit.reset(token)


class Window:
    """The time that one operation has for all its tries."""

    __slots__ = ("_once", "_until")

    def __init__(self, bound: Bound | None) -> None:
        limit = _limit.get()
        if limit is not None:
            self._once, self._until = math.inf, limit.until
        elif bound is None:
            self._once = self._until = math.inf
        else:
            self._once, self._until = bound.once_seconds, steady() + bound.total_seconds

    @property
    def is_over(self) -> bool:
        return self._until <= steady()

    def next(self) -> float:
        """Return the deadline of the next try, on the steady clock."""
        return min(self._until, steady() + self._once)


class Line:
    """The socket of one connection, and the deadline of the statement that runs on it.

    It holds a copy of the file descriptor. The driver may close its own at any time, and its number is then reused.

    A statement takes no lock. Its deadline is an element of a list. Either the thread that added it or the watchdog
    removes it. The watchdog cuts only if it removed the element, so it never cuts a statement that has ended.
    """

    __slots__ = ("_begun", "_lock", "_socket", "is_brief")

    def __init__(self, fd: int, *, is_brief: bool = False) -> None:
        self.is_brief = is_brief
        """Whether a cut also closes this line. True for a connection that is still being made and has no owner yet."""
        # The family does not matter: shutdown() needs none.
        was_blocking = os.get_blocking(fd)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(fd))
        # If sockets have a default timeout, as in every beat (celery/apps/beat.py), Python has just made the
        # connection itself non-blocking, and PyMySQL would read None.
        os.set_blocking(fd, was_blocking)
        self._begun: list[float] = []
        self._lock = threading.Lock()
        _watchdog.add(self)

    def begin(self, deadline: float) -> None:
        """Let the watchdog cut the connection at ``deadline``, until `end` is called."""
        self._begun.append(deadline)

    def end(self) -> bool:
        """End the statement. Returns False if the watchdog cut the connection."""
        try:
            self._begun.pop()
        except IndexError:
            with self._lock:  # wait for the cut, so that it does not hit a later statement
                return False
        return True

    def cut_if_late(self, now: float) -> bool:
        """Cut the connection if its statement is late; called by the watchdog. Returns whether it was cut."""
        if not self._begun or self._begun[0] > now:
            return False
        with self._lock:
            try:
                self._begun.pop()
            except IndexError:  # the statement has ended meanwhile
                return False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return True

    def forget(self) -> None:
        """Close the copy in a forked child.

        The lock is not taken: a thread of the parent may have held it during the fork.
        """
        self._socket.close()

    def close(self) -> None:
        """Stop watching. The connection stays open."""
        _watchdog.remove(self)
        with self._lock:
            self._socket.close()


_no_socket: set[str] = set()


def line_of(driver_connection: Any, *, is_brief: bool = False) -> Line | None:
    """Return the line of a driver's connection. Returns None if the driver shows no socket, and logs that once."""
    try:
        if hasattr(driver_connection, "fileno"):  # psycopg, psycopg2, mysqlclient
            return Line(driver_connection.fileno(), is_brief=is_brief)
        return Line(driver_connection._sock.fileno(), is_brief=is_brief)  # noqa: SLF001  # PyMySQL: nowhere else
    except Exception as exc:  # noqa: BLE001  # a closed connection raises as each driver likes
        name = type(driver_connection).__module__
        if name not in _no_socket:
            _no_socket.add(name)
            logger.info("A connection of %s shows no socket, so its statements have no deadline: %r", name, exc)
        return None


class _Watchdog:
    """The lines of this process, and the thread that checks them."""

    def __init__(self) -> None:
        self._begin()
        self._tidies: list[Callable[[float], None]] = []

    def _begin(self) -> None:
        self._lines: set[Line] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, line: Line) -> None:
        with self._lock:
            self._lines.add(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="durable-watchdog", daemon=True)
                self._thread.start()

    def remove(self, line: Line) -> None:
        with self._lock:
            self._lines.discard(line)

    def tidy_with(self, tidy: Callable[[float], None]) -> None:
        """Register a function to call every few seconds with the steady clock's time. It must not block."""
        self._tidies.append(tidy)

    def _loop(self) -> None:
        looks, tidied_at, expected = threading.Event(), steady(), math.inf
        while True:
            looks.wait(_LOOK_SECONDS)
            now = steady()
            if now > expected + 1:  # The process was stopped, not the database: let it read what has arrived.
                expected = now + _LOOK_SECONDS
                continue
            expected = now + _LOOK_SECONDS
            self._look(now)
            if now - tidied_at > _TIDY_SECONDS:
                tidied_at = now
                for tidy in self._tidies:
                    tidy(now)

    def _look(self, now: float) -> None:
        with self._lock:
            lines = list(self._lines)
        cut = [line for line in lines if line.cut_if_late(now)]
        for line in cut:
            if line.is_brief:
                line.close()
        if cut:
            logger.warning(
                "The database has not answered in time: %d of %d connections that wait for it are cut",
                len(cut),
                len(lines),
            )

    def after_fork(self) -> None:
        """Start afresh in a forked child, which has no watchdog thread and must not use the parent's locks.

        It closes the copies of the parent's sockets. The parent's connections stay open.
        """
        lines = self._lines
        self._begin()
        for line in lines:
            line.forget()


_watchdog = _Watchdog()
tidy_with = _watchdog.tidy_with
os.register_at_fork(after_in_child=_watchdog.after_fork)
