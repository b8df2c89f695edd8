"""The bodies of requests, in camelCase.

They are dataclasses, so a client can make one without validation: the operations check the values, on every path.
The HTTP API validates what it receives with pydantic first.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from dataclasses import Field as DataclassField
from typing import Annotated, Any, ClassVar

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from celery_durable.model import IfExists, IfRunning, Status

_ENDED = [Status.COMPLETE.value, Status.ERRORED.value, Status.TERMINATED.value]
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


def _only_number(value: Any) -> Any:
    """Refuse a bool and text, which pydantic would accept as a number."""
    if isinstance(value, bool | str):
        raise ValueError("Input should be a valid integer")  # noqa: TRY004  # pydantic reports no TypeError
    return value


def _no_number(value: Any) -> Any:
    """Refuse a number, also as text, which pydantic would accept as the seconds or milliseconds since 1970."""
    if value is not None and not re.match(r"\d{4}-", str(value)):
        raise ValueError("Input should be a date and time in ISO 8601, with its offset from UTC")
    return value


_ONLY_NUMBER = BeforeValidator(_only_number)
Flag = Annotated[bool, Field(strict=True)]
Id = Annotated[str, Field(json_schema_extra=_NAME | {"maxLength": 255})]
OptionalId = Annotated[str | None, Field(json_schema_extra=_optional(_NAME | {"maxLength": 255}))]
OptionalText = Annotated[str | None, Field(json_schema_extra=_optional(_TEXT))]
EmissionId = Annotated[str | None, Field(json_schema_extra=_optional(_TEXT | {"maxLength": 200}))]
Step = Annotated[str, Field(json_schema_extra=_TEXT | {"maxLength": 280})]
OptionalStep = Annotated[str | None, Field(json_schema_extra=_optional(_TEXT | {"maxLength": 280}))]
Labels = Annotated[dict[str, str], Field(json_schema_extra=_LABELS | {"default": {}})]
Why = Annotated[str | None, Field(max_length=2048)]
Milliseconds = Annotated[int, Field(ge=0, le=36_500 * 86_400_000), _ONLY_NUMBER]


def _config(example: dict[str, Any] | None = None) -> ConfigDict:
    """Return how pydantic reads a body. It refuses unknown fields, so that a misspelled one is not silently ignored."""
    config = ConfigDict(alias_generator=to_camel, extra="forbid")
    return config if example is None else config | ConfigDict(json_schema_extra={"examples": [example]})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestModel:
    """The base of request bodies."""

    __pydantic_config__ = _config()
    is_optional: ClassVar[bool] = False
    """Whether a request may leave the body out."""

    @property
    def may_repeat(self) -> bool:
        """Whether the same request, sent twice, has the effect of one."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the fields that are not set."""
        given = ((each, getattr(self, each.name)) for each in fields(self))
        return {to_camel(each.name): value for each, value in given if value != _default(each)}


