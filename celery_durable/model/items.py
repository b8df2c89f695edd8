"""The items of a map step: how many are open, which have failed, and what becomes of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from celery_durable.model.states import OPEN_ITEMS, ItemStatus


@dataclass(frozen=True, slots=True)
class MapState:
    """The items of a map at one time.

    ``late`` counts the sent items that have timed out, and ``ready`` the pending items that may be sent now.
    ``next_at`` is when the map needs a pass even without an answer; None means never.
    """

    counts: Mapping[ItemStatus, int]
    late: int
    ready: int
    next_at: datetime | None

    @property
    def is_finished(self) -> bool:
        """Whether every item has completed or failed permanently."""
        return not any(status in OPEN_ITEMS for status in self.counts)

    def room(self, max_concurrency: int | None) -> int | None:
        """Return how many more items may be sent. None means no limit."""
        return None if max_concurrency is None else max(max_concurrency - self.counts.get(ItemStatus.SENT, 0), 0)

    def needs_pass(self, max_concurrency: int | None) -> bool:
        """Return whether a pass must act now, without waiting for an answer."""
        must_decide = self.late > 0 or ItemStatus.FAILED in self.counts
        may_send = self.ready > 0 and self.room(max_concurrency) != 0
        return must_decide or may_send or self.is_finished


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item whose attempt has failed. ``answer`` is None if the attempt has timed out."""

    position: int
    attempts: int
    answer: str | None

    @property
    def is_late(self) -> bool:
        """Whether the attempt has timed out."""
        return self.answer is None

    @property
    def status(self) -> ItemStatus:
        """The item's status when it was read. An attempt that has timed out still counts as sent."""
        return ItemStatus.SENT if self.is_late else ItemStatus.FAILED


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The decision on a failed item: retry it at ``next_retry_at``, or give it up if that is None."""

    item: FailedItem
    answer: str
    next_retry_at: datetime | None

    @property
    def status(self) -> ItemStatus:
        """The item's status from now on."""
        return ItemStatus.DEAD if self.next_retry_at is None else ItemStatus.PENDING


def decide_answered(*, is_error: bool, is_retryable: bool, attempt: int, max_attempts: int | None) -> ItemStatus:
    """Return the status of an item whose attempt was answered. A pass retries a failed item, a dead one is final."""
    if not is_error:
        return ItemStatus.DONE
    is_last = max_attempts is not None and attempt >= max_attempts
    return ItemStatus.DEAD if is_last or not is_retryable else ItemStatus.FAILED


def are_items_of(bodies: Sequence[str], stored: Mapping[int, str]) -> bool:
    """Whether the items that a retried run finds, by position, are items of its list. Then their results are kept."""
    return all(position < len(bodies) and bodies[position] == body for position, body in stored.items())
