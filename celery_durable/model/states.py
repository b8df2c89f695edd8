"""The words in the database: what an instance, a step, a wake-up and a log line can be."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """What an instance is doing."""

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
        return _LINEAR.get(self, "RUNNING")


_LINEAR = {Status.COMPLETE: "COMPLETED", Status.ERRORED: "FAILED", Status.TERMINATED: "CANCELED"}
TERMINAL = frozenset({Status.COMPLETE, Status.ERRORED, Status.TERMINATED})


class Kind(StrEnum):
    """How an instance is advanced."""

    REPLAY = "replay"  # by calling its function again
    LINEAR = "linear"  # along the rows that were inserted when it began


class StepType(StrEnum):
    """The verbs that record a step."""

    DO = "do"
    SLEEP = "sleep"
    WAIT = "waitForEvent"
    LINEAR = "linear"  # of a linear workflow


class StepStatus(StrEnum):
    """How far a step has come."""

    PENDING = "pending"  # a branch's attempt has begun
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


ENDED_STEPS = frozenset({
    StepStatus.COMPLETED, StepStatus.ERRORED, StepStatus.CANCELLED, StepStatus.DONE, StepStatus.DEAD,
})  # fmt: skip
OPEN_STEPS = frozenset(StepStatus) - ENDED_STEPS - {StepStatus.LINEAR_PENDING}
"""Under way: begun, and not ended."""
WAITING_STEPS = frozenset({StepStatus.WAITING, StepStatus.READY, StepStatus.LINEAR_WAITING})
LEASE_EXPIRED = "LEASE_EXPIRED"
"""The error of a linear step's attempt whose worker died."""


class Wake(StrEnum):
    """Why an instance was made due. For people only: what decides is time and rows (LAW 5)."""

    RUN = "run"
    RESUME = "resume"
    RETRY = "retry"
    WAKE = "wake"


class LogLevel(StrEnum):
    """How loud a log line is."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warn"  # as people type it
    ERROR = "error"


_TOPIC = "topic:"
"""No event type that people may send begins so: it has no colon."""
TOPIC_TYPES = f"{_TOPIC}%"
"""All event types of waits on topics, for SQL's LIKE."""


def topic_type(topic: str, seq: int) -> str:
    """The event type of one wait on a topic, the step with this place in its run: nobody else consumes such events."""
    return f"{_TOPIC}{seq}:{topic}"


def topic_of(event_type: str | None) -> str | None:
    """The topic in an event type that `topic_type` made; None for those that people send."""
    if event_type is None or not event_type.startswith(_TOPIC):
        return None
    return event_type.split(":", 2)[2]
