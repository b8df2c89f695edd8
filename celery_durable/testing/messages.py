"""The captured messages: what a broker would carry, until a test has it delivered, lost, doubled or mixed."""

from __future__ import annotations

import random

from celery_durable.model import DueRun


class Messages(list[DueRun]):
    """The messages on their way, oldest first. A list: look at it, reorder it, delete from it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def drop(self) -> int:
        """Lose all of them, as a broker that is emptied; answers with how many. The sweep finds the work again."""
        lost = len(self)
        self.clear()
        return lost

    def duplicate(self, times: int = 2) -> None:
        """Have each of them delivered so many times."""
        self[:] = [message for message in self for _ in range(times)]

    def shuffle(self) -> None:
        """Mix them, as the seed decides."""
        self._chance.shuffle(self)
