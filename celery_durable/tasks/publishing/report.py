"""Reports: the state of each message after a publish, and the outages of brokers and queues.

A message counts as sent only if the broker has certainly taken it (LAW 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class SendState(StrEnum):
    """The state of one message after a publish."""

    SENT = "sent"
    """The broker has taken it."""
    REFUSED = "refused"
    """The broker or the application's own routes did not take it; other queues are not affected."""
    UNKNOWN = "unknown"
    """It was written, but the broker has not answered: it may arrive."""
    UNSENT = "unsent"
    """It was not sent: the broker is down."""


@dataclass(frozen=True, slots=True)
class BrokerOutage:
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
    """The state of each message, in the order of the arguments."""

    states: Sequence[SendState]

    @classmethod
    def of(cls, count: int, state: SendState) -> PublishReport:
        """A report with the same state for ``count`` messages."""
        return cls([state] * count)

    def with_state(self, given: Sequence[T], *states: SendState) -> list[T]:
        """The elements of ``given`` whose messages have one of these states."""
        return [each for each, state in zip(given, self.states, strict=True) if state in states]
