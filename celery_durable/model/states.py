"""The words in the database: what an instance, a step, a wake-up and a log line can be."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The status of an instance."""

    ACTIVE = "active"  # eligible to run, or running
    WAITING = "waiting"  # hibernating: a sleep, a retry's delay, an event
    PAUSED = "paused"
    COMPLETE = "complete"
    ERRORED = "errored"
    TERMINATED = "terminated"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing but a restart can move the instance."""
        return self in TERMINAL

    @property
    def linear(self) -> str:
        """The same in the words of linear workflows: RUNNING, COMPLETED, FAILED or CANCELED."""
        return _LINEAR_NAMES.get(self, "RUNNING")


_LINEAR_NAMES = {Status.COMPLETE: "COMPLETED", Status.ERRORED: "FAILED", Status.TERMINATED: "CANCELED"}
TERMINAL = frozenset({Status.COMPLETE, Status.ERRORED, Status.TERMINATED})


class WorkflowKind(StrEnum):
    """How an instance is advanced."""

    REPLAY = "replay"  # by calling its function again
    LINEAR = "linear"  # along the rows that were inserted when it began


class StepType(StrEnum):
    """The kinds of step."""

    DO = "do"
    SLEEP = "sleep"
    WAIT = "waitForEvent"
    TASK = "task"  # a Celery task does it
    CHILD = "child"  # another instance does it
    MAP = "map"  # Celery tasks do it, one for each item
    LINEAR = "linear"  # of a linear workflow


class StepStatus(StrEnum):
    """The progress of a step."""

    PENDING = "pending"  # a branch's attempt has started
    WAITING = "waiting"  # for its time, its event or its next attempt
    COMPLETED = "completed"
    ERRORED = "errored"
    CANCELLED = "cancelled"  # lost a race of first()

    # Of linear workflows.
    LINEAR_PENDING = "PENDING"  # planned, and not yet its turn
    READY = "READY"
    RUNNING = "RUNNING"
    LINEAR_WAITING = "WAITING"  # for an event
    DONE = "DONE"
    DEAD = "DEAD"


FINISHED_STEPS = frozenset({
    StepStatus.COMPLETED, StepStatus.ERRORED, StepStatus.CANCELLED, StepStatus.DONE, StepStatus.DEAD,
})  # fmt: skip
OPEN_STEPS = frozenset(StepStatus) - FINISHED_STEPS - {StepStatus.LINEAR_PENDING}
"""Started, and not ended."""
WAITING_STEPS = frozenset({StepStatus.WAITING, StepStatus.READY, StepStatus.LINEAR_WAITING})
LEASE_EXPIRED = "LEASE_EXPIRED"
"""The error of a linear step's attempt whose worker died."""


class ItemStatus(StrEnum):
    """How far an item of a map has come."""

    PENDING = "pending"  # to be sent, perhaps not before a time
    SENT = "sent"
    FAILED = "failed"  # a pass decides whether to retry it
    DONE = "done"
    DEAD = "dead"  # failed permanently


OPEN_ITEMS = (ItemStatus.PENDING, ItemStatus.SENT, ItemStatus.FAILED)


class AnswerResult(StrEnum):
    """What became of what a Celery task answered."""

    TAKEN = "taken"
    NOT_AWAITED = "not awaited"  # nothing waits for it any more, or has an answer already
    FORGED = "forged"  # its token is not the attempt's

    @property
    def is_taken(self) -> bool:
        """Whether a step waits for it no more, because of this answer."""
        return self is AnswerResult.TAKEN


class WakeReason(StrEnum):
    """Why an instance was made due. For people only: what decides is time and rows (LAW 5)."""

    START = "start"
    TIMER = "timer"
    EVENT = "event"  # or an answer
    RESUME = "resume"  # or the run has more to do at once
    RETRY = "retry"  # its claim was lost
    WAKE = "wake"  # an operator's `wake`


