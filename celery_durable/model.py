"""The nouns: statuses, references and rows, as frozen data. Instants are aware UTC datetimes, lengths timedeltas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

P_co = TypeVar("P_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def from_us(us: int) -> datetime:
    """The instant ``us`` microseconds after the epoch, as the store keeps it."""
    return EPOCH + timedelta(microseconds=us)


def to_us(instant: datetime) -> int:
    """Microseconds since the epoch; exact, no floats."""
    return (instant - EPOCH) // _MICROSECOND


def span_us(span: timedelta) -> int:
    """A length of time in microseconds."""
    return span // _MICROSECOND


def iso(instant: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def span(length: timedelta, *, units: int = 2) -> str:
    """A length of time for people, in its largest units: ``12 ms``, ``1.2 s``, ``23 h 20 min``."""
    seconds = length.total_seconds()
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))} ms"
    if seconds < 10 and units > 1:
        return f"{seconds:.1f} s"
    left, parts = round(seconds), list[str]()
    for unit, size in _UNITS:
        count, rest = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
            left = rest
        if len(parts) == units:
            break
    return " ".join(part for part in parts if part)


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
_WAITING_STEPS = frozenset({StepStatus.WAITING, StepStatus.READY, StepStatus.LINEAR_WAITING})
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


@dataclass(frozen=True, slots=True)
class Ref:
    """All that a message carries: which run of which instance to look at."""

    workflow: str
    instance_id: str
    run_number: int

    def __str__(self) -> str:
        return f"{self.workflow}/{self.instance_id}#{self.run_number}"


@dataclass(frozen=True, slots=True)
class Due:
    """A run that a worker should look at now, and the queue to say so on."""

    ref: Ref
    queue: str


class OutboxKind(StrEnum):
    """What the outbox holds."""

    TASK = "task"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent once the transaction that wrote it has committed: a Celery task, or a named outbound event.

    ``id`` is the same however often it is sent. ``body`` is JSON text: a task's args, kwargs and options, an event's
    payload.
    """

    id: str
    kind: OutboxKind
    name: str
    body: str

    @property
    def content(self) -> Any:
        """``body`` as data."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to advance one run, as long as the row still names ``token`` (LAW 2)."""

    pk: int
    ref: Ref
    token: str
    queue: str
    crash_count: int
    created_at: datetime
    claimed_at: datetime
    run_at: datetime
    """Since when it had been due."""

    @property
    def latency(self) -> timedelta:
        """How long it had been due when it was claimed."""
        return max(self.claimed_at - self.run_at, timedelta(0))


@dataclass(frozen=True, slots=True)
class StepRow:
    """One recorded step of a run. ``result`` is JSON text; None while there is none."""

    step_key: str
    seq: int
    name: str
    type: StepType
    status: StepStatus
    attempts: int = 0
    max_attempts: int | None = None
    timeout: timedelta | None = None
    next_retry_at: datetime | None = None
    wake_at: datetime | None = None
    wait_event_type: str | None = None
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    event_seq: int | None = None
    """Of a linear step: the event that its handler is called with."""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    commit_id: str = ""
    """The boundary that wrote it."""

    @property
    def is_settled(self) -> bool:
        """Whether the step has ended: its row never changes again."""
        return self.status in ENDED_STEPS

    @property
    def is_timer_step(self) -> bool:
        """Whether the step is a sleep, which is free."""
        return self.type is StepType.SLEEP


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A linear step as it is inserted when a run begins."""

    name: str
    max_attempts: int | None
    timeout: timedelta | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run begins: its kind, the rows that a linear one follows to its end, and the version that they are of."""

    kind: Kind = Kind.REPLAY
    steps: tuple[PlannedStep, ...] = ()
    version: int | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line on its way to the next boundary; ``data`` is JSON text."""

    level: LogLevel
    category: str
    message: str
    data: str | None
    step_key: str | None
    attempt: int | None
    is_replay: bool


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """The mutex row of an instance, with its scheduling."""

    pk: int
    workflow: str
    instance_id: str
    run_number: int
    status: Status
    claim_token: str | None
    claimed_by: str | None
    lease_until: datetime | None
    run_at: datetime | None
    poll_at: datetime | None
    wake: Wake
    priority: int
    dispatches: int
    crash_count: int
    pause_requested: bool
    version: int
    queue: str
    created_at: datetime
    updated_at: datetime
    kind: Kind = Kind.REPLAY

    @property
    def ref(self) -> Ref:
        """The current run."""
        return Ref(self.workflow, self.instance_id, self.run_number)


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that another continues. ``step_key``: where it begins again; None: nowhere, all that settled is kept."""

    instance_id: str
    run_number: int
    step_key: str | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of an instance; ``params`` and ``output`` are JSON text."""

    run_number: int
    params: str
    output: str | None
    error_name: str | None
    error_message: str | None
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    dropped_logs: int
    origin: Origin | None = None


HEARTBEAT = timedelta(seconds=10)
"""How often a process that sweeps or works says that it lives."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A process that sweeps or works, as it last said; for people, nothing is decided by it."""

    id: str
    kind: Literal["dispatcher", "worker"]
    node: str
    pid: int
    queues: tuple[str, ...]
    """What it consumes; a dispatcher that is no worker consumes nothing."""
    workflows: tuple[str, ...]
    """What it knows."""
    started_at: datetime
    seen_at: datetime
    swept_at: datetime | None
    """When it last looked for due work; None where that is not its business."""
    next_wake_at: datetime | None
    """When it expected to find the next; None: nothing in sight."""

    def is_live(self, now: datetime) -> bool:
        """Whether it has been seen lately: it may miss two heartbeats."""
        return now - self.seen_at <= 3 * HEARTBEAT

    def sweeps(self, now: datetime) -> bool:
        """Whether it has looked for due work lately."""
        return self.swept_at is not None and now - self.swept_at <= 3 * HEARTBEAT


