"""Deadlines of internal statements: a watchdog cuts the connection of a statement that is late (LAW 7).

psycopg offers no read timeout (see psycopg/psycopg2#561), and PyMySQL's would also apply to an author's bulk update. So
one job per process shuts down the socket of a connection with a late internal statement. The thread that waits for the
answer gets an OperationalError at once. Statements on threads of their own would leave a thread behind at every
timeout.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from typing import Any

from celery_durable import signals
from celery_durable.housekeeping import CallQueue, Job, reset_in_child
from celery_durable.runtime import real_monotonic

logger = logging.getLogger("celery_durable.store")

_CHECK_SECONDS = 0.25


class WatchedSocket:
    """The socket of one connection, and the deadline of the statement that runs on it.

    It holds a copy of the descriptor: the driver may close its own at any time, and the system reuses the number. No
    lock is taken per statement: the deadline is the only element of a list. The watchdog cuts only if it removed the
    element, so it never cuts a statement that has ended.
    """

    __slots__ = ("_deadlines", "_lock", "_socket", "closes_after_cut")

    def __init__(self, fd: int, *, closes_after_cut: bool = False) -> None:
        self.closes_after_cut = closes_after_cut
        """Whether the watchdog closes it after a cut. True while the connection is being made: it has no owner yet."""
        # Any address family will do, because shutdown() does not use it.
        was_blocking = os.get_blocking(fd)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(fd))
        # If sockets have a default timeout, as in every beat (celery/apps/beat.py), Python has just made the
        # connection itself non-blocking, and PyMySQL would read None.
        os.set_blocking(fd, was_blocking)
        self._deadlines: list[float] = []
        self._lock = threading.Lock()
        _watchdog.add(self)

    def arm(self, deadline: float) -> None:
        """Let the watchdog cut the connection at ``deadline``, until `disarm` is called."""
        self._deadlines.append(deadline)

    def disarm(self) -> bool:
        """Remove the deadline when the statement has ended. Returns False if the watchdog cut the connection."""
        try:
            self._deadlines.pop()
        except IndexError:
            with self._lock:  # wait until the cut is done, so that it does not hit a later statement
                return False
        return True

    def cut_if_late(self, now: float) -> bool:
        """Cut the connection if its statement is late; called by the watchdog. Returns whether it was cut."""
        if not self._deadlines or self._deadlines[0] > now:
            return False
        with self._lock:
            try:
                self._deadlines.pop()
            except IndexError:  # the statement ended meanwhile
                return False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return True

    def close_in_child(self) -> None:
        """Close the copy in a forked child; no lock: a thread of the parent may have held it at the fork."""
        self._socket.close()

    def close(self) -> None:
        """Close the copy of the descriptor and stop watching. The connection itself stays open."""
        _watchdog.remove(self)
        with self._lock:
            self._socket.close()


_modules_without_socket: set[str] = set()


def watch_socket_of(driver_connection: Any, *, closes_after_cut: bool = False) -> WatchedSocket | None:
    """Watch the socket of a driver's connection. Returns None, and logs it once, if the driver exposes no socket."""
    try:
        if hasattr(driver_connection, "fileno"):  # psycopg, psycopg2, mysqlclient
            return WatchedSocket(driver_connection.fileno(), closes_after_cut=closes_after_cut)
        return WatchedSocket(driver_connection._sock.fileno(), closes_after_cut=closes_after_cut)  # noqa: SLF001  # PyMySQL
    except Exception as exc:  # noqa: BLE001  # drivers differ in the error for a closed connection
        name = type(driver_connection).__module__
        if name not in _modules_without_socket:
            _modules_without_socket.add(name)
            logger.info("A connection of %s shows no socket, so its statements have no deadline: %r", name, exc)
        return None


class _Watchdog:
    """The watched sockets of this process, and the job that checks them."""

    def __init__(self) -> None:
        self._job = Job("durable-watchdog", self._check, is_quick=True)
        self._reports = CallQueue("durable-watchdog-reports", 100)
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._sockets: set[WatchedSocket] = set()
        self._lock, self._next_check_at = threading.Lock(), math.inf

    def add(self, watched_socket: WatchedSocket) -> None:
        with self._lock:
            self._sockets.add(watched_socket)
        self._job.start(after=_CHECK_SECONDS)

    def remove(self, watched_socket: WatchedSocket) -> None:
        with self._lock:
            self._sockets.discard(watched_socket)

    def _check(self) -> float:
        now = real_monotonic()
        was_suspended = now > self._next_check_at + 1  # Then the threads of this process read what has arrived.
        with self._lock:
            sockets = list(self._sockets)
        self._next_check_at = now + _CHECK_SECONDS if sockets else math.inf
        if not was_suspended:
            self._cut_late(sockets, now)
        return _CHECK_SECONDS if sockets else math.inf

    def _cut_late(self, sockets: list[WatchedSocket], now: float) -> None:
        cut = [watched_socket for watched_socket in sockets if watched_socket.cut_if_late(now)]
        for watched_socket in cut:
            if watched_socket.closes_after_cut:
                watched_socket.close()
        if cut:
            self._reports.add(lambda: _report_cut(len(cut), len(sockets)), what="The report of cut connections")

    def reset_in_child(self) -> None:
        """Close the copies of the parent's sockets. The parent's connections stay open."""
        sockets = self._sockets
        self._reset()
        for watched_socket in sockets:
            watched_socket.close_in_child()


def _report_cut(cut: int, total: int) -> None:
    """Log a cut and send its signal, not in the watchdog's job: a handler of the log may hang."""
    logger.warning("The database has not answered in time: %d of %d connections that wait for it are cut", cut, total)
    signals.send_from_monitor(signals.connections_cut, sender=None, count=cut)


_watchdog = _Watchdog()
