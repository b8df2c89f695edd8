"""Parts of the OpenAPI description that FastAPI does not derive from the signatures of the endpoints."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Header, Path
from fastapi.security.base import SecurityBase
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from celery_durable.http.problems import MEDIA_TYPE
from celery_durable.insight.explain import Code, Diagnosis
from celery_durable.model import (
    Count,
    DueRuns,
    EventWait,
    HoldState,
    InstanceDetails,
    InstanceMeta,
    InstanceStatus,
    InstanceSummary,
    LimitDetails,
    LimitHold,
    LimitRecord,
    Published,
    QueueLength,
    Record,
    Stats,
    Status,
    StatusCount,
    StepRecord,
    StepStatus,
    StepType,
    Waiter,
)
from celery_durable.values import Parameter
from celery_durable.wire.encoding import to_data
from celery_durable.wire.responses import (
    STATUS,
    Done,
    Emitted,
    EventSent,
    Healthy,
    HistoryResponse,
    InstanceBatch,
    InstanceItem,
    InstanceList,
    LimitList,
    Problem,
    PublishedValues,
    Restarted,
    RestartOrCreateResult,
    Resumed,
    Retried,
    StepCompleted,
    Ticked,
    WaiterList,
    WaitList,
    Woken,
    WorkflowList,
    WorkflowParameters,
)

TITLE = "celery_durable"
VERSION = "1"
NOTHING: Any = None
"""For a route without a response model, whose response is described by hand."""

NAME = {"pattern": "^[a-zA-Z0-9_][a-zA-Z0-9_-]*$", "minLength": 1, "maxLength": 255}
"""The pattern of names and ids. FastAPI does not check it: the operations refuse invalid names with their own codes."""
TOPIC = {"pattern": "^[a-zA-Z0-9_][a-zA-Z0-9_.:/-]*$", "minLength": 1, "maxLength": 100}
WorkflowName = Annotated[
    str,
    Path(alias="workflowName", description="The workflow's name.", examples=["order"], json_schema_extra=dict(NAME)),
]
InstanceId = Annotated[
    str,
    Path(alias="instanceId", description="The instance's id.", examples=["order-42"], json_schema_extra=dict(NAME)),
]
IfNoneMatch = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        description="An ETag from an earlier response. If it is still current, the response is 304.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag of the version to change. If the instance has another version now, the response is 412.",
    ),
]

_REFERENCE = {"$ref": "#/components/schemas/Problem"}
_EVERYWHERE = ("INVALID_REQUEST", "UNAUTHENTICATED", "FORBIDDEN", "HOOK_TIMEOUT", "STORE_UNAVAILABLE")


def errors(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of a route's problem responses, including those that every route has."""
    by_status: dict[int, list[str]] = {}
    for code in (*_EVERYWHERE, *codes):
        by_status.setdefault(STATUS[code], []).append(code)
    described: dict[int | str, dict[str, Any]] = {
        status: {
            "description": ", ".join(f"`{code}`" for code in found),
            "content": {MEDIA_TYPE: {"schema": _REFERENCE}},
        }
        for status, found in sorted(by_status.items())
    }
    # The model adds the schema `Problem` to the description of an application that includes the router.
    content = {MEDIA_TYPE: {"schema": _REFERENCE}}
    return described | {"default": {"model": Problem, "description": "Any other error.", "content": content}}


def example(status: int, model: type[Record] | None) -> dict[int | str, dict[str, Any]]:
    """Return the example of a route's response. A route without a model has none."""
    found = _EXAMPLES.get(model)
    return {} if found is None else {status: {"content": {"application/json": {"example": found}}}}


