"""The attempts of steps that did not succeed: what is written about them, and what queries return."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from celery_durable.model.record import Record, RecordId
from celery_durable.model.records import ErrorInfo


class AttemptOutcome(StrEnum):
    """How an attempt ended that did not succeed."""

    FAILED = "failed"
    TIMED_OUT = "timedOut"
    CRASHED = "crashed"
    """Its worker died, or lost its lease."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The process that runs a pass: its Celery node, its process id, and the id of the Celery task."""

    node: str
    pid: int
    task_id: str


@dataclass(frozen=True, slots=True)
class ErrorTrace:
    """Where an exception was raised: the text of its traceback, and the innermost frame of the author's code."""

    text: str | None = None
    file: str | None = None
    line: int | None = None


NO_TRACE = ErrorTrace()


@dataclass(frozen=True, slots=True)
class AttemptWrite:
    """An attempt that did not succeed, as the commit that ends it writes it.

    ``step_key`` None: the code between steps raised. ``item``: the position of a map's item. ``ran_for`` None: no body
    ran in this process. ``worker`` None: another application ran it.
    """

    step_key: str | None
    number: int | None
    outcome: AttemptOutcome
    error_name: str
    error_message: str
    trace: ErrorTrace = NO_TRACE
    ran_for: timedelta | None = None
    worker: WorkerProcess | None = None
    item: int | None = None
    task_id: str | None = None
    """The id of the Celery task that did the work of a task step or of an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord(Record):
    """An attempt of a step that did not succeed, a worker's death, or an error of the code between steps.

    The attempt that succeeds is not recorded: its times are those of the step.

    Attributes:
        id: Increases along the run.
        step_key: The key of the step; None if a worker died, because its step is unknown, or if the workflow's code
            raised between steps.
        item: The position of the item in a map, from 0; None for other steps.
        attempt: The number of the attempt, from 1; None without a step.
        outcome: How it ended.
        error: The error.
        traceback: The text of the traceback; None if there is none, or ``durable_tracebacks`` is "none".
        file: The file of the innermost frame of your code; None if it is unknown.
        line: The line in that file.
        worker: The name of the worker's node; None if it is unknown.
        pid: The worker's process id; None if it is unknown.
        task_id: The id of the Celery task in which it ran, or of the child that did an item; None if it is unknown.
        started_at: When it started; None if that is unknown.
        ended_at: When its end was recorded.
        step: The name of the step; None if ``step_key`` is None.
    """

    id: RecordId
    step_key: str | None = None
    item: int | None = None
    attempt: int | None = None
    outcome: AttemptOutcome
    error: ErrorInfo
    traceback: str | None = None
    file: str | None = None
    line: int | None = None
    worker: str | None = None
    pid: int | None = None
    task_id: str | None = None
    started_at: datetime | None = None
    ended_at: datetime
    step: str | None = None

    @property
    def location(self) -> str | None:
        """The file and the line, as ``shop/orders.py:12``."""
        return None if self.file is None else f"{self.file}:{self.line}"
