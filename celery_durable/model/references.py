"""References: they say which step or map item a Celery task works for.

A task's message carries its reference in the header `durable` and in the arguments of its callbacks, and the answer
returns it. Any client of the broker can forge an answer, so `read` refuses malformed references, and the engine
compares the token with the one in the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from celery_durable.model.rows import RunRef
from celery_durable.model.states import OPEN_ITEMS, ItemStatus

REFERENCE_HEADER = "durable"
"""The header of a Celery message that holds the `TaskReference` of its task in JSON form."""


@dataclass(frozen=True, slots=True)
class TaskReference:
    """Identifies one attempt of a task and one delivery of that attempt.

    ``database_id``: of the database that waits for the answer. ``event_type``: names the step or the item, and the
    attempt. ``token``: random for each attempt. ``queue``: for an answer that is sent as a message. ``delivery``: 0 at
    first, plus 1 each time the same attempt is sent again because its task was lost.
    """

    database_id: str
    ref: RunRef
    event_type: str
    token: str = field(repr=False)
    queue: str | None = None
    delivery: int = 0

    @property
    def attempt(self) -> tuple[RunRef, str]:
        """What the deliveries of one attempt have in common."""
        return (self.ref, self.event_type)

    def with_queue(self, queue: str) -> TaskReference:
        """Return a copy with the queue for answers."""
        return replace(self, queue=queue)

    def to_json(self) -> list[Any]:
        """Return the form that the message carries."""
        ref = self.ref
        fields = (ref.workflow, ref.instance_id, ref.run_number, self.event_type)
        return [self.database_id, *fields, self.token, self.queue, self.delivery]

    @classmethod
    def read(cls, value: object) -> TaskReference | None:
        """Parse the form that `to_json` returns; None for anything else, because messages are not trusted.

        Further elements are ignored: a later version may append fields. Overlong values are refused, as they are
        logged.
        """
        match value:
            case [
                str(database_id), str(workflow), str(instance_id), int(run_number), str(event_type), str(token),
                (str() | None) as queue, int(delivery), *_,
            ] if (
                max(map(len, (database_id, workflow, instance_id, token, queue or ""))) <= _MAX_NAME_LENGTH
                and len(event_type) <= _MAX_TYPE_LENGTH
                and max(abs(run_number), abs(delivery)) <= _MAX_INTEGER
            ):  # fmt: skip
                return cls(database_id, RunRef(workflow, instance_id, run_number), event_type, token, queue, delivery)
            case _:
                return None


_MAX_NAME_LENGTH = 255
_MAX_TYPE_LENGTH = 600
"""Larger than for names, because the event type of an item contains the step's key, which can exceed a name."""
_MAX_INTEGER = 2**31 - 1


# The items of a map step: how many are open, which have failed, and what becomes of those.


@dataclass(frozen=True, slots=True)
class MapState:
    """The items of a map at one time. ``late`` counts the sent items that have timed out.

    ``ready`` counts the pending items that may be sent now. ``next_at``: when the map needs a pass without an answer.
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
