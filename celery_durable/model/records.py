"""What queries return about the steps, events, log lines and manual changes of a run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from celery_durable.model.record import Milliseconds, Record, RecordId, ShownStatus, WorkflowName
from celery_durable.model.states import LIMITED_TYPES, WAITING_STEPS, LogLevel, StepStatus, StepType
from celery_durable.model.steps import StepRow


@dataclass(frozen=True, slots=True)
class ErrorInfo(Record):
    """A stored error.

    Attributes:
        name: The name of the error's class.
        message: The error's text.
    """

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Child(Record):
    """The child instance that does the work of a step.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
    """

    workflow: WorkflowName
    instance_id: str


@dataclass(frozen=True, slots=True)
class ItemFailure(Record):
    """An item of a map that has failed permanently.

    Attributes:
        position: Its position in the list, from 0.
        attempts: How many attempts were made.
        error: The error of the last one.
        child: The child instance of the last one; None for a task, and if an earlier run created it or it was deleted.
    """

    position: int
    attempts: int
    error: ErrorInfo
    child: Child | None = None


@dataclass(frozen=True, slots=True)
class ItemCounts(Record):
    """The progress of a map step. Items that are neither done nor failed are under way or not sent yet.

    Attributes:
        total: How many items the map has.
        done: How many have completed.
        failed: How many have failed permanently.
        failures: The first ten of those, in a history.
        children: The child instances of the first ten items that are under way; none if tasks do the items.
    """

    total: int
    done: int
    failed: int
    failures: tuple[ItemFailure, ...] = ()
    children: tuple[Child, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord(Record):
    """An event in the history of a run.

    Attributes:
        seq: Its position in the order of arrival.
        event_id: Its id.
        type: The type of the event, or its topic.
        payload: JSON data.
        created_at: When it was accepted.
        delivered_at: When a wait consumed it; None if none has.
        consumed_by_step_key: The key of the wait that consumed it; None if none has.
        by: The name of the person whose answer it is; None for other events.
    """

    seq: int
    event_id: Annotated[str, Field(alias="id")]
    type: str
    payload: Any = None
    created_at: datetime
    delivered_at: datetime | None = None
    consumed_by_step_key: str | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord(Record):
    """A stored log line.

    Attributes:
        id: Increases along the run. Pass it as ``after_id`` to read the next lines.
        run_number: The number of the run, from 1.
        level: The `LogLevel`.
        category: The category that was passed to the `StepLog` method.
        message: The text.
        data: JSON data; None if there is none.
        step_key: The key of the step whose function logged it; None outside a step.
        attempt: The attempt of that step, from 1.
        is_replay: Whether the line was logged on a replay.
        created_at: When it was logged.
    """

    id: RecordId
    run_number: int
    level: LogLevel
    category: str
    message: str
    data: Any = None
    step_key: str | None = None
    attempt: int | None = None
    is_replay: bool
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBefore(Record):
    """The state of a step before a person changed it.

    Attributes:
        status: Its status.
        attempts: How many attempts had started.
        error: Its last error; None if it had none.
    """

    status: ShownStatus
    attempts: int
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(Record):
    """What a person did to a step with `WorkflowInstance.set_result`, `skip` or `answer`, or to a run.

    Attributes:
        run_number: The number of the run, from 1.
        step_key: The step's key; None for an action on the whole run.
        action: "set_result", "skip" or "answer"; "cancel" or "terminate" for the whole run.
        by: The name of the person.
        reason: The reason that was given; None if there was none.
        before: The step's state before; None for an action on the whole run.
        created_at: When it was done.
    """

    run_number: int
    step_key: str | None = None
    action: str
    by: str
    reason: str | None = None
    before: StepBefore | None = None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record):
    """A step in the history of a run.

    Attributes:
        step_key: Identifies the step within the run: its name, with a number if it is repeated.
        name: The name that the workflow's code gives it.
        type: The kind of step.
        status: The progress of the step.
        attempts: How many attempts have started.
        max_attempts: How many attempts it may have; None for no limit.
        timeout: The timeout of each attempt; None for no timeout.
        next_retry_at: When the next attempt is due; None if none is planned.
        wake_at: When a sleep ends, or when a wait, a task, a child or a map is due; None for other steps.
        wait_event_type: The event type of a wait for an event; None for other steps.
        wait_topic: The topic of a wait for a topic; None for other steps.
        result: The result as JSON data. For a map, a list with ``{"output": ...}`` or ``{"error": ...}`` for each item.
        error: The last error; None if there was none.
        created_at: When the step was recorded.
        started_at: When the last attempt of its function started; None if no attempt is recorded.
        finished_at: When it ended; None if it has not.
        task: The name of the step's Celery task; None for other steps.
        task_id: The task id with which that task was last sent; None for other steps.
        child: The child instance that does the work; None for other steps.
        items: The progress of a map; None for other steps.
        workflow: The workflow whose instances do the items of a map; None for other steps.
        ask: What a wait asks a person: a sentence, or facts by name; None for other steps.
        to: Whom it asks; None if the workflow does not say.
        limits: The names of the limits for which it waits; None if it waits for none.
    """

    step_key: str
    name: str
    type: StepType
    status: ShownStatus
    attempts: int
    max_attempts: int | None = None
    timeout: Annotated[Milliseconds | None, Field(alias="timeoutMs")] = None
    next_retry_at: datetime | None = None
    wake_at: datetime | None = None
    wait_event_type: str | None = None
    result: Any = None
    error: ErrorInfo | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    wait_topic: str | None = None
    task: str | None = None
    task_id: str | None = None
    child: Child | None = None
    items: ItemCounts | None = None
    workflow: str | None = None
    ask: Any = None
    to: str | None = None
    limits: tuple[str, ...] | None = None

    @property
    def display_type(self) -> StepType:
        """The kind of step to show to people.

        A linear step is shown as a wait while it waits for an event, and otherwise as `do`. A task step is shown as
        `do` while it waits for its next attempt, and every step while it waits for its limits.
        """
        if self.waits_for_limits or (self.type is StepType.TASK and self.next_retry_at is not None):
            return StepType.DO
        if self.type is StepType.LINEAR:
            return StepType.WAIT if self.status is StepStatus.LINEAR_WAITING else StepType.DO
        return self.type

    @property
    def awaited(self) -> str:
        """What ends the wait of an open step before its time: an event, a topic, a task, a child, or its kind."""
        if self.waits_for_limits:
            return " and ".join(f"limit {name}" for name in self.limits or ()) or "its limits"
        if self.wait_topic is not None:
            return f'topic "{self.wait_topic}"'
        if self.task is not None:
            return f"Celery task {self.task}" if self.items is None else f"Celery tasks {self.task}"
        if self.workflow is not None:
            return f"instances of workflow {self.workflow}"
        if self.child is not None:
            return f"instance {self.child.workflow}/{self.child.instance_id}"
        return f"{self.type}" if self.wait_event_type is None else f'event "{self.wait_event_type}"'

    @property
    def waits_for_limits(self) -> bool:
        """Whether the step waits until it gets its limits."""
        is_timed = not (self.next_retry_at is None and self.wake_at is None)
        return self.status is StepStatus.WAITING and self.type in LIMITED_TYPES and not is_timed

    @property
    def is_waiting(self) -> bool:
        """Whether the step waits for a time, an event, an answer or its next attempt."""
        return self.status in WAITING_STEPS


SHOWN_AS_STORED = tuple(
    each.name
    for each in fields(StepRow)
    if each.name in StepRecord.__slots__ and each.name not in ("wait_event_type", "result", "ask")
)
"""The fields of a `StepRow` that its `StepRecord` has, too, with the same values."""
