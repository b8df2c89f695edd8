"""What operators read across all instances: counts, overdue runs, and steps that wait for an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_durable.model.record import Record, WorkflowName
from celery_durable.model.records import ErrorInfo
from celery_durable.model.states import Status


@dataclass(frozen=True, slots=True)
class Count(Record):
    """A number of rows. If it is not exact, there are at least so many: the read has examined as many as it may."""

    count: int
    is_exact: bool = True

    def __str__(self) -> str:
        return str(self.count) if self.is_exact else f"{self.count}+"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCount(Count):
    """The number of instances of a workflow in a status. If it is not exact, there are at least so many."""

    workflow: WorkflowName
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRuns(Count):
    """The runs that are due and that no worker has claimed, and since when the oldest of them is due."""

    oldest: datetime | None = None


@dataclass(frozen=True, slots=True)
class StuckRun:
    """An instance that should move and does not, since when its run is due, or since its worker's lease has ended."""

    workflow: str
    instance_id: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureText(Count):
    """Errored instances of a workflow that failed with the same text in the same step; ``newest_id``: one of them."""

    workflow: str
    step: str | None
    error: ErrorInfo | None
    newest_id: str
    newest_at: datetime
    is_of_child: bool
    """Whether the failed step of the newest one was the work of a child."""


@dataclass(frozen=True, slots=True)
class QueueLength(Record):
    """A queue. ``messages`` is missing if the broker does not answer or cannot count."""

    name: str
    messages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventWait(Record):
    """A step that waits for an event.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
        status: The status of the instance.
        wait_event_type: The type of the event.
        step_name: The step's name.
        step_key: The step's key: its name, with a number if it is repeated.
        since: Since when it waits.
        wake_at: Until when it waits.
        ask: What it asks a person: a sentence, or facts by name; None if it asks nobody.
        to: Whom it asks; None if the workflow does not say.
        schema: The JSON schema of the answer; None if any JSON data will do.
    """

    workflow: WorkflowName
    instance_id: str
    run_number: int
    status: Status
    wait_event_type: str
    step_name: str
    step_key: str
    since: datetime
    wake_at: datetime | None = None
    ask: Any = None
    to: str | None = None
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFilter:
    """Which waits to list: of this workflow, for this event type, that ask this one. None means any."""

    workflow: str | None = None
    event_type: str | None = None
    to: str | None = None
    is_asking: bool = False

    @property
    def asks(self) -> bool:
        """Whether all of them ask a person."""
        return self.is_asking or self.to is not None


@dataclass(frozen=True, slots=True)
class RowLocker:
    """The database session that holds the lock of a row. ``state``: as the server names it."""

    pid: int
    state: str
    age: timedelta
    """How long its transaction has lasted."""
    end: str
    """A command that ends the session."""


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """A queue in which tasks of steps wait. ``is_consumed``: whether a worker with Durable consumes it."""

    age: timedelta
    """For how long the oldest of these tasks has waited."""
    count: int
    is_consumed: bool


@dataclass(frozen=True, slots=True)
class Stats(Record):
    """Counts of instances, without zeros; due runs; and the queues of known workflows and of waiting tasks."""

    instances: Sequence[StatusCount]
    due: DueRuns
    queues: Sequence[QueueLength] = ()
