"""Reports: the state of each message after a publish, and outages. A sent message was certainly taken (LAW 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class SendState(StrEnum):
    SENT = "sent"
    REFUSED = "refused"
    """The broker did not take it; other queues are not affected."""
    UNSENDABLE = "unsendable"
    """The application's own code raised when the message was made, so sending it again is no use."""
    UNKNOWN = "unknown"
    """It was written, but the broker has not answered: it may arrive."""
    UNSENT = "unsent"
    """It was not sent: the broker is down."""


@dataclass(frozen=True, slots=True)
class BrokerOutage:
    """A broker (``where``: its URL without a password), or one of its queues, that takes no messages."""

    where: str
    since: datetime
    error: str
    failures: int


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The state of each message, in the order of the arguments. ``errors``: those of unsendable messages, by index."""

    states: Sequence[SendState]
    errors: Mapping[int, Exception] = field(default_factory=dict)

    @classmethod
    def of(cls, count: int, state: SendState) -> PublishReport:
        return cls([state] * count)

    def with_state(self, given: Sequence[T], *states: SendState) -> list[T]:
        """The elements of ``given`` whose messages have one of these states."""
        return [each for each, state in zip(given, self.states, strict=True) if state in states]
