"""The lock of the sessions of concurrent bodies, for databases with one writer."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SessionLock:
    """Serializes the sessions of concurrent bodies on SQLite, where one session at a time holds the write lock.

    A body on its own thread holds this lock while its session is open. The outcome of a body that ends meanwhile is
    recorded later, so that the pass's thread does not block. A body on that thread skips `acquire`: no other body runs
    then, or the thread holds the lock already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pass_thread = threading.get_ident()
        self._holder: object = None
        self._deferred: list[Callable[[], None]] = []

    def acquire(self, attempt: object) -> None:
        if threading.get_ident() != self._pass_thread:
            self._lock.acquire()
            self._holder = attempt

    def release(self, attempt: object) -> None:
        """Release the lock after the session of ``attempt`` is closed. Does nothing if ``attempt`` does not hold it."""
        if self._holder is attempt:
            self._holder = None
            self._lock.release()

    def run_or_defer(self, attempt: object, record: Callable[[], None]) -> None:
        """Call ``record``, which commits the outcome of a body, now or after the open session is closed."""
        # Blocking here would deadlock: only this thread closes the open session, by recording the body that holds it.
        if self._holder is not attempt and not self._lock.acquire(blocking=False):
            self._deferred.append(record)
            return
        self._holder = None  # the pass holds the lock now: no other session opens while it commits
        self._deferred.insert(0, record)
        self._run_all_deferred()

    def run_deferred(self) -> None:
        """Record the outcomes that are still deferred. An abandoned body may have held the lock until now."""
        if self._deferred:
            self._lock.acquire()
            self._run_all_deferred()

    def _run_all_deferred(self) -> None:
        try:
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self._deferred.clear()  # after an error, or after a race was won, nothing else is recorded
            self._lock.release()
