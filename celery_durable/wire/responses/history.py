"""The history of a run: its steps, events, log lines and published values."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import ConfigDict

from celery_durable.model import AttemptOutcome, LogLevel
from celery_durable.wire.responses.instances import CurrentStep
from celery_durable.wire.responses.model import WHEN, ErrorView, ResponseModel, StatusView, StepState


class StepView(CurrentStep):
    """A step. ``result`` is present only if it has one."""

    result: Any = None
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None


class EventView(ResponseModel):
    """An event. ``consumedByStepKey`` is null if no wait has consumed it yet."""

    id: str
    type: str
    payload: Any
    created_at: datetime
    delivered_at: datetime | None
    consumed_by_step_key: str | None


class LogView(ResponseModel):
    """A log line. ``isReplay`` is true if it was logged on a replay."""

    id: str
    run_number: int
    step_key: str | None
    attempt: int | None
    level: LogLevel
    category: str
    message: str
    data: Any
    is_replay: bool
    created_at: datetime


class AttemptView(ResponseModel):
    """An attempt of a step that did not succeed, a worker's death, or an error of the code between steps.

    ``step`` (its name) and ``stepKey`` are null for the last two. ``item`` is the position of a map's item. ``file``
    and ``line`` are the innermost frame of the application's code. ``traceback`` has at most 16 KiB.
    """

    id: str
    step: str | None
    step_key: str | None
    item: int | None
    attempt: int | None
    outcome: AttemptOutcome
    error: ErrorView
    traceback: str | None
    file: str | None
    line: int | None
    worker: str | None
    pid: int | None
    task_id: str | None
    started_at: datetime | None
    ended_at: datetime


class OriginView(ResponseModel):
    """The run that another run continues, perhaps of another instance.

    ``stepKey`` is the first step that the new run does not keep; null if it keeps all finished steps.
    """

    instance_id: str
    run_number: int
    step_key: str | None


class ParentView(ResponseModel):
    """The step of another instance that created this instance as its child."""

    workflow_name: str
    instance_id: str
    run_number: int
    step_key: str


class StepBefore(ResponseModel):
    """The state of a step before a person completed it."""

    status: StepState
    attempts: int
    error: ErrorView | None = None


class AuditView(ResponseModel):
    """A manual change to a step."""

    step_key: str
    action: str
    by: str
    reason: str | None
    before: StepBefore
    created_at: datetime


class RunView(ResponseModel):
    """A run: its parameters, and its status or outcome.

    ``origin`` is present only if it continues another run, ``parent`` only if a step created the instance. ``labels``
    are the current labels of the instance. ``maxRunMs`` is present only if the instance has a limit of its own.
    """

    details: StatusView
    params: Any
    labels: dict[str, str] = {}
    instance_created_at: datetime
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    origin: OriginView | None = None
    parent: ParentView | None = None
    max_run_ms: int | None = None
    audit: list[AuditView]


class HistoryView(ResponseModel):
    """A page of each list of a run.

    ``logs`` is present only with ``includeLogs=true``, ``attempts`` only with ``includeAttempts=true``, ``run`` only
    with ``includeRun=true``.
    """

    run_number: int
    run: RunView | None = None
    steps: list[StepView]
    events: list[EventView]
    steps_cursor: str | None = None
    steps_has_next_page: bool
    events_cursor: str | None = None
    events_has_next_page: bool
    logs: list[LogView] | None = None
    logs_cursor: str | None = None
    logs_has_next_page: bool | None = None
    attempts: list[AttemptView] | None = None
    attempts_cursor: str | None = None
    attempts_has_next_page: bool | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "runNumber": 1,
                    "steps": [
                        {
                            "stepKey": "charge card",
                            "name": "charge card",
                            "type": "do",
                            "status": "completed",
                            "attempts": 1,
                            "maxAttempts": 6,
                            "timeoutMs": 600000,
                            "nextRetryAt": None,
                            "wakeAt": None,
                            "waitEventType": None,
                            "result": "payment 1",
                            "createdAt": WHEN,
                            "startedAt": WHEN,
                            "finishedAt": WHEN,
                        }
                    ],
                    "events": [],
                    "stepsHasNextPage": False,
                    "eventsHasNextPage": False,
                }
            ]
        }
    )


class PublishedView(ResponseModel):
    """A value that a run published under a key, and when."""

    value: Any
    updated_at: datetime


class PublishedChange(PublishedView):
    """A published value and its key, as a message of a stream."""

    key: str


class PublishedValuesResponse(ResponseModel):
    """The newest value of each key that a run published."""

    run_number: int
    published: dict[str, PublishedView]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"runNumber": 1, "published": {"progress": {"value": {"done": 3, "total": 10}, "updatedAt": WHEN}}}
            ]
        }
    )
