"""Workflows and instances: lists, one instance, why it waits."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import ConfigDict

from celery_durable.explain import Code
from celery_durable.model import StepType
from celery_durable.wire.responses.model import WHEN, ErrorView, ResponseModel, StatusView, StepState


class ParameterView(ResponseModel):
    """A field of a workflow's parameters. ``type`` is for people."""

    name: str
    type: str
    required: bool


class WorkflowView(ResponseModel):
    """A workflow. ``parameters`` are the fields of the declared type; none for other types."""

    name: str
    parameters: list[ParameterView] = []


class WorkflowList(ResponseModel):
    """The workflows that the serving process knows."""

    workflows: list[WorkflowView]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"workflows": [{"name": "order", "parameters": [{"name": "orderId", "type": "str", "required": True}]}]}
            ]
        }
    )


class ChildView(ResponseModel):
    """The child instance that does the work of a step."""

    workflow_name: str
    instance_id: str


class ItemFailureView(ResponseModel):
    """An item of a map that has failed permanently. ``position`` counts from 0."""

    position: int
    attempts: int
    error: ErrorView


class ItemsView(ResponseModel):
    """The progress of a map: how many items it has, are done, and have failed permanently.

    ``failures``: the first ten that have failed, in a history.
    """

    total: int
    done: int
    failed: int
    failures: list[ItemFailureView] = []


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


class RunningView(ResponseModel):
    """The attempt of a step that a worker runs, at its last renewal of the lease."""

    step_key: str
    attempt: int
    since: datetime


class ListedInstance(ResponseModel):
    """An instance in a list, without parameters and output.

    ``currentStep`` is the open step that is due first. ``running`` is missing if no worker runs a step.
    """

    id: str
    details: StatusView
    run_number: int
    labels: dict[str, str] = {}
    run_at: datetime | None = None
    created_at: datetime
    updated_at: datetime
    current_step: CurrentStep | None = None
    running: RunningView | None = None
    worker: str | None = None


_LISTED_EXAMPLE: dict[str, Any] = {
    "id": "order-42",
    "details": {"status": "waiting"},
    "runNumber": 1,
    "labels": {"tenant": "acme"},
    "createdAt": WHEN,
    "updatedAt": WHEN,
}


class InstanceList(ResponseModel):
    """A page, newest first. ``cursor`` is for the next page."""

    instances: list[ListedInstance]
    cursor: str | None = None
    has_next_page: bool

    model_config = ConfigDict(json_schema_extra={"examples": [{"instances": [_LISTED_EXAMPLE], "hasNextPage": False}]})


class InstanceOfAny(ListedInstance):
    """An instance in a list of several workflows, with the name of its workflow."""

    workflow_name: str


class InstanceListOfAll(ResponseModel):
    """A page of the instances of all workflows, newest first. ``cursor`` is for the next page."""

    instances: list[InstanceOfAny]
    cursor: str | None = None
    has_next_page: bool

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"instances": [{"workflowName": "order", **_LISTED_EXAMPLE}], "hasNextPage": False}]
        }
    )


class InstanceMeta(ResponseModel):
    """More about an instance and its current run. With ``pauseRequested`` it pauses at the next step boundary.

    ``running`` and ``worker``: the step that a worker runs, and its name. They are missing if no worker runs one.
    ``maxRunMs``: how long each run may take. It is missing if the instance has no limit of its own.
    """

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
    max_run_ms: int | None = None
    current_step: CurrentStep | None = None
    running: RunningView | None = None
    worker: str | None = None


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
                        "createdAt": WHEN,
                        "updatedAt": WHEN,
                        "startedAt": WHEN,
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
