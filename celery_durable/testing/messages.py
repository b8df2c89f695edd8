"""The dispatch messages that a harness captures in place of a broker."""

from __future__ import annotations

import random

from celery_durable.model import DueRun


class Messages(list[DueRun]):
    """The messages that have not been delivered yet, oldest first. A test may read, reorder and delete them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def drop(self) -> int:
        """Lose all messages, as a broker that was emptied. Returns how many. A later sweep finds the work again."""
        lost = len(self)
        self.clear()
        return lost

    def duplicate(self, times: int = 2) -> None:
        """Repeat each message, so that it is delivered ``times`` times."""
        self[:] = [message for message in self for _ in range(times)]

    def shuffle(self) -> None:
        """Reorder the messages at random, from the seed."""
        self._rng.shuffle(self)
