"""Deadlines of our own statements: a watchdog cuts the connection of one that overstays (LAW 7).

A database that goes silent (a fail-over, a lost route) keeps its connections open, and a read has no timeout: psycopg
offers none, PyMySQL's would hold for an author's bulk update too. So one thread per process shuts the socket down of a
connection whose statement of ours is late, and the thread that waits there comes back with an OperationalError at
once. It is not replaced: each replacement would leave a thread and a connection behind.

What is cut while it commits is a commit in doubt, and decided like every other (docs/design.md).
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


# `once` is above the 5 s after which the server gives up a lock, so that it can say so itself.
LOOP = Bound(6.0, 10.0)
"""For loops that come again anyway: sweeps, renewals, heartbeats."""
PASS = Bound(10.0, 25.0)
"""For claims and step boundaries: together within the default lease."""
LOAD = Bound(20.0, 25.0)
"""For reading a whole run, which may be large."""
ORDINARY = Bound(10.0, 20.0)
DIRECT = Bound(2.0, 2.0)
"""For what a process that is somebody else's waits for: an answer where its task ends, which can go as a message."""


class Limit:
    """When the caller stops waiting for an answer; `math.inf`: never."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until


_limit: ContextVar[Limit | None] = ContextVar("celery_durable_database_limit", default=None)


@contextlib.contextmanager
def answer_within(seconds: float | None) -> Iterator[Limit]:
    """Have all operations inside the block end together, whatever their own bounds say; None: without any bound."""
    limit = Limit(math.inf if seconds is None else steady() + seconds)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def own_bounds() -> Iterator[None]:
    """Let operations inside the block have their own bounds again: a pass that runs eagerly in a request."""
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
        """The deadline of the next try, on the steady clock."""
        return min(self._until, steady() + self._once)


class Line:
    """The socket of one connection, and the deadline of what is under way on it.

    A copy of the file descriptor: the driver may close its own at any time, and its number is then somebody else's.
    No lock is taken for a statement. A deadline is an element of a list that either the thread that began it takes
    out, or the watchdog, which cuts only what it took; so nothing is cut that has ended.
    """

    __slots__ = ("_begun", "_lock", "_socket", "is_brief")

    def __init__(self, fd: int, *, is_brief: bool = False) -> None:
        self.is_brief = is_brief
        """Closed with its cut: of a connection that is being made, and that nobody has yet."""
        # The family is not asked for: shutdown() needs none.
        was_blocking = os.get_blocking(fd)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(fd))
        # Where sockets have a default timeout, as in every beat (celery/apps/beat.py), Python has just made the
        # connection itself non-blocking, and PyMySQL would read None.
        os.set_blocking(fd, was_blocking)
        self._begun: list[float] = []
        self._lock = threading.Lock()
        _watchdog.add(self)

    def begin(self, deadline: float) -> None:
        """From now on until `end`: cut the connection at ``deadline``."""
        self._begun.append(deadline)

    def end(self) -> bool:
        """What was begun has ended; False if it was cut."""
        try:
            self._begun.pop()
        except IndexError:
            with self._lock:  # the cut is made now, not later
                return False
        return True

    def cut_if_late(self, now: float) -> bool:
        """For the watchdog."""
        if not self._begun or self._begun[0] > now:
            return False
        with self._lock:
            try:
                self._begun.pop()
            except IndexError:  # it has ended this moment
                return False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return True

    def forget(self) -> None:
        """In a fork, where the lock may be another thread's for ever."""
        self._socket.close()

    def close(self) -> None:
        """Watch it no more. The connection stays open."""
        _watchdog.remove(self)
        with self._lock:
            self._socket.close()


_no_socket: set[str] = set()


def line_of(driver_connection: Any, *, is_brief: bool = False) -> Line | None:
    """The socket of a driver's connection; None where the driver shows none, which is logged once."""
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
    """The lines of this process, and the thread that looks at them."""

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
        """Call this every few seconds, with the steady clock's time; it must wait for nobody."""
        self._tidies.append(tidy)

    def _loop(self) -> None:
        looks, tidied_at, expected = threading.Event(), steady(), math.inf
        while True:
            looks.wait(_LOOK_SECONDS)
            now = steady()
            if now > expected + 1:  # this process was stopped, not the database: let it read what has come
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
        """The parent's thread and locks are not ours. Closing our copies of its sockets leaves its connections open."""
        lines = self._lines
        self._begin()
        for line in lines:
            line.forget()


_watchdog = _Watchdog()
tidy_with = _watchdog.tidy_with
os.register_at_fork(after_in_child=_watchdog.after_fork)
