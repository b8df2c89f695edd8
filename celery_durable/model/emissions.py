"""Emissions to topics: which waits get the payload, with which events, and which runs it makes due."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from celery_durable.model.rows import DueRun, RunRef
from celery_durable.model.scopes import Scope
from celery_durable.model.states import Status, StepStatus, parse_topic_event_type
from celery_durable.model.times import to_us

# If a run has several waits on the topic, each wait gets an event. The ids of the second and later events are the
# emission id, this character, and a number. An emission id cannot contain this character.
_COPY_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class Emission:
    """An emission under way, for the waits that were open at ``created_at``, of instances up to ``end_pk``.

    The instances up to ``cursor_pk`` have it: ``delivered_count`` waits so far.
    """

    id: str
    topic: str
    payload: str
    scope: Scope | None
    cursor_pk: int
    end_pk: int
    delivered_count: int
    created_at: datetime

    def event_id(self, number: int) -> str:
        """Return the id of the event with this number, from 1, among those that one run gets."""
        return self.id if number == 1 else f"{self.id}{_COPY_SEPARATOR}{number}"


@dataclass(frozen=True, slots=True)
class EmissionProgress:
    """The progress of an emission after a batch. ``received``: runs that got an event, with topic and event id."""

    delivered_count: int
    cursor_pk: int
    is_over: bool
    due_runs: tuple[DueRun, ...] = ()
    received: tuple[tuple[RunRef, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Receiver:
    """A locked instance whose current run may have waits on the topic."""

    pk: int
    due_run: DueRun
    status: Status
    is_claimed: bool
    version: int

    @property
    def needs_wake(self) -> bool:
        """Whether an event must wake it. A worker checks for events itself when it releases, and so does a resume."""
        return not self.is_claimed and self.status is Status.WAITING


@dataclass(frozen=True, slots=True)
class TopicWait:
    """A wait that was open when the emission started, and its step as it is ``now``."""

    pk: int
    run_number: int
    step_key: str
    status: StepStatus | None
    event_type: str | None
    ends_at: datetime | None
    has_emission: bool
    """Whether its run has received this emission before, under the same id."""
    now: datetime

    @property
    def key(self) -> tuple[int, int, str]:
        """The instance, the run and the step."""
        return self.pk, self.run_number, self.step_key

    def is_open(self, receiver: Receiver, topic: str) -> bool:
        """Whether the step still waits on the topic."""
        return (
            self.run_number == receiver.due_run.ref.run_number
            and not receiver.status.is_terminal
            and self.status is StepStatus.WAITING
            and parse_topic_event_type(self.event_type) == topic
            and self.ends_at is not None
            and self.ends_at >= self.now
        )


@dataclass(frozen=True, slots=True)
class TopicEvent:
    """The event that one wait gets. ``seq`` is the instance's version, which the lock keeps from changing."""

    wait: TopicWait
    id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch of an emission: the events, the waits that are closed, and how many events each instance gets."""

    events: Sequence[TopicEvent]
    closed_waits: Sequence[tuple[int, int, str]]
    event_counts: Mapping[int, int]


def plan_delivery(emission: Emission, receivers: Mapping[int, Receiver], waits: Iterable[TopicWait]) -> Delivery:
    """Give each open wait its own event, once. Waits that have ended are closed."""
    events: list[TopicEvent] = []
    closed_waits: list[tuple[int, int, str]] = []
    event_counts: dict[int, int] = {}
    for wait in waits:
        receiver = receivers.get(wait.pk)
        if receiver is None or not wait.is_open(receiver, emission.topic):
            closed_waits.append(wait.key)
        elif not wait.has_emission:
            closed_waits.append(wait.key)
            number = event_counts[wait.pk] = event_counts.get(wait.pk, 0) + 1
            events.append(TopicEvent(wait, emission.event_id(number), receiver.version + number))
    return Delivery(events, closed_waits, event_counts)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event of a run, consumed or not; ``payload`` is JSON text. ``by``: the person whose answer it is."""

    seq: int
    type: str
    payload: str
    created_at: datetime
    by: str | None = None

    @property
    def result_json(self) -> str:
        """The JSON text that the consuming wait records as its result. The payload is copied unchanged."""
        type_ = parse_topic_event_type(self.type) or self.type
        by = "" if self.by is None else f'"by":{json.dumps(self.by, ensure_ascii=False)},'
        return f'{{"type":"{type_}","at":{to_us(self.created_at)},{by}"payload":{self.payload}}}'
