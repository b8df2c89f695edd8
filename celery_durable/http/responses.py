"""The bodies of responses, in camelCase. A field that does not apply is left out; one that has no value yet is null."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from celery_durable.explain import Code
from celery_durable.http.codes import ProblemCode
from celery_durable.model import LogLevel, Status, StepType


class StepState(StrEnum):
    """How far a step has come. `planned`, `ready`, `running`, `done` and `dead` are those of linear workflows alone."""

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


class ResponseModel(BaseModel):
    """What goes out."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    def to_json(self) -> bytes:
        """As it travels: what was not set is left out."""
        return self.__pydantic_serializer__.to_json(self, by_alias=True, exclude_unset=True)


_WHEN = "2030-01-01T08:00:00.000000Z"


class InvalidField(ResponseModel):
    """One thing that is wrong with a request; never with its value."""

    where: str
    message: str


class Problem(ResponseModel):
    """Why a request was refused (RFC 9457). ``code`` is stable; ``message``, for people, is the same as ``detail``."""

    title: str
    status: int
    detail: str
    code: ProblemCode | str
    message: str
    errors: list[InvalidField] | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "title": "Not Found",
                    "status": 404,
                    "detail": "Workflow 'order' has no instance 'order-42'.",
                    "code": "INSTANCE_NOT_FOUND",
                    "message": "Workflow 'order' has no instance 'order-42'.",
                }
            ]
        }
    )


class ErrorView(ResponseModel):
    """An error as it is stored."""

    name: str
    message: str


class StatusView(ResponseModel):
    """Where an instance stands. ``error`` only when errored, ``output`` only when complete."""

    status: Status
    error: ErrorView | None = None
    output: Any = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "complete", "output": "shipped"}]})


class WorkflowView(ResponseModel):
    """A workflow."""

    name: str


class WorkflowList(ResponseModel):
    """The workflows that the serving process knows."""

    workflows: list[WorkflowView]

    model_config = ConfigDict(json_schema_extra={"examples": [{"workflows": [{"name": "order"}]}]})


class InstanceItem(ResponseModel):
    """An instance that was created; a moment later it may have come further."""

    id: str
    details: StatusView

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "order-42", "details": {"status": "active"}}]})


class InstanceBatch(ResponseModel):
    """The instances that were created, without those that were skipped."""

    instances: list[InstanceItem]

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"instances": [{"id": "order-1", "details": {"status": "active"}}]}]}
    )


class ListedInstance(ResponseModel):
    """One line of a list: without params and output."""

    id: str
    details: StatusView
    run_number: int
    labels: dict[str, str] = {}
    created_at: datetime
    updated_at: datetime


class InstanceList(ResponseModel):
    """A page, newest first. ``cursor`` continues it."""

    instances: list[ListedInstance]
    cursor: str | None = None
    has_next_page: bool

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "instances": [
                        {
                            "id": "order-42",
                            "details": {"status": "waiting"},
                            "runNumber": 1,
                            "labels": {"tenant": "acme"},
                            "createdAt": _WHEN,
                            "updatedAt": _WHEN,
                        }
                    ],
                    "hasNextPage": False,
                }
            ]
        }
    )


class ChildView(ResponseModel):
    """The instance that does a step."""

    workflow_name: str
    instance_id: str


class ItemsView(ResponseModel):
    """How far the items of a map have come: how many there are, are done, and have failed for good."""

    total: int
    done: int
    failed: int


class CurrentStep(ResponseModel):
    """Of the open steps the one that is due first, else the last one. ``maxAttempts`` null: without end."""

    step_key: str
    name: str
    type: StepType
    status: StepState
    attempts: int
    max_attempts: int | None
    timeout_ms: int | None
    next_retry_at: datetime | None
    wake_at: datetime | None
    wait_event_type: str | None
    wait_topic: str | None = None
    task: str | None = None
    task_id: str | None = None
    child: ChildView | None = None
    items: ItemsView | None = None
    error: ErrorView | None = None


class InstanceMeta(ResponseModel):
    """What else is known of an instance and its current run. ``pauseRequested``: soon it pauses."""

    workflow_name: str
    run_number: int
    params: Any
    labels: dict[str, str] = {}
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    pause_requested: bool
    current_step: CurrentStep | None = None


