"""The clock of a harness: the time for the store, the leases and every wait. It moves only when the test moves it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from celery_durable import values
from celery_durable.model import duration_us, from_us, to_us
from celery_durable.testing.errors import HarnessMisuse
from celery_durable.values import Duration

START = datetime(2030, 1, 1, tzinfo=UTC)
"""The time at which a harness begins by default."""


class Clock:
    """Virtual time. Moving it runs no workflow; call `run_until_idle` or `advance` of the harness for that."""

    def __init__(self, start: datetime = START) -> None:
        self._now_us = to_us(values.to_utc(start, "start"))
        self._timers: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<Clock {self.now:%Y-%m-%d %H:%M:%S.%f} UTC>"

    @property
    def now(self) -> datetime:
        """The present time, an aware datetime in UTC."""
        return from_us(self._now_us)

    def read(self) -> int:
        """Microseconds since the epoch."""
        return self._now_us

    def advance(self, span: Duration) -> None:
        """Move the clock by "3 days", a timedelta or a number of seconds."""
        self._move(self._now_us + duration_us(values.parse_duration(span)))

    def set_to(self, instant: datetime) -> None:
        """Move the clock to an aware datetime. Raises HarnessMisuse if that time has passed."""
        target = to_us(values.to_utc(instant, "instant"))
        if target < self._now_us:
            raise HarnessMisuse(f"The clock shows {self.now}, and time does not run back to {from_us(target)}.")
        self._move(target)

    def call_after(self, span: timedelta, call: Callable[[], object]) -> None:
        """Call ``call`` when the clock passes now + ``span``, in place of a thread that waits so long."""
        heapq.heappush(self._timers, (self._now_us + duration_us(span), next(self._numbers), call))

    def _move(self, target_us: int) -> None:
        while self._timers and self._timers[0][0] <= target_us:
            due_us, _, call = heapq.heappop(self._timers)
            self._now_us = max(self._now_us, due_us)
            call()
        self._now_us = max(self._now_us, target_us)
