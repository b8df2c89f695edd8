"""What the API says of itself in its OpenAPI description, beside what the endpoints' signatures say."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

from fastapi import Header, Path
from fastapi.security.base import SecurityBase
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from celery_durable.http.codes import STATUS
from celery_durable.http.problems import MEDIA_TYPE
from celery_durable.http.responses import InstanceItem, Problem

TITLE = "celery_durable"
VERSION = "1"
NOTHING: Any = None
"""No model: the answer is described by hand."""

NAME = {"pattern": "^[a-zA-Z0-9_][a-zA-Z0-9_-]*$", "minLength": 1, "maxLength": 255}
"""Of names and ids. Described only: what does not fit is refused with the code that says so, or is not found."""
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
    str | None, Header(alias="If-None-Match", description="The ETag that the client knows: answered with 304.")
]
IfMatch = Annotated[
    str | None,
    Header(alias="If-Match", description="The ETag that the change is meant for: 412 where it is another."),
]

_REFERENCE = {"$ref": "#/components/schemas/Problem"}
_EVERYWHERE = ("INVALID_REQUEST", "UNAUTHENTICATED", "FORBIDDEN", "HOOK_TIMEOUT", "STORE_UNAVAILABLE")


def errors(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route, those that all have included."""
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
    # With its model, which brings the schema into the description of an application that includes the router.
    content = {MEDIA_TYPE: {"schema": _REFERENCE}}
    return described | {"default": {"model": Problem, "description": "Any other refusal.", "content": content}}


NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It has not changed."}}
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
    204: {"description": "The run has ended, and the client has been told: do not come again."},
}


class DescribedScheme(SecurityBase):
    """A security scheme that is described with the routes, and decides nothing: hooks do."""

    def __init__(self, name: str, about: Mapping[str, Any]) -> None:
        self.scheme_name, self.model = name, dict(about)  # type: ignore[assignment]  # it is only written out as JSON

    async def __call__(self) -> None:
        """Let the request go on."""


class EventStream(StreamingResponse):
    """Messages for browsers' EventSource. ``on_end``: called once, also where the response is never sent."""

    media_type = "text/event-stream"

    def __init__(self, messages: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(messages, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._end = weakref.finalize(self, on_end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def operation_id(name: str) -> str:
    """Unique also in the description of an application that includes the router."""
    head, *rest = name.split("_")
    return "durable" + head.title() + "".join(word.title() for word in rest)


def summary(endpoint: Callable[..., Any]) -> str:
    """The first line of its docstring."""
    return _doc(endpoint).partition("\n")[0].rstrip(".")


def description(endpoint: Callable[..., Any]) -> str:
    """The rest."""
    return _doc(endpoint).partition("\n")[2].strip()


def _doc(endpoint: Callable[..., Any]) -> str:
    return inspect.getdoc(endpoint) or ""