# --- what people read ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it is stored: the class's name and the text."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """What `status()` answers. ``output`` only when complete, ``error`` only when errored."""

    status: Status
    error: ErrorInfo | None = None
    output: Any = None


@dataclass(frozen=True, slots=True)
class InstanceSummary:
    """One line of a list."""

    id: str
    workflow: str
    run_number: int
    status: Status
    error: ErrorInfo | None
    run_at: datetime | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Page(Generic[T_co]):
    """Some items of a list, and the cursor that continues it; None at the end."""

    items: tuple[T_co, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as history shows it; ``result`` is the stored value."""

    step_key: str
    name: str
    type: StepType
    status: StepStatus
    attempts: int
    max_attempts: int | None
    timeout: timedelta | None
    next_retry_at: datetime | None
    wake_at: datetime | None
    wait_event_type: str | None
    result: Any
    error: ErrorInfo | None
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    wait_topic: str | None = None
    """What a wait is for that is for no event: then ``wait_event_type`` is None."""

    @property
    def verb(self) -> Literal[StepType.DO, StepType.SLEEP, StepType.WAIT]:
        """What kind of step it is for people: a linear one is a wait while it waits for its event."""
        if self.type is StepType.LINEAR:
            return StepType.WAIT if self.status is StepStatus.LINEAR_WAITING else StepType.DO
        return self.type

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its time, its event or its next attempt."""
        return self.status in _WAITING_STEPS


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event as history shows it; ``seq`` is its place in the order of arrival. ``type`` may be a topic."""

    seq: int
    event_id: str
    type: str
    payload: Any
    created_at: datetime
    delivered_at: datetime | None
    consumed_by_step_key: str | None


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A stored log line; ``id`` grows along the run."""

    id: int
    run_number: int
    level: LogLevel
    category: str
    message: str
    data: Any
    step_key: str | None
    attempt: int | None
    is_replay: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What somebody did to a step of a run: ``action`` is "set_result" or "skip"; and what the step was before."""

    run_number: int
    step_key: str
    action: str
    by: str
    reason: str | None
    status_before: StepStatus
    attempts_before: int
    error_before: ErrorInfo | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class History:
    """What happened in one run: steps in call order, events in order of arrival.

    ``origin``: the run that this one continues, whose steps its first ones were. ``audit``: what people did to steps.
    """

    workflow: str
    instance_id: str
    run_number: int
    status: InstanceStatus
    params: Any
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    origin: Origin | None = None
    audit: tuple[AuditRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """What `restart_or_create` did. ``status``: where an instance stands that was left as it is, else active."""

    outcome: Literal["created", "restarted", "unchanged"]
    instance_id: str
    run_number: int
    status: Status


@dataclass(frozen=True, slots=True)
class InstanceDetails:
    """All of an instance but its steps and events. ``params`` is the stored value of the current run.

    ``current_step``: of the open steps the one that is due first, else the last one; without its result.
    """

    instance: InstanceRow
    status: InstanceStatus
    params: Any
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    current_step: StepRecord | None


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """A run and a page of each of its lists; ``logs`` is None where they were not asked for."""

    run_number: int
    status: InstanceStatus
    params: Any
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    steps: Page[StepRecord]
    events: Page[EventRecord]
    logs: Page[LogRecord] | None


@dataclass(frozen=True, slots=True)
class Waiter:
    """A wait on a topic that is open; at ``deadline`` it times out."""

    workflow: str
    instance_id: str
    run_number: int
    step: str
    topic: str
    opened_at: datetime
    deadline: datetime


# --- what authors hold --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkflowEvent(Generic[P_co]):
    """What a workflow is called with.

    ``timestamp`` is when the instance was created: the same on every pass and in every run.
    """

    payload: P_co
    timestamp: datetime
    instance_id: str
    run_number: int


@dataclass(frozen=True, slots=True)
class ReceivedEvent(Generic[T_co]):
    """What `wait_for_event` returns; ``timestamp`` is when the event was accepted."""

    type: str
    payload: T_co
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class OutboundEvent:
    """What a handler of outbound events is called with.

    ``id`` is the same for every delivery of this event, ``attempt`` counts them from 1. ``workflow``, ``instance_id``
    and ``run_number`` say who sent it.
    """

    name: str
    payload: Any
    id: str
    workflow: str
    instance_id: str
    run_number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CreateOptions(Generic[P_co]):
    """One item of `create_batch`."""

    id: str
    params: P_co | None = None
