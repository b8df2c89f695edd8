"""Bodies of branches that meet, or fail."""

from __future__ import annotations

import threading

SECONDS = 10


class Meeting:
    """Bodies that go on only when all of them are there: they ran at the same time."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)

    def __call__(self, value):
        self._barrier.wait(SECONDS)
        return value


def fail(error: Exception):
    raise error
