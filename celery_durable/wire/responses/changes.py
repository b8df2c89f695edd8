"""What the commands return."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict

from celery_durable.wire.responses.model import ResponseModel, StatusView


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


class EventSent(ResponseModel):
    """The status of the instance. ``accepted`` is false if an event with this id was accepted before."""

    status: StatusView
    accepted: bool

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": {"status": "active"}, "accepted": True}]})
