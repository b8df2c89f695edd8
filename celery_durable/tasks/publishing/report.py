"""What became of messages that were to leave this process, and which brokers and queues do not take any.

Nothing counts as sent that the broker has not taken for certain (LAW 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class SendState(StrEnum):
    """What became of one message."""

    SENT = "sent"
    """The broker has taken it."""
    REFUSED = "refused"
    """The broker, or this application's own routes, did not take it; other queues are not concerned."""
    UNKNOWN = "unknown"
    """It was written, and nothing was heard since: it may arrive."""
    UNSENT = "unsent"
    """It was not written: the broker is away."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A broker, or one of its queues, that does not take messages.

    ``where``: the broker's URL with the password masked, or the queue's name. ``since``: the first failure, in UTC, by
    this machine's clock. ``error``: the last error in the broker's own words, with its class.
    """

    where: str
    since: datetime
    error: str
    failures: int


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of each message, in the order in which they were given."""

    states: Sequence[SendState]

    @classmethod
    def of(cls, count: int, state: SendState) -> PublishReport:
        """The same for all."""
        return cls([state] * count)

    def with_state(self, given: Sequence[T], *states: SendState) -> list[T]:
        """Those of what was given that came to one of these states."""
        return [each for each, state in zip(given, self.states, strict=True) if state in states]
