"""Counts and latencies of jobs, in bounded memory whatever the length of a run."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

WINDOW_SECONDS = 30
_BUCKET = math.log(1.01)
"""A bucket of a histogram is one percent wide, so that a percentile is wrong by half a percent at most."""


class LatencyMeter:
    """A histogram of the latencies of the last 30 s, one for each second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, Counter[int]]] = deque(maxlen=WINDOW_SECONDS + 1)

    def note(self, milliseconds: float) -> None:
        second, bucket = int(time.monotonic()), round(math.log(max(milliseconds, 0.01)) / _BUCKET)
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != second:
                self._seconds.append((second, Counter()))
            self._seconds[-1][1][bucket] += 1

    def percentiles(self, shares: Sequence[float]) -> list[float]:
        """In milliseconds; 0 if nothing was noted in the window, as the other adapters report it."""
        since = time.monotonic() - WINDOW_SECONDS
        with self._lock:
            total = sum((counts for second, counts in self._seconds if second >= since), Counter[int]())
        return [find_percentile(total, share) for share in shares]


def find_percentile(histogram: Counter[int], share: float) -> float:
    wanted = math.ceil(share * histogram.total())
    for bucket in sorted(histogram):
        wanted -= histogram[bucket]
        if wanted <= 0:
            return math.exp(bucket * _BUCKET)
    return 0.0


class RateMeter:
    """How many per second since it was read last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._total, self._since = 0, 0, time.monotonic()

    @property
    def total(self) -> int:
        return self._total

    def add(self, count: int = 1) -> None:
        with self._lock:
            self._count += count
            self._total += count

    def read(self) -> tuple[float, float]:
        """The rate, and the seconds that it is the average of."""
        with self._lock:
            now = time.monotonic()
            count, seconds = self._count, max(now - self._since, 0.001)
            self._count, self._since = 0, now
        return count / seconds, seconds