class LogLevel(StrEnum):
    """How loud a log line is."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warn"  # as people type it
    ERROR = "error"


_TOPIC, _TASK, _CHILD = "topic:", "task:", "child:"
_ITEM_PATTERN = re.compile(r"item:(\d{1,18}):(\d{1,9}):(\d{1,9}):([^\x00-\x1e]+)")
_TASK_PATTERN = re.compile(r"task:\d{1,18}:\d{1,9}:\d{1,9}:[^\x00-\x1f]+")
_MAX_TYPE_LENGTH = 255
PRIVATE_TYPE_PATTERN = "%:%"
"""All event types that one wait alone is for, for SQL's LIKE: those that people may send have no colon."""
_ID_NAMESPACE = uuid.UUID("3c9b1f5e-7f0b-5d55-9f1c-0f8a4a1f6d27")


def topic_event_type(topic: str, seq: int) -> str:
    """The event type of one wait on a topic, the step with this place in its run: nobody else consumes such events."""
    return f"{_TOPIC}{seq}:{topic}"


def parse_topic_event_type(event_type: str | None) -> str | None:
    """The topic in an event type that `topic_event_type` made; None for others."""
    return _parse_subject(event_type, _TOPIC, 2)


def task_event_type(task: str, pk: int, seq: int, attempt: int) -> str:
    """The event type of the answer to one attempt of a task step: what an earlier attempt answers is for nobody.

    Nor is what is answered to an instance that was deleted, and made again under its id: ``pk`` is its key.
    """
    return f"{_TASK}{pk}:{seq}:{attempt}:{task}"[:_MAX_TYPE_LENGTH]


def parse_task_event_type(event_type: str | None) -> str | None:
    """The name of the task in an event type that `task_event_type` made; None for others."""
    return _parse_subject(event_type, _TASK, 4)


def is_task_event_type(event_type: str) -> bool:
    """Whether `task_event_type` may have made it: what comes from outside may be anything."""
    return _TASK_PATTERN.fullmatch(event_type) is not None


def derive_id(subject: str, pk: int, run_number: int) -> str:
    """Return the id for ``subject`` in this run of the instance ``pk``: a UUID, the same at every call."""
    return str(uuid.uuid5(_ID_NAMESPACE, f"{pk}/{run_number}/{subject}"))


def task_id(event_type: str, pk: int, run_number: int) -> str:
    """The id under which the task is sent that answers with such an event to this run of the instance ``pk``."""
    return derive_id(event_type, pk, run_number)


def child_event_type(workflow: str, instance_id: str, seq: int) -> str:
    """The event type of a child workflow's answer to the step that created it."""
    return f"{_CHILD}{seq}:{workflow}/{instance_id}"[:_MAX_TYPE_LENGTH]


def parse_child_event_type(event_type: str | None) -> tuple[str, str] | None:
    """The workflow and the id in an event type that `child_event_type` made; None for others."""
    found = _parse_subject(event_type, _CHILD, 2)
    return None if found is None else (found.partition("/")[0], found.partition("/")[2])


@dataclass(frozen=True, slots=True)
class ItemRef:
    """One attempt at an item of a map; ``pk``: the key of its instance."""

    pk: int
    step_key: str
    position: int
    attempt: int

    @property
    def type(self) -> str:
        """What its task answers to; no event is of this type."""
        return f"item:{self.pk}:{self.position}:{self.attempt}:{self.step_key}"

    @classmethod
    def read(cls, type_: str) -> ItemRef | None:
        """What a type says; None for anything else, which may come from outside."""
        found = _ITEM_PATTERN.fullmatch(type_)
        return None if found is None else cls(int(found[1]), found[4], int(found[2]), int(found[3]))


def is_answer(event_type: str) -> bool:
    """Whether such an event is what somebody answered who does a step."""
    return event_type.startswith((_TASK, _CHILD))


def get_public_event_type(event_type: str | None) -> str | None:
    """The event type where people may send such events, else None."""
    return None if event_type is None or ":" in event_type else event_type


def _parse_subject(event_type: str | None, prefix: str, place: int) -> str | None:
    if event_type is None or not event_type.startswith(prefix):
        return None
    return event_type.split(":", place)[place]