def _default(each: DataclassField[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyRequest(RequestModel):
    """For requests without a body."""

    is_optional: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateInstance(RequestModel):
    """A new instance. ``id`` is unique per workflow; the default is random. ``labels`` are searchable in lists.

    ``ifExists`` "return" returns an existing instance instead of an error. ``runAt`` is the earliest start, at most
    ``durable_max_sleep_seconds`` (365 days) ahead; ``delayMs`` is the same, counted from now. ``maxRunMs`` is how long
    each run may take, at least a second. It may not be longer than the limit of the workflow, which it replaces.
    Restarts, retries and forks keep it.

    ``ifExists`` "postpone" gives a run that has not begun the new parameters and the later start, at most
    ``atLatestMs`` after the creation of the run. If the run has begun, another one follows it. ``ifRunning`` says what
    happens if the run has not ended: "skip" does nothing, with "queue" another one follows it. An instance that has
    ended runs again.
    """

    __pydantic_config__ = _config(
        {"id": "order-42", "params": {"orderId": "42", "cents": 1999}, "labels": {"tenant": "acme"}}
    )

    id: OptionalId = None
    params: Any = None
    if_exists: IfExists = "error"
    if_running: IfRunning | None = None
    run_at: Annotated[AwareDatetime | None, BeforeValidator(_no_number)] = None
    delay_ms: Milliseconds | None = None
    at_latest_ms: Milliseconds | None = None
    max_run_ms: Annotated[int, Field(ge=1_000, le=36_500 * 86_400_000), _ONLY_NUMBER] | None = None
    labels: Labels = field(default_factory=dict)

    @property
    def may_repeat(self) -> bool:
        """With an id, because the second instance is then refused. But a repeated request may run it once more."""
        return self.id is not None and self.if_exists != "postpone" and self.if_running is None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem(RequestModel):
    """One instance of a batch."""

    id: Id
    params: Any = None
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateBatch(RequestModel):
    """Several instances, up to ``durable_max_batch`` (1000). Existing and repeated ids are skipped."""

    __pydantic_config__ = _config({"instances": [{"id": "order-1", "params": {"orderId": "1"}}]})

    instances: list[BatchItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason(RequestModel):
    """The reason, which is recorded with the run."""

    __pydantic_config__ = _config({"reason": "sold twice"})
    is_optional: ClassVar[bool] = True

    reason: Why = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Reason):
    """``by`` is the name of the person. A name from the `actor` hook of the API takes precedence."""

    __pydantic_config__ = _config({"reason": "sold twice", "by": "eve"})

    by: OptionalText = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(Cancel):
    """``children`` false lets the open children continue; by default they are terminated too. ``by`` as for cancel."""

    __pydantic_config__ = _config({"reason": "sold twice", "children": False})

    children: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Reason):
    """``delayMs`` is how long the new run waits before it starts, up to 30 days. By default it starts now.

    ``family`` also retries the children whose failure ended the instance, and the parents that it ended. ``dryRun``
    retries nothing and returns what would be retried.
    """

    __pydantic_config__ = _config({"delayMs": 600000, "reason": "the bank is back in ten minutes"})

    delay_ms: Annotated[int, Field(ge=0, le=30 * 86_400_000), _ONLY_NUMBER] | None = None
    family: Flag = False
    dry_run: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind(RequestModel):
    """``step`` is the key of the step to continue from: its name, unless it is repeated."""

    __pydantic_config__ = _config({"step": "charge card", "reason": "the price was wrong"})

    step: Step
    reason: Why = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(RequestModel):
    """``step`` is the key of the step to continue from. ``id`` is that of the new instance; the default is random."""

    __pydantic_config__ = _config({"step": "charge card", "id": "order-42-trial"})

    step: Step
    id: OptionalId = None

    @property
    def may_repeat(self) -> bool:
        """With an id, because the second instance is then refused."""
        return self.id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(RequestModel):
    """``step`` is the key of the step to complete: its name, unless it is repeated.

    ``by`` is the name of the person. It is required if the `actor` hook of the API returns no name; a name from the
    hook takes precedence.
    """

    __pydantic_config__ = _config({"step": "cool off", "by": "eve", "reason": "the customer waits"})

    step: Step
    by: OptionalText = None
    reason: Why = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult(Skip):
    """``result`` is the result of the step; for a wait, the payload of its event. The other fields are as for skip."""

    __pydantic_config__ = _config({"step": "charge card", "result": "payment 17", "by": "eve"})

    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOrCreate(RequestModel):
    """``params`` and ``labels`` are for a new instance; a restarted one keeps its own.

    ``ifStatus`` lists the statuses in which an instance is restarted.
    """

    __pydantic_config__ = _config({"params": {"orderId": "42"}, "ifStatus": ["errored", "terminated"]})

    params: Any = None
    labels: Labels = field(default_factory=dict)
    if_status: Annotated[list[Status], Field(min_length=1, json_schema_extra={"default": _ENDED})] = field(
        default_factory=lambda: [Status(each) for each in _ENDED]
    )
    reason: Why = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEvent(RequestModel):
    """An event. An event with the same ``id`` is accepted once per run.

    ``answers`` makes it the answer to a wait that asks a person, instead of ``type`` and ``id``: it is the key of the
    step. Then ``by`` is the name of the person, as for skip, and ``runNumber`` the run that has asked.
    """

    __pydantic_config__ = _config({"type": "approval", "payload": {"by": "eve"}, "id": "click-7"})

    type: OptionalId = None
    payload: Any = None
    id: OptionalText = None
    answers: OptionalStep = None
    by: OptionalText = None
    run_number: Annotated[int, Field(ge=1, le=2**31 - 1), _ONLY_NUMBER] | None = None

    @property
    def may_repeat(self) -> bool:
        """With an id, because a run accepts an id once; and an answer, because a wait accepts one."""
        return self.id is not None or self.answers is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit(RequestModel):
    """The payload for all open waits. ``id`` is your id of this emission; a repeated id emits nothing twice."""

    __pydantic_config__ = _config({"payload": {"userId": "7"}, "id": "change-12"})

    payload: Any = None
    id: EmissionId = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLimit(RequestModel):
    """``atOnce`` and ``rate`` replace numbers of the code; what is left out stays as it is.

    ``reset`` lets the numbers of the code count again. Without ``key``, the change is for all keys of the limit, also
    for those that come later. ``by`` is as for skip.
    """

    __pydantic_config__ = _config({"atOnce": 40, "rate": "120 per second", "by": "eve"})

    at_once: Annotated[int, Field(ge=1, le=2**31 - 1), _ONLY_NUMBER] | None = None
    rate: Annotated[str | None, Field(max_length=64)] = None
    reset: Flag = False
    key: Annotated[str | None, Field(max_length=255)] = None
    by: OptionalText = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TickRequest(RequestModel):
    """The limits of one tick."""

    __pydantic_config__ = _config({"maxInstances": 10, "maxSteps": 100})

    max_instances: Annotated[int, Field(ge=1, le=100), _ONLY_NUMBER] = 10
    max_steps: Annotated[int, Field(ge=1, le=1024), _ONLY_NUMBER] | None = None
