"""The bodies of responses, in camelCase. A field that does not apply is left out; one that has no value yet is null."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from celery_durable.explain import Code
from celery_durable.model import LogLevel, Status, StepType
from celery_durable.wire.codes import ProblemCode


class StepState(StrEnum):
    """The progress of a step. Only steps of linear workflows are `planned`, `ready`, `running`, `done` or `dead`."""

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
    """The base of response bodies."""

    # A command of the CLI reads with two or three of the models: those that it does not use need not be built.
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, defer_build=True)
    http_status: ClassVar[int] = 200

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the model of a decoded body; raises ValueError, which names the first field that is wrong."""
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            where = ".".join(map(str, error["loc"])) or "body"
            raise ValueError(f"{where}: {error['msg']}, not {error['input']!r}") from None

    def to_data(self) -> dict[str, Any]:
        """Return the body as JSON data, without the fields that were not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def to_json(self) -> bytes:
        """Return the JSON body, without the fields that were not set."""
        return self.__pydantic_serializer__.to_json(self, by_alias=True, exclude_unset=True)


_WHEN = "2030-01-01T08:00:00.000000Z"


class InvalidField(ResponseModel):
    """A field of a request that is not valid, without its value."""

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
    """A stored error."""

    name: str
    message: str


class StatusView(ResponseModel):
    """The status of an instance. It has an ``error`` only if errored, and an ``output`` only if complete."""

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
    """An instance that was created, with its status at that time."""

    http_status: ClassVar[int] = 201
    id: str
    details: StatusView

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "order-42", "details": {"status": "active"}}]})


class ExistingInstance(InstanceItem):
    """An instance that existed before the request to create it."""

    http_status: ClassVar[int] = 200


class InstanceBatch(ResponseModel):
    """The instances that were created, without those that were skipped."""

    instances: list[InstanceItem]

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"instances": [{"id": "order-1", "details": {"status": "active"}}]}]}
    )


class ListedInstance(ResponseModel):
    """An instance in a list, without parameters and output."""

    id: str
    details: StatusView
    run_number: int
    labels: dict[str, str] = {}
    created_at: datetime
    updated_at: datetime


class InstanceList(ResponseModel):
    """A page, newest first. ``cursor`` is for the next page."""

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
    """The child instance that does the work of a step."""

    workflow_name: str
    instance_id: str


class ItemsView(ResponseModel):
    """The progress of a map: how many items it has, are done, and have failed permanently."""

    total: int
    done: int
    failed: int


class CurrentStep(ResponseModel):
    """The open step that is due first, or the last step if none is open. ``maxAttempts`` null means no limit."""

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
    """More about an instance and its current run. With ``pauseRequested`` it pauses at the next step boundary."""

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
    """The request was accepted. It takes effect now or at the next step boundary."""

    ok: Literal[True] = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True}]})


class Woken(Done):
    """Whether a worker was sent to check the instance; ``woken`` is false if it is paused or a worker holds it."""

    woken: bool

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True, "woken": True}]})


class Restarted(Done):
    """A new run was started."""

    run_number: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True, "runNumber": 2}]})


class StepCompleted(Done):
    """The step is completed. ``runNumber`` is the number of the run that continues."""

    run_number: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"ok": True, "runNumber": 1}]})


class RestartOrCreateResult(ResponseModel):
    """What happened, and the status of the instance."""

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
    """Why an instance is in its current state.

    ``code`` is for programs, ``sentence`` for people. ``facts`` are the data behind them, ``actions`` commands to run.
    """

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
    """The status of the instance. ``accepted`` is false if an event with this id was accepted before."""

    status: StatusView
    accepted: bool

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": {"status": "active"}, "accepted": True}]})


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
    are the current labels of the instance.
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
    """A page of each list of a run.

    ``logs`` is present only with ``includeLogs=true``, ``run`` only with ``includeRun=true``.
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
                {"runNumber": 1, "published": {"progress": {"value": {"done": 3, "total": 10}, "updatedAt": _WHEN}}}
            ]
        }
    )


class Ticked(ResponseModel):
    """The number of passes that a tick ran."""

    processed: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"processed": 3}]})


class Healthy(ResponseModel):
    """The check succeeded."""

    status: Literal["ok"] = "ok"

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