_WHEN = datetime(2030, 1, 1, 8, tzinfo=UTC)
_STEP = StepRecord(
    step_key="wait for approval",
    name="wait for approval",
    type=StepType.WAIT,
    status=StepStatus.WAITING,
    attempts=0,
    wake_at=_WHEN + timedelta(days=1),
    wait_event_type="approval",
    created_at=_WHEN,
)
_LABELS = {"tenant": "acme"}
_ACTIVE, _WAITING = InstanceStatus(Status.ACTIVE), InstanceStatus(Status.WAITING)
_CREATED = InstanceItem(id="order-42", details=_ACTIVE)
_RUN: dict[str, Any] = {"workflow": "order", "instance_id": "order-42", "run_number": 1}
_LIMIT = LimitRecord(
    name="stripe",
    key="",
    at_once=20,
    rate="90 per second",
    set_by=None,
    held=20,
    waiting=Count(1204),
    longest_wait=timedelta(minutes=2),
)
_HOLD = LimitHold(
    **_RUN, key="", step_key="charge card", position=None, state=HoldState.HELD, fair_key="acme", since=_WHEN
)
_EXAMPLES: dict[type[Record] | None, dict[str, Any]] = {
    type(each): to_data(each)
    for each in (
        WorkflowList(
            workflows=[WorkflowParameters(name="order", parameters=[Parameter("orderId", "str", required=True)])]
        ),
        InstanceList(
            instances=[
                InstanceSummary(
                    id="order-42",
                    workflow="order",
                    run_number=1,
                    details=_WAITING,
                    created_at=_WHEN,
                    updated_at=_WHEN,
                    labels=_LABELS,
                )
            ],
            has_next_page=False,
        ),
        InstanceDetails(
            id="order-42",
            details=_WAITING,
            meta=InstanceMeta(
                workflow="order",
                run_number=1,
                params={"orderId": "42", "cents": 1999},
                labels=_LABELS,
                created_at=_WHEN,
                updated_at=_WHEN,
                started_at=_WHEN,
                pause_requested=False,
                current_step=_STEP,
            ),
        ),
        Diagnosis(
            Code.WAITING_EVENT,
            'Waits at step "wait for approval" for an event "approval".',
            {"status": "waiting"},
            ("celery -A <your app> durable send-event order order-42 approval",),
        ),
        HistoryResponse(run_number=1, steps=[_STEP], events=(), steps_has_next_page=False, events_has_next_page=False),
        PublishedValues(run_number=1, published={"progress": Published({"done": 3, "total": 10}, updated_at=_WHEN)}),
        Stats(
            [StatusCount(3, workflow="order", status=Status.WAITING)],
            DueRuns(1, oldest=_WHEN),
            [QueueLength("durable", 1)],
        ),
        WaitList(
            waits=[
                EventWait(
                    **_RUN,
                    status=Status.WAITING,
                    wait_event_type="approval",
                    step_name="wait for approval",
                    step_key="wait for approval",
                    since=_WHEN,
                    wake_at=_STEP.wake_at,
                    ask="Ship order 42 for 19.99 EUR?",
                    to="finance",
                    schema={
                        "type": "object",
                        "properties": {"approved": {"type": "boolean"}},
                        "required": ["approved"],
                    },
                )
            ],
            has_next_page=False,
        ),
        WaiterList(
            waiters=[
                Waiter(
                    **_RUN,
                    step="wait for the price",
                    topic="prices",
                    opened_at=_WHEN,
                    deadline=_WHEN + timedelta(days=1),
                )
            ],
            has_next_page=False,
        ),
        LimitList(limits=[_LIMIT], has_next_page=False),
        LimitDetails(limit=_LIMIT, holders=(_HOLD,), waiting=(replace(_HOLD, state=HoldState.WAITING),)),
        _CREATED,
        InstanceBatch(instances=[_CREATED]),
        Done(),
        Woken(woken=True),
        Resumed(was_paused=True),
        Restarted(run_number=2),
        Retried(run_number=2),
        StepCompleted(run_number=1),
        RestartOrCreateResult(outcome="restarted", id="order-42", run_number=2, details=_ACTIVE),
        EventSent(status=_ACTIVE, accepted=True),
        Emitted(resumed=3),
        Ticked(processed=3),
        Healthy(),
    )
}

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "The instance has not changed."}}
EXISTING: dict[int | str, dict[str, Any]] = {
    200: {"model": InstanceItem, "description": "The instance that exists (`ifExists`)."}
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Messages `step`, `log`, `published`, `status` and, last, `end`; their data is JSON.",
        "content": {
            "text/event-stream": {
                "example": 'id: t0jS2hXqZ3o5nS8q1m0hYw9dKc2TzA\nevent: status\ndata: {"status":"waiting"}\n\n',
            }
        },
    },
    204: {"description": "The run has ended, and the client has received everything. It must not reconnect."},
}


class DescribedScheme(SecurityBase):
    """A security scheme that appears in the description. It checks nothing: the hooks do."""

    def __init__(self, name: str, about: Mapping[str, Any]) -> None:
        self.scheme_name, self.model = name, dict(about)  # type: ignore[assignment]  # it is only serialized as JSON

    async def __call__(self) -> None:
        """Do nothing: FastAPI calls it as a dependency of the request."""


class EventStream(StreamingResponse):
    """A response of server-sent events. It calls ``on_end`` once, even if the response is never sent."""

    media_type = "text/event-stream"

    def __init__(self, messages: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(messages, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._end = weakref.finalize(self, on_end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def operation_id(name: str) -> str:
    """Return the operation id of an endpoint. The prefix keeps it unique in an application that includes the router."""
    head, *rest = name.split("_")
    return "durable" + head.title() + "".join(word.title() for word in rest)


def summary(endpoint: Callable[..., Any]) -> str:
    """Return the summary of an endpoint: the first line of its docstring."""
    return _doc(endpoint).partition("\n")[0].rstrip(".")


def description(endpoint: Callable[..., Any]) -> str:
    """Return the description of an endpoint: the rest of its docstring."""
    return _doc(endpoint).partition("\n")[2].strip()


def _doc(endpoint: Callable[..., Any]) -> str:
    return inspect.getdoc(endpoint) or ""
