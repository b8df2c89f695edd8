"""The bodies of requests, in camelCase."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from celery_durable.model import IfExists, Status

# Only for the description: the operations refuse invalid values with their own problem codes.
_NAME = {"pattern": "^[a-zA-Z0-9_][a-zA-Z0-9_-]*$", "minLength": 1}
_TEXT = {"minLength": 1, "maxLength": 255, "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]*$"}
_LABELS: dict[str, Any] = {
    "maxProperties": 16,
    "propertyNames": _NAME | {"maxLength": 64},
    "additionalProperties": {"type": "string"} | _TEXT,
}


def _optional(text: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "string"} | text, {"type": "null"}]}


def _no_bool(value: Any) -> Any:
    """Refuse a bool, which pydantic would accept as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a valid integer")  # noqa: TRY004  # pydantic reports no TypeError
    return value


Count = Annotated[int, BeforeValidator(_no_bool)]
Id = Annotated[str, Field(json_schema_extra=_NAME | {"maxLength": 255})]
OptionalId = Annotated[str | None, Field(json_schema_extra=_optional(_NAME | {"maxLength": 255}))]
OptionalText = Annotated[str | None, Field(json_schema_extra=_optional(_TEXT))]
EmissionId = Annotated[str | None, Field(json_schema_extra=_optional(_TEXT | {"maxLength": 200}))]
Step = Annotated[str, Field(json_schema_extra=_TEXT | {"maxLength": 280})]
Labels = Annotated[dict[str, str], Field(json_schema_extra=_LABELS)]


class RequestModel(BaseModel):
    """The base of request bodies. Unknown fields are refused, so that a misspelled one is not silently ignored."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")


class CreateInstance(RequestModel):
    """A new instance. ``id`` is unique per workflow; the default is random. ``labels`` are searchable in lists.

    ``ifExists`` "return" returns an existing instance instead of an error. ``runAt`` is the earliest start, at most
    ``durable_max_sleep_seconds`` (365 days) ahead.
    """

    id: OptionalId = None
    params: Any = None
    if_exists: IfExists = "error"
    run_at: AwareDatetime | None = None
    labels: Labels = {}

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": "order-42", "params": {"orderId": "42", "cents": 1999}, "labels": {"tenant": "acme"}},
            ]
        }
    )


class BatchItem(RequestModel):
    """One instance of a batch."""

    id: Id
    params: Any = None
    labels: Labels = {}


class CreateBatch(RequestModel):
    """Several instances, up to ``durable_max_batch`` (100). Existing and repeated ids are skipped."""

    instances: list[BatchItem]

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"instances": [{"id": "order-1", "params": {"orderId": "1"}}]}]}
    )


class Reason(RequestModel):
    """The reason, which is recorded with the run."""

    reason: str | None = Field(default=None, max_length=2048)

    model_config = ConfigDict(json_schema_extra={"examples": [{"reason": "sold twice"}]})


class Rewind(RequestModel):
    """``step`` is the key of the step to continue from: its name, unless it is repeated."""

    step: Step
    reason: str | None = Field(default=None, max_length=2048)

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"step": "charge card", "reason": "the price was wrong"}]}
    )


class Fork(RequestModel):
    """``step`` is the key of the step to continue from. ``id`` is that of the new instance; the default is random."""

    step: Step
    id: OptionalId = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"step": "charge card", "id": "order-42-trial"}]})


class Skip(RequestModel):
    """``step`` is the key of the step to complete: its name, unless it is repeated.

    ``by`` is the name of the person. It is required if the `actor` hook of the API returns no name; a name from the
    hook takes precedence.
    """

    step: Step
    by: OptionalText = None
    reason: str | None = Field(default=None, max_length=2048)

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"step": "cool off", "by": "eve", "reason": "the customer waits"}]}
    )


class SetResult(Skip):
    """``result`` is the result of the step; for a wait, the payload of its event. The other fields are as for skip."""

    result: Any

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"step": "charge card", "result": "payment 17", "by": "eve"}]}
    )


class RestartOrCreate(RequestModel):
    """``params`` and ``labels`` are for a new instance; a restarted one keeps its own.

    ``ifStatus`` lists the statuses in which an instance is restarted.
    """

    params: Any = None
    labels: Labels = {}
    if_status: list[Status] = Field(default=[Status.COMPLETE, Status.ERRORED, Status.TERMINATED], min_length=1)
    reason: str | None = Field(default=None, max_length=2048)

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"params": {"orderId": "42"}, "ifStatus": ["errored", "terminated"]}]}
    )


class SendEvent(RequestModel):
    """An event. An event with the same ``id`` is accepted once per run."""

    type: Id
    payload: Any = None
    id: OptionalText = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"type": "approval", "payload": {"by": "eve"}, "id": "click-7"}]}
    )


class TickRequest(RequestModel):
    """The limits of one tick."""

    max_instances: Count = Field(default=10, ge=1, le=100)
    max_steps: Count | None = Field(default=None, ge=1, le=1024)

    model_config = ConfigDict(json_schema_extra={"examples": [{"maxInstances": 10, "maxSteps": 100}]})
