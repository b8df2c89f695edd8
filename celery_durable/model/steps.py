"""A step: what a commit writes to its row, its row, and the record that users see."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import Field

from celery_durable.model.hot_dataclass import hot_dataclass
from celery_durable.model.record import Milliseconds, Record, ShownStatus
from celery_durable.model.records import Child, ErrorInfo, ItemCounts
from celery_durable.model.states import CANCELLED, FINISHED_STEPS, LEASE_EXPIRED, WAITING_STEPS, StepStatus, StepType


@hot_dataclass()
class StepWrite:
    """A step row to write at a boundary. ``replaces``: the commit id of the row to overwrite.

    ``ran_for``: the time since the body started, if one ran. ``retry_in`` and ``wake_in`` count from the boundary.
    """

    key: str
    seq: int
    name: str
    type: StepType
    status: StepStatus
    replaces: str | None
    commit_id: str
    attempts: int = 0
    max_attempts: int | None = None
    timeout: timedelta | None = None
    retry_in: timedelta | None = None
    wake_in: timedelta | None = None
    wake_at: datetime | None = None
    event_type: str | None = None
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    event_seq: int | None = None
    ran_for: timedelta | None = None
    payload_type: str | None = None
    ask: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether this write inserts the row."""
        return self.replaces is None

    @property
    def is_finished(self) -> bool:
        """Whether this write finishes the step."""
        return self.status in FINISHED_STEPS

    @property
    def resets_crash_count(self) -> bool:
        """Whether this write advances the run, which shows that its crashes are over.

        An attempt that has only started may still kill its worker, and an expired lease is a crash.
        """
        return self.status not in (StepStatus.PENDING, StepStatus.RUNNING) and self.error_name != LEASE_EXPIRED


@hot_dataclass()
class StepRow:
    """One recorded step of a run, with the fields in the order of `STEP_COLUMNS`. ``result`` is JSON text."""

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
    event_seq: int | None = None
    """The ``seq`` of the event that a linear step's handler is called with."""
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    commit_id: str = ""
    """Identifies the step commit that wrote the row last."""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    payload_type: str | None = None
    """The class that the payload of the awaited event has to fit, as `values.name_class` names it."""
    ask: str | None = None
    """What a wait asks a person, as the JSON text of `values.encode_ask`."""

    @property
    def is_finished(self) -> bool:
        """Whether the step has ended."""
        return self.status in FINISHED_STEPS

    @property
    def is_end_unknown(self) -> bool:
        """Whether the last attempt was counted before its body began, and no pass has recorded its end.

        A pass that takes such an attempt back restores the error of the attempt before it.
        """
        return self.status is StepStatus.PENDING and self.attempts > 0 and self.error_name is None

    @property
    def is_cancelled(self) -> bool:
        """Whether a cancel of the run ended the step. Other cancelled steps lost a race or were terminated."""
        return self.status is StepStatus.CANCELLED and self.error_name == CANCELLED

    @property
    def is_timer_step(self) -> bool:
        """Whether the step is a sleep. Sleeps do not count toward `max_steps`."""
        return self.type is StepType.SLEEP


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

    @property
    def display_type(self) -> StepType:
        """The kind of step to show to people.

        A linear step is shown as a wait while it waits for an event, and otherwise as `do`. A task step is shown as
        `do` while it waits for its next attempt.
        """
        if self.type is StepType.TASK and self.next_retry_at is not None:
            return StepType.DO
        if self.type is StepType.LINEAR:
            return StepType.WAIT if self.status is StepStatus.LINEAR_WAITING else StepType.DO
        return self.type

    @property
    def awaited(self) -> str:
        """What ends the wait of an open step before its time: an event, a topic, a task, a child, or its kind."""
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
    def is_waiting(self) -> bool:
        """Whether the step waits for a time, an event, an answer or its next attempt."""
        return self.status in WAITING_STEPS


SHOWN_AS_STORED = tuple(
    each.name
    for each in fields(StepRow)
    if each.name in StepRecord.__slots__ and each.name not in ("wait_event_type", "result", "ask")
)
"""The fields of a `StepRow` that its `StepRecord` has, too, with the same values."""
