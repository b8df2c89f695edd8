"""What the API says of itself in its OpenAPI description, beside what the endpoints' signatures say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Header, Path
from starlette.responses import StreamingResponse

from celery_durable.http.problems import MEDIA_TYPE
from celery_durable.http.wire import InstanceItem, Problem

TITLE = "celery_durable"
VERSION = "1"
NOTHING: Any = None
"""No model: the answer is described by hand."""

WorkflowName = Annotated[str, Path(alias="workflowName", description="The workflow's name.", examples=["order"])]
InstanceId = Annotated[str, Path(alias="instanceId", description="The instance's id.", examples=["order-42"])]
IfNoneMatch = Annotated[
    str | None, Header(alias="If-None-Match", description="The ETag that the client knows: answered with 304.")
]
IfMatch = Annotated[
    str | None,
    Header(alias="If-Match", description="The ETag that the change is meant for: 412 where it is another."),
]

_REFERENCE = {"$ref": "#/components/schemas/Problem"}
_STATUS = {
    "INVALID_REQUEST": 400,
    "INVALID_INSTANCE_ID": 400,
    "INVALID_EVENT_TYPE": 400,
    "INVALID_TOPIC": 400,
    "INVALID_LABEL": 400,
    "TOO_MANY_LABELS": 400,
    "INVALID_CURSOR": 400,
    "NAME_INVALID": 400,
    "VALUE_REFUSED": 400,
    "NOT_SERIALIZABLE": 400,
    "WORKFLOW_PARAMS_INVALID": 400,
    "BATCH_TOO_LARGE": 400,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "WORKFLOW_NOT_FOUND": 404,
    "INSTANCE_NOT_FOUND": 404,
    "RUN_NOT_FOUND": 404,
    "STEP_NOT_FOUND": 404,
    "INSTANCE_ID_ALREADY_EXISTS": 409,
    "INSTANCE_TERMINAL": 409,
    "EMISSION_MISMATCH": 409,
    "INSTANCE_NOT_ERRORED": 409,
    "STEP_NOT_OPEN": 409,
    "PRECONDITION_FAILED": 412,
    "BODY_TOO_LARGE": 413,
    "PAYLOAD_TOO_LARGE": 413,
    "STORE_UNAVAILABLE": 503,
    "NOT_READY": 503,
}
_EVERYWHERE = ("INVALID_REQUEST", "UNAUTHENTICATED", "FORBIDDEN", "STORE_UNAVAILABLE")


def errors(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route, those that all have included."""
    by_status: dict[int, list[str]] = {}
    for code in (*_EVERYWHERE, *codes):
        by_status.setdefault(_STATUS[code], []).append(code)
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
                "example": 'id: WyJzdHJlYW0iLDEsMCwwLCIiLDBd\nevent: status\ndata: {"status":"waiting"}\n\n',
            }
        },
    },
    204: {"description": "The run has ended, and the client has been told: do not come again."},
}


class EventStream(StreamingResponse):
    """Messages for browsers' EventSource."""

    media_type = "text/event-stream"


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
