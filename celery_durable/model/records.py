"""What queries return about the steps, events, log lines and manual changes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from celery_durable.model.record import Record, RecordId, ShownStatus, WorkflowName
from celery_durable.model.states import LogLevel


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
