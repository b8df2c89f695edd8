"""The enums and the event types that the database stores as text."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The status of an instance."""

    ACTIVE = "active"  # eligible to run, or running
    WAITING = "waiting"  # suspended until its start, a timer, a retry or an event
    PAUSED = "paused"
    COMPLETE = "complete"
    ERRORED = "errored"
    TERMINATED = "terminated"

    @property
    def is_terminal(self) -> bool:
        """Whether the instance has ended. Only a new run can make it active again."""
        return self in TERMINAL

    @property
    def linear(self) -> str:
        """The status as linear workflows name it: RUNNING, COMPLETED, FAILED or CANCELED."""
        return _LINEAR_NAMES.get(self, "RUNNING")


_LINEAR_NAMES = {Status.COMPLETE: "COMPLETED", Status.ERRORED: "FAILED", Status.TERMINATED: "CANCELED"}
TERMINAL = frozenset({Status.COMPLETE, Status.ERRORED, Status.TERMINATED})
RUNNABLE = (Status.ACTIVE, Status.WAITING)
"""The statuses of instances that a worker claims when they are due."""


class WorkflowKind(StrEnum):
    """How a pass advances an instance."""

    REPLAY = "replay"  # it calls the workflow's function again
    LINEAR = "linear"  # it calls the handlers of the step rows that were inserted when the run was created


class StepType(StrEnum):
    """The kinds of step. Another package may have kinds of its own: a type that is not named here is one of them."""

    DO = "do"
    SLEEP = "sleep"
    WAIT = "waitForEvent"
    TASK = "task"  # a Celery task does the work
    CHILD = "child"  # a child instance does the work
    MAP = "map"  # Celery tasks do the work, one for each item
    LINEAR = "linear"  # a step of a linear workflow

    @classmethod
    def _missing_(cls, value: object) -> StepType | None:
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        cls._value2member_map_[value] = member
        return member


class StepStatus(StrEnum):
    """The progress of a step."""

    PENDING = "pending"  # an attempt was counted before its work started
    WAITING = "waiting"  # for a time, an event, an answer or its next attempt
    COMPLETED = "completed"
    ERRORED = "errored"
    CANCELLED = "cancelled"  # lost a race of first(), or was open when the instance was terminated

    # Statuses of steps of linear workflows.
    LINEAR_PENDING = "PENDING"  # an earlier step is not done
    READY = "READY"
    RUNNING = "RUNNING"
    LINEAR_WAITING = "WAITING"  # for an event
    DONE = "DONE"
    DEAD = "DEAD"

    @property
    def state(self) -> StepState:
        """The status as JSON names it."""
        return _STATES[self]


class StepState(StrEnum):
    """The progress of a step. Only steps of linear workflows are `planned`, `ready`, `running`, `done` or `dead`.

    The stored names of their statuses differ from others only in case, and generated clients cannot distinguish those.
    """

    PENDING = "pending"
    WAITING = "waiting"
    COMPLETED = "completed"
    ERRORED = "errored"
    CANCELLED = "cancelled"
    PLANNED = "planned"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"


_STATES = {each: StepState(each.value.lower()) for each in StepStatus} | {StepStatus.LINEAR_PENDING: StepState.PLANNED}
FINISHED_STEPS = frozenset({
    StepStatus.COMPLETED, StepStatus.ERRORED, StepStatus.CANCELLED, StepStatus.DONE, StepStatus.DEAD,
})  # fmt: skip
OPEN_STEPS = frozenset(StepStatus) - FINISHED_STEPS - {StepStatus.LINEAR_PENDING}
"""The statuses of steps that have started and not ended."""
WAITING_STEPS = frozenset({StepStatus.WAITING, StepStatus.READY, StepStatus.LINEAR_WAITING})
OUTCOME_UNKNOWN = "OutcomeUnknown"
"""The name of the error of a step whose last attempt has an unknown end (`StepLost`)."""
CANCELLED = "Cancelled"
"""The name of the error of a step that ended because its run was cancelled."""
LEASE_EXPIRED = "LEASE_EXPIRED"
"""The error of a linear step's attempt whose worker died."""


