"""What people read: statuses, histories, pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeVar

from celery_durable.model.rows import InstanceRow, Origin
from celery_durable.model.states import WAITING_STEPS, LogLevel, Status, StepStatus, StepType

T_co = TypeVar("T_co", covariant=True)

EXPORT_VERSION = 1
"""Of the form in which a run is exported."""


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
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Page(Generic[T_co]):
    """Some items of a list, and the cursor that continues it; None at the end."""

    items: tuple[T_co, ...]
    cursor: str | None


Verb = Literal[StepType.DO, StepType.SLEEP, StepType.WAIT, StepType.TASK, StepType.CHILD, StepType.MAP]


@dataclass(frozen=True, slots=True)
class Child:
    """The instance that does a step."""

    workflow: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class ParentStep:
    """The step of another instance's run that created an instance, as `Step.child` does."""

    workflow: str
    instance_id: str
    run_number: int
    step_key: str


@dataclass(frozen=True, slots=True)
class ItemCounts:
    """How far a map has come: ``failed`` for good; what is neither is under way, or still to be sent."""

    total: int
    done: int
    failed: int


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
    task: str | None = None
    """The Celery task that does it, the name."""
    task_id: str | None = None
    """The id under which that was sent last."""
    child: Child | None = None
    items: ItemCounts | None = None
    """Of a map, whose ``result`` is a list with ``{"output": ...}`` or ``{"error": ...}`` for each."""

    @property
    def verb(self) -> Verb:
        """What kind of step it is for people: a linear one is a wait while it waits for its event.

        A task that is to be sent again is tried again like any other step.
        """
        if self.type is StepType.TASK and self.next_retry_at is not None:
            return StepType.DO
        if self.type is StepType.LINEAR:
            return StepType.WAIT if self.status is StepStatus.LINEAR_WAITING else StepType.DO
        return self.type

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its time, its event or its next attempt."""
        return self.status in WAITING_STEPS


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
    ``labels``: the instance's, as they are now. ``parent``: the step whose child it is.
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
    labels: Mapping[str, str] = field(default_factory=dict)
    parent: ParentStep | None = None


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
    tag: str
    status: InstanceStatus
    params: Any
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    current_step: StepRecord | None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """A run and a page of each of its lists; ``logs`` is None, and ``audit`` empty, where they were not asked for."""

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
    origin: Origin | None = None
    audit: tuple[AuditRecord, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    parent: ParentStep | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What a run has published under a key, and since when that is its value."""

    value: Any
    updated_at: datetime


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
