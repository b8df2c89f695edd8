"""How long operations may wait for the database (LAW 7). The watchdog cuts the connection of a late statement."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from celery_durable.errors import StoreUnavailable
from celery_durable.runtime import real_monotonic


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the database may take: in one try, and in all tries, which may go on while the server is away."""

    try_seconds: float
    total_seconds: float
    waits_for_server: bool = False


# `try_seconds` exceeds the server's lock timeout of 5 s, so that a lock wait ends with the server's own error. `DIRECT`
# is the exception.
LOOP = Timeouts(6.0, 10.0)
"""For loops that run again anyway: sweeps, renewals, heartbeats."""
PASS = Timeouts(10.0, 25.0, waits_for_server=True)
"""For claims and step commits: less than a lease. To give up while the server restarts would count as a crash."""
LOAD = Timeouts(20.0, 25.0, waits_for_server=True)
"""For reading a whole run, which may be large."""
USER_WRITES = Timeouts(math.inf, math.inf, waits_for_server=True)
"""For step commits that also run an author's statements."""
ORDINARY = Timeouts(10.0, 20.0)
DIRECT = Timeouts(2.0, 2.0)
"""For the answer of a task, committed by its process. If that fails, the answer is a message."""


class CallerDeadline:
    """The time, as of `real_monotonic`, at which the caller stops waiting. `math.inf` means never."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until


_limit: ContextVar[CallerDeadline | None] = ContextVar("celery_durable_database_limit", default=None)


@contextlib.contextmanager
def limit_database_time(seconds: float | None) -> Iterator[CallerDeadline]:
    """Give all operations inside the block one common deadline instead of their own timeouts. None means no limit."""
    limit = CallerDeadline(math.inf if seconds is None else real_monotonic() + seconds)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def restore_own_timeouts() -> Iterator[None]:
    """Give operations inside the block their own timeouts again, for a task that runs eagerly in a request."""
    token = _limit.set(None)
    try:
        yield
    finally:
        _limit.reset(token)


class TimeBudget:
    """The remaining time of one operation, over all its tries, and whether one of them may have been applied."""

    __slots__ = ("_try_seconds", "_until", "is_in_doubt", "waits_for_server")

    def __init__(self, timeouts: Timeouts | None) -> None:
        self.is_in_doubt = False
        self.waits_for_server = timeouts is not None and timeouts.waits_for_server
        limit = _limit.get()
        if limit is not None:
            self._try_seconds, self._until = math.inf, limit.until
        elif timeouts is None:
            self._try_seconds = self._until = math.inf
        else:
            self._try_seconds, self._until = timeouts.try_seconds, real_monotonic() + timeouts.total_seconds

    @property
    def is_spent(self) -> bool:
        return self._until <= real_monotonic()

    def next_deadline(self) -> float:
        """Return the deadline of the next try by `real_monotonic`. Raises StoreUnavailable if no time is left."""
        now = real_monotonic()
        if self._until <= now:
            raise StoreUnavailable(is_in_doubt=self.is_in_doubt)
        next_try = now + self._try_seconds
        return min(self._until, next_try)
