"""Batches of messages for a transport: one batch per destination, so that a failure concerns one destination only."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from celery_durable.tasks.publishing.recorder import RecordedMessage
from celery_durable.tasks.publishing.report import SendState

logger = logging.getLogger("celery_durable.tasks")


@dataclass(slots=True, eq=False)
class BatchItem:
    """One message, and its position in the caller's list of states. Without ``errors``, it is always tried again."""

    states: list[SendState]
    index: int
    id: str
    recorded: RecordedMessage
    errors: dict[int, Exception] | None = None

    @property
    def state(self) -> SendState:
        return self.states[self.index]

    @state.setter
    def state(self, state: SendState) -> None:
        self.states[self.index] = state


@dataclass(slots=True, eq=False)
class DestinationBatch:
    """The messages to one exchange with one routing key. ``queue`` names an outage; Celery's own events have none."""

    exchange: str
    routing_key: str
    queue: str | None
    items: list[BatchItem] = field(default_factory=list)
    declare: list[Any] = field(default_factory=list)
    error: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.exchange, self.routing_key

    def add(self, item: BatchItem) -> None:
        self.items.append(item)
        self.add_declarations(item.recorded.declare)

    def add_declarations(self, entities: Iterable[Any]) -> None:
        for entity in entities:
            if not any(entity is each or entity == each for each in self.declare):
                self.declare.append(entity)

    def merge(self, other: DestinationBatch) -> None:
        self.items += other.items
        self.add_declarations(other.declare)
        self.queue = self.queue or other.queue

    def open_items(self) -> list[BatchItem]:
        return [item for item in self.items if item.state is not SendState.SENT]

    def refuse(self, error: object) -> None:
        """Mark all messages as refused that are not known to be sent."""
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        for item in self.open_items():
            item.state = SendState.REFUSED

    def refuse_item(self, item: BatchItem, exc: Exception) -> None:
        """Mark a message that cannot be encoded; this is no failure of the queue or the broker."""
        if item.errors is not None:
            item.state, item.errors[item.index] = SendState.UNSENDABLE, exc
            return
        item.state = SendState.REFUSED
        logger.error("Message %s to %r cannot be sent; a dispatcher will retry: %r", item.id, self.routing_key, exc)


def merge_batches(batches: Iterable[DestinationBatch]) -> list[DestinationBatch]:
    """Merge the batches of several callers into one batch per destination."""
    found: dict[tuple[str, str], DestinationBatch] = {}
    for batch in batches:
        if batch.key in found:
            found[batch.key].merge(batch)
        else:
            found[batch.key] = batch
    return list(found.values())