class ItemStatus(StrEnum):
    """The progress of an item of a map step."""

    PENDING = "pending"  # its task is to be sent, perhaps after a delay
    SENT = "sent"
    FAILED = "failed"  # a pass decides whether to retry it
    DONE = "done"
    DEAD = "dead"  # failed permanently
    CANCELLED = "cancelled"  # was open when its step or its run ended


OPEN_ITEMS = (ItemStatus.PENDING, ItemStatus.SENT, ItemStatus.FAILED)


class AnswerResult(StrEnum):
    """Whether the engine accepted the answer of a Celery task."""

    TAKEN = "taken"
    NOT_AWAITED = "not awaited"  # its step is gone, or already has an answer
    FORGED = "forged"  # its token is not that of the attempt

    @property
    def is_taken(self) -> bool:
        """Whether the answer was stored for its step or map item."""
        return self is AnswerResult.TAKEN


class WakeReason(StrEnum):
    """Why an instance was made due. It is only shown to people: no decision depends on it (LAW 5)."""

    START = "start"
    TIMER = "timer"
    EVENT = "event"  # or an answer from a task or a child
    RESUME = "resume"  # or the run was released with work left
    RETRY = "retry"  # its lease expired
    WAKE = "wake"  # the operation `wake`


LIMITED_TYPES = (StepType.DO, StepType.TASK, StepType.CHILD)
"""The kinds of steps that can have limits. While such a step waits for them, its row has no time."""
LIMITS_KEY = "\x1flimits"
"""The key of the row that records that a run has the limits of its workflow. No step has it."""


class HoldState(StrEnum):
    """What a step has of a limit.

    Of several limits it waits for the first one without room, and is blocked at the others. A parked one has been
    granted, or could have been, while its run was paused or busy: it keeps its place, and its next pass asks again.
    """

    WAITING = "waiting"
    BLOCKED = "blocked"
    PARKED = "parked"
    GRANTED = "granted"
    HELD = "held"


class LogLevel(StrEnum):
    """The severity of a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warn"
    ERROR = "error"


_TOPIC, _TASK, _CHILD, _INDEPENDENT_CHILD = "topic:", "task:", "child:", "independent-child:"
_CHILDREN = "children:"
_ITEM_PATTERN = re.compile(r"item:(\d{1,18}):(\d{1,9}):(\d{1,9}):([^\x00-\x1e]+)")
_TASK_PATTERN = re.compile(r"task:\d{1,18}:\d{1,9}:\d{1,9}:[^\x00-\x1f]+")
_MAX_TYPE_LENGTH = 255
PRIVATE_TYPE_PATTERN = "%:%"
"""A LIKE pattern for internal event types, each of one step. They have a colon, which those of clients never have."""
ANSWER_ID_PREFIX = "answer:"
_ID_NAMESPACE = uuid.UUID("3c9b1f5e-7f0b-5d55-9f1c-0f8a4a1f6d27")


def topic_event_type(topic: str, seq: int) -> str:
    """Return the event type for one wait on a topic. Only the step with this ``seq`` consumes such events."""
    return f"{_TOPIC}{seq}:" + topic  # not in the f-string, which writes the member of an enum as "Topic.PRICES"


def parse_topic_event_type(event_type: str | None) -> str | None:
    """Return the topic from an event type of `topic_event_type`, or None for any other event type."""
    return _parse_subject(event_type, _TOPIC, 2)


def task_event_type(task: str, pk: int, seq: int, attempt: int) -> str:
    """Return the event type of the answer to an attempt, of this instance ``pk`` and not a deleted one with its id."""
    return f"{_TASK}{pk}:{seq}:{attempt}:{task}"[:_MAX_TYPE_LENGTH]


def parse_task_event_type(event_type: str | None) -> str | None:
    """Return the task's name from an event type of `task_event_type`, or None for any other event type."""
    return _parse_subject(event_type, _TASK, 4)


def is_task_event_type(event_type: str) -> bool:
    """Whether an event type has the form of `task_event_type`. References in messages are not trusted."""
    return _TASK_PATTERN.fullmatch(event_type) is not None


def derive_id(subject: str, pk: int, run_number: int) -> str:
    """Return the id for ``subject`` in this run of the instance ``pk``: a UUID, the same at every call."""
    return str(uuid.uuid5(_ID_NAMESPACE, f"{pk}/{run_number}/{subject}"))