class InstanceView(ResponseModel):
    """An instance."""

    id: str
    details: StatusView
    meta: InstanceMeta

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "order-42",
                    "details": {"status": "waiting"},
                    "meta": {
                        "workflowName": "order",
                        "runNumber": 1,
                        "params": {"orderId": "42", "cents": 1999},
                        "labels": {"tenant": "acme"},
                        "createdAt": _WHEN,
                        "updatedAt": _WHEN,
                        "startedAt": _WHEN,
                        "completedAt": None,
                        "reason": None,
                        "pauseRequested": False,
                        "currentStep": {
                            "stepKey": "wait for approval",
                            "name": "wait for approval",
                            "type": "waitForEvent",
                            "status": "waiting",
                            "attempts": 0,
                            "maxAttempts": None,
                            "timeoutMs": None,
                            "nextRetryAt": None,
                            "wakeAt": "2030-01-02T08:00:00.000000Z",
                            "waitEventType": "approval",
                        },
                    },
                }
            ]
        }
    )


class Done(ResponseModel):
    """It is done, or will be at the next step boundary."""

    ok: Literal[True] = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True}]})


class Restarted(Done):
    """A new run has begun."""

    run_number: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True, "runNumber": 2}]})


class StepCompleted(Done):
    """The step is completed. ``runNumber``: of the run that goes on with it."""

    run_number: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True, "runNumber": 1}]})


class RestartOrCreateResult(ResponseModel):
    """What happened. ``details``: "unchanged" leaves an instance as it is, in the status that is told."""

    outcome: Literal["created", "restarted", "unchanged"]
    id: str
    run_number: int
    details: StatusView

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"outcome": "restarted", "id": "order-42", "runNumber": 2, "details": {"status": "active"}}]
        }
    )


class Explanation(ResponseModel):
    """Why an instance stands where it stands: one ``code``, a sentence for people, what it rests on, what to type."""

    code: Code
    sentence: str
    facts: dict[str, Any]
    actions: list[str]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "code": "WAITING_EVENT",
                    "sentence": 'Waits at step "wait for approval" for an event "approval".',
                    "facts": {"status": "waiting"},
                    "actions": ["celery -A <your app> durable send-event order order-42 approval"],
                }
            ]
        }
    )


class EventSent(ResponseModel):
    """Where the instance stands. ``accepted`` false: an event of this id had been accepted before."""

    status: StatusView
    accepted: bool

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": {"status": "active"}, "accepted": True}]})


class StepView(CurrentStep):
    """A step. ``result`` only when it has one."""

    result: Any = None
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None


class EventView(ResponseModel):
    """An event. ``consumedByStepKey`` null: no wait has asked for it yet."""

    id: str
    type: str
    payload: Any
    created_at: datetime
    delivered_at: datetime | None
    consumed_by_step_key: str | None


class LogView(ResponseModel):
    """A log line. ``isReplay``: said again while the workflow's code was replayed."""

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


class OriginView(ResponseModel):
    """The run that another one continues, perhaps another instance's. ``stepKey`` null: with all of its steps."""

    instance_id: str
    run_number: int
    step_key: str | None


class ParentView(ResponseModel):
    """The step of another instance's run that created this one as its child."""

    workflow_name: str
    instance_id: str
    run_number: int
    step_key: str


class StepBefore(ResponseModel):
    """What a step was before somebody settled it."""

    status: StepState
    attempts: int
    error: ErrorView | None = None


class AuditView(ResponseModel):
    """What somebody did to a step by hand."""

    step_key: str
    action: str
    by: str
    reason: str | None
    before: StepBefore
    created_at: datetime


class RunView(ResponseModel):
    """A run: what it was given, and how it stands or ended.

    ``origin`` only where it continues another run, ``parent`` only where it is the child of a step; ``labels``: the
    instance's, as they are now.
    """

    details: StatusView
    params: Any
    labels: dict[str, str] = {}
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    reason: str | None
    origin: OriginView | None = None
    parent: ParentView | None = None
    audit: list[AuditView]


class HistoryView(ResponseModel):
    """A page of each list of a run. ``logs`` only with ``includeLogs=true``, ``run`` only with ``includeRun=true``."""

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
                            "createdAt": _WHEN,
                            "startedAt": _WHEN,
                            "finishedAt": _WHEN,
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
    """What a run has published under a key, and since when that is its value."""

    value: Any
    updated_at: datetime


class PublishedChange(PublishedView):
    """The same as it comes."""

    key: str


class PublishedValuesResponse(ResponseModel):
    """The newest value of each key, as the workflow writes it."""

    run_number: int
    published: dict[str, PublishedView]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"runNumber": 1, "published": {"progress": {"value": {"done": 3, "total": 10}, "updatedAt": _WHEN}}}
            ]
        }
    )


class Ticked(ResponseModel):
    """How many passes were run."""

    processed: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"processed": 3}]})


class Healthy(ResponseModel):
    """All is well."""

    status: Literal["ok"] = "ok"

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
