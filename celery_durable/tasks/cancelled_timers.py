"""Removes the cancelled entries from the timer of a worker's main loop, which would keep them until their time.

A prefork worker enters a timer for each task that has a time limit, and cancels it when the task ends. kombu's timer
only marks the entry, and drops it at its time. Internal tasks have a limit of a day, so that the limits of the
application end no pass: a worker with 100 messages a second would keep millions of entries. Measured: 400 bytes each.
"""

from __future__ import annotations

from typing import Any

_FEW = 1_000
"""So many entries are left alone."""


class CancelledTimers:
    """The cancelled entries of one timer. Only the main loop, which uses the timer, may call it."""

    def __init__(self, timer: Any) -> None:
        self._timer, self._limit = timer, _FEW

    def remove_if_many(self) -> None:
        """Remove them if the timer has doubled since the last time, so that each entry is looked at twice or less."""
        timer = self._timer
        if len(timer) <= self._limit:
            return
        entries = [each for each in timer.queue if not each.entry.canceled]  # a sorted copy
        timer.clear()
        for eta, priority, entry in entries:
            timer.enter_at(entry, eta, priority)
        self._limit = 2 * len(entries) + _FEW