def make_answer_id(step_key: str) -> str:
    """Return the id of the event with a person's answer to a wait. An overlong key stands in it as a digest."""
    id_ = f"{ANSWER_ID_PREFIX}{step_key}"
    return id_ if len(id_) <= _MAX_TYPE_LENGTH else f"{ANSWER_ID_PREFIX}{hashlib.sha256(step_key.encode()).hexdigest()}"


def task_id(event_type: str, pk: int, run_number: int) -> str:
    """Return the Celery task id for the attempt that ``event_type`` names, in this run of the instance ``pk``."""
    return derive_id(event_type, pk, run_number)


def child_event_type(workflow: str, instance_id: str, seq: int, *, is_independent: bool = False) -> str:
    """Return the event type for the answer of a child instance to the step that created it.

    ``is_independent``: the child continues if its parent is terminated. The type is where the database has that.
    """
    return f"{_INDEPENDENT_CHILD if is_independent else _CHILD}{seq}:{workflow}/{instance_id}"[:_MAX_TYPE_LENGTH]


def children_event_type(workflow: str, seq: int) -> str:
    """Return the event type of a map over a workflow. No event has it: its children answer their items."""
    return f"{_CHILDREN}{seq}:{workflow}"


def parse_children_event_type(event_type: str | None) -> str | None:
    """Return the workflow from an event type of `children_event_type`, or None for any other event type."""
    return _parse_subject(event_type, _CHILDREN, 2)


def parse_child_event_type(event_type: str | None) -> tuple[str, str] | None:
    """Return the workflow and the instance id from an event type of `child_event_type`, or None for any other."""
    found = _parse_subject(event_type, _CHILD, 2) or _parse_subject(event_type, _INDEPENDENT_CHILD, 2)
    return None if found is None else (found.partition("/")[0], found.partition("/")[2])


def is_of_child(event_type: str | None) -> bool:
    """Whether a step with this event type waits for a child, or is a map of children."""
    return parse_child_event_type(event_type) is not None or parse_children_event_type(event_type) is not None


def is_cut(event_type: str | None) -> bool:
    """Whether an event type may have been cut to the size of its column, and with it the name of a child."""
    return event_type is not None and len(event_type) >= _MAX_TYPE_LENGTH


def is_answer_of_child(event_type: str | None, child: tuple[str, str]) -> bool:
    """Whether a step with this event type waits for this child, named by its workflow and instance id."""
    found = parse_child_event_type(event_type)
    return found == child or (found is not None and is_cut(event_type) and "/".join(child).startswith("/".join(found)))


def is_independent_child(event_type: str | None) -> bool:
    """Whether the child of a step with this event type continues if its parent is terminated."""
    return event_type is not None and event_type.startswith(_INDEPENDENT_CHILD)


@dataclass(frozen=True, slots=True)
class ItemRef:
    """One attempt of an item of a map step. ``pk`` is the key of the instance's row."""

    pk: int
    step_key: str
    position: int
    attempt: int

    @property
    def type(self) -> str:
        """The text that names this attempt in a `TaskReference`. No event has this type."""
        return f"item:{self.pk}:{self.position}:{self.attempt}:{self.step_key}"

    def work_id(self, run_number: int) -> str:
        """Return the id of the Celery task, or of the child instance, that does this attempt."""
        return task_id(self.type, self.pk, run_number)

    @classmethod
    def read(cls, type_: str) -> ItemRef | None:
        """Parse the text that `type` returns. Returns None for any other text, because references are not trusted."""
        found = _ITEM_PATTERN.fullmatch(type_)
        return None if found is None else cls(int(found[1]), found[4], int(found[2]), int(found[3]))


def is_answer(event_type: str) -> bool:
    """Whether the event type belongs to an answer of a task or of a child instance."""
    return event_type.startswith((_TASK, _CHILD, _INDEPENDENT_CHILD))


def get_public_event_type(event_type: str | None) -> str | None:
    """Return the event type if a client may send it, or None if it is internal."""
    return None if event_type is None or ":" in event_type else event_type


def _parse_subject(event_type: str | None, prefix: str, position: int) -> str | None:
    if event_type is None or not event_type.startswith(prefix):
        return None
    return event_type.split(":", position)[position]
