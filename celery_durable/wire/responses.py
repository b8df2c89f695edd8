"""The bodies of responses that are no records: lists, what commands return, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from celery_durable.errors import DurableError, WorkflowNotFound
from celery_durable.model import (
    Child,
    EventWait,
    InstanceStatus,
    InstanceSummary,
    LimitRecord,
    Published,
    Record,
    Waiter,
)
from celery_durable.values import Parameter
from celery_durable.wire.encoding import RunHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Response(Record):
    """The base of what commands return."""

    http_status: ClassVar[int] = 200


# --- lists ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowParameters(Record):
    """A workflow.

    Attributes:
        name: Its name.
        parameters: The fields of the declared type of its parameters; none for other types.
    """

    name: str
    parameters: Sequence[Parameter] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowList(Record):
    """The workflows that the serving process knows."""

    workflows: Sequence[WorkflowParameters]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceList(Record):
    """A page of instances, without parameters and output, newest first. ``cursor`` is for the next page."""

    instances: Sequence[InstanceSummary]
    cursor: str | None = None
    has_next_page: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitList(Record):
    """A page of steps that wait for an event, those of the newest instances first. ``cursor`` is for the next page."""

    waits: Sequence[EventWait]
    cursor: str | None = None
    has_next_page: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterList(Record):
    """A page of waits for a topic, oldest instances first. ``cursor`` is for the next page."""

    waiters: Sequence[Waiter]
    cursor: str | None = None
    has_next_page: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitList(Record):
    """A page of limits, in the order of their names and keys. ``cursor`` is for the next page."""

    limits: Sequence[LimitRecord]
    cursor: str | None = None
    has_next_page: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryResponse(RunHistory):
    """A page of each list of a run.

    ``logs`` is present only with ``includeLogs=true``, ``attempts`` only with ``includeAttempts=true``, ``run`` only
    with ``includeRun=true``.
    """

    steps_cursor: str | None = None
    steps_has_next_page: bool
    events_cursor: str | None = None
    events_has_next_page: bool
    logs_cursor: str | None = None
    logs_has_next_page: bool | None = None
    attempts_cursor: str | None = None
    attempts_has_next_page: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValues(Record):
    """The newest value of each key that a run published."""

    run_number: int
    published: Mapping[str, Published]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedChange(Published):
    """A published value and its key, as a message of a stream."""

    key: str


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceItem(Response):
    """An instance that was created, with its status at that time."""

    http_status: ClassVar[int] = 201
    id: str
    details: InstanceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingInstance(InstanceItem):
    """An instance that existed before the request to create it."""

    http_status: ClassVar[int] = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceBatch(Response):
    """The instances that were created, without those that were skipped."""

    instances: Sequence[InstanceItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Response):
    """The request was accepted. It takes effect now or at the next step boundary."""

    ok: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken(Done):
    """Whether a worker was sent to check the instance; ``woken`` is false if it is paused or a worker holds it."""

    woken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Done):
    """Whether it was paused, or a pause was requested. If ``was_paused`` is false, nothing was changed."""

    was_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(Done):
    """A new run was started."""

    run_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Done):
    """A new run was started. A dry run returns no ``runNumber``, but the ``instances`` that would be retried."""

    run_number: int | None = None
    instances: Sequence[Child] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted(Done):
    """The step is completed. ``runNumber`` is the number of the run that continues."""

    run_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOrCreateResult(Response):
    """What happened, and the status of the instance."""

    outcome: Literal["created", "restarted", "unchanged"]
    id: str
    run_number: int
    details: InstanceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSent(Response):
    """The status of the instance. ``accepted`` is false if an event with this id was accepted before."""

    status: InstanceStatus
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted(Record):
    """The number of waits that received the payload."""

    resumed: int


# --- the serving process --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(Record):
    """The number of passes that a tick ran."""

    processed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy(Record):
    """The check succeeded."""

    status: Literal["ok"] = "ok"


# --- refusals -------------------------------------------------------------------------------------

STATUS = {
    "INVALID_REQUEST": 400,
    "INVALID_INSTANCE_ID": 400,
    "INVALID_EVENT_TYPE": 400,
    "INVALID_TOPIC": 400,
    "INVALID_LABEL": 400,
    "TOO_MANY_LABELS": 400,
    "INVALID_CURSOR": 400,
    "NAME_INVALID": 400,
    "INSTANT_INVALID": 400,
    "DURATION_INVALID": 400,
    "VALUE_REFUSED": 400,
    "NOT_SERIALIZABLE": 400,
    "WORKFLOW_PARAMS_INVALID": 400,
    "BATCH_TOO_LARGE": 400,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "OUT_OF_SCOPE": 403,
    "NOT_FOUND": 404,
    "WORKFLOW_NOT_FOUND": 404,
    "INSTANCE_NOT_FOUND": 404,
    "RUN_NOT_FOUND": 404,
    "STEP_NOT_FOUND": 404,
    "LIMIT_NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "CREATE_DISABLED": 409,
    "INSTANCE_ID_ALREADY_EXISTS": 409,
    "INSTANCE_TERMINAL": 409,
    "EMISSION_MISMATCH": 409,
    "INSTANCE_NOT_ERRORED": 409,
    "STEP_NOT_OPEN": 409,
    "ANSWER_TOO_LATE": 409,
    "ANSWER_UNCHECKED": 409,
    "PRECONDITION_FAILED": 412,
    "BODY_TOO_LARGE": 413,
    "PAYLOAD_TOO_LARGE": 413,
    "UNSUPPORTED_ENCODING": 415,
    "EVENT_REFUSED": 422,
    "TOO_MANY_STREAMS": 429,
    "INTERNAL_ERROR": 500,
    "HOOK_TIMEOUT": 503,
    "STORE_UNAVAILABLE": 503,
    "NOT_READY": 503,
}

ProblemCode = StrEnum("ProblemCode", {code: code for code in STATUS})  # type: ignore[misc]  # computed members
ProblemCode.__doc__ = "Why a request was refused."


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidField(Record):
    """A field of a request that is not valid, without its value."""

    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Record):
    """Why a request was refused (RFC 9457). ``code`` is stable; ``message``, for people, is the same as ``detail``."""

    title: str
    status: int
    detail: str
    code: ProblemCode | str
    message: str
    errors: Sequence[InvalidField] | None = None


def describe_refusal(error: DurableError) -> str:
    """Return the message of a refused request."""
    # The error lists the known workflows. A client may lack the permission to list them.
    return f"No workflow is registered as {error.name!r}." if isinstance(error, WorkflowNotFound) else str(error)
