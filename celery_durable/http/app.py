"""Putting the API together: a router for an application that has one, and an application for everybody else.

`Durable` lies on a lower floor and knows nothing of HTTP, hence functions: ``router(durable, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from celery_durable.app import Durable
from celery_durable.http import openapi, topics, wire
from celery_durable.http.access import Authorize, Gate, Hook, Right, guarded, needs
from celery_durable.http.instances import Instances
from celery_durable.http.problems import of_http_exception
from celery_durable.http.reading import Reading
from celery_durable.http.running import Running
from celery_durable.http.view import Redact

_ENVELOPE_BYTES = 64 * 1024
_MANY = "/workflows/{workflowName}/instances"
_ONE = f"{_MANY}/{{instanceId}}"


def router(
    durable: Durable,
    *,
    authorize: Authorize | Hook | None = None,
    allow_anonymous: bool = False,
    redact: Redact | None = None,
    tick: bool = False,
    max_body_bytes: int | None = None,
) -> APIRouter:
    """The routes, to include in a FastAPI application; each guards itself. Raises NoAuthorization.

    ``authorize``: an `Authorize`, or one hook for every request. ``redact``: see `Redact`. ``tick``: also the route
    that runs workflows in this process. ``max_body_bytes``: of a request, by default a payload's limit and 64 KiB.
    """

    def limit() -> int:
        return max_body_bytes or durable.settings.max_payload_bytes + _ENVELOPE_BYTES

    gate = Gate(authorize, allow_anonymous=allow_anonymous, max_body_bytes=limit)
    made = APIRouter(route_class=guarded(gate), tags=["workflows"])
    _add_reading(made, Reading(durable, redact))
    _add_changes(made, Instances(durable, gate))
    _add_topics(made, topics.Topics(durable, gate))
    _add_running(made, Running(durable), with_tick=tick)
    return made


def asgi(durable: Durable, **options: Any) -> FastAPI:
    """An ASGI application with the routes, to serve or to mount; ``options`` as `router`. Raises NoAuthorization.

    Its description, ``/openapi.json``, is for who may read.
    """
    app = FastAPI(title=openapi.TITLE, version=openapi.VERSION, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _no_route)
    routes = router(durable, **options)

    @needs(Right.READING)
    def describe() -> Response:
        """The description of this API."""
        return JSONResponse(app.openapi())

    routes.add_api_route("/openapi.json", describe, include_in_schema=False)
    app.include_router(routes)
    return app


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return of_http_exception(error)


_RUN = ("INSTANCE_NOT_FOUND", "RUN_NOT_FOUND", "INVALID_CURSOR")
_BODY = ("BODY_TOO_LARGE",)
_LABELS = ("INVALID_LABEL", "TOO_MANY_LABELS")
_CHANGE = ("INSTANCE_NOT_FOUND", "PRECONDITION_FAILED", *_BODY)
_NEW = (
    "WORKFLOW_NOT_FOUND", "INVALID_INSTANCE_ID", "NOT_SERIALIZABLE", "WORKFLOW_PARAMS_INVALID", "PAYLOAD_TOO_LARGE",
    *_LABELS, *_BODY,
)  # fmt: skip
_EVENT = ("INSTANCE_TERMINAL", "INVALID_EVENT_TYPE", "NAME_INVALID", "NOT_SERIALIZABLE", "PAYLOAD_TOO_LARGE", *_CHANGE)


def _add(
    made: APIRouter,
    where: str,
    endpoint: Callable[..., Any],
    model: Any,
    codes: tuple[str, ...],
    *,
    status: int = 200,
    responses: dict[int | str, dict[str, Any]] | None = None,
    response_class: type[Response] = JSONResponse,
) -> None:
    """``where``: method and path. ``codes``: of refusals that not every route knows."""
    method, path = where.split()
    made.add_api_route(
        path,
        endpoint,
        methods=[method],
        status_code=status,
        response_model=model,
        response_class=response_class,
        responses={**(responses or {}), **openapi.errors(*codes)},
        operation_id=openapi.operation_id(endpoint.__name__),
        summary=openapi.summary(endpoint),
        description=openapi.description(endpoint),
    )


def _add_reading(made: APIRouter, to: Reading) -> None:
    _add(made, "GET /workflows", to.list_workflows, wire.WorkflowList, ())
    listed = ("WORKFLOW_NOT_FOUND", "INVALID_CURSOR", *_LABELS)
    _add(made, f"GET {_MANY}", to.list_instances, wire.InstanceList, listed)
    _add(made, f"GET {_ONE}", to.get, wire.InstanceView, ("INSTANCE_NOT_FOUND",), responses=openapi.NOT_MODIFIED)
    _add(made, f"GET {_ONE}/explain", to.explain, wire.Explanation, ("INSTANCE_NOT_FOUND",))
    _add(made, f"GET {_ONE}/history", to.history, wire.HistoryView, _RUN)
    _add(made, f"GET {_ONE}/published", to.published, wire.PublishedValues, ("INSTANCE_NOT_FOUND", "RUN_NOT_FOUND"))
    _add(made, f"GET {_ONE}/stream", to.stream, None, _RUN, responses=openapi.STREAM, response_class=Response)


def _add_changes(made: APIRouter, to: Instances) -> None:
    taken = (*_NEW, "INSTANCE_ID_ALREADY_EXISTS")
    _add(made, f"POST {_MANY}", to.create, wire.InstanceItem, taken, status=201, responses=openapi.EXISTING)
    _add(made, f"POST {_MANY}/batch", to.create_batch, wire.InstanceBatch, (*_NEW, "BATCH_TOO_LARGE"))
    _add(made, f"POST {_ONE}/pause", to.pause, wire.Done, (*_CHANGE, "INSTANCE_TERMINAL"))
    _add(made, f"POST {_ONE}/resume", to.resume, wire.Done, _CHANGE)
    _add(made, f"POST {_ONE}/terminate", to.terminate, wire.Done, (*_CHANGE, "INSTANCE_TERMINAL"))
    _add(made, f"POST {_ONE}/restart", to.restart, wire.Restarted, _CHANGE)
    _add(made, f"POST {_ONE}/retry", to.retry, wire.Restarted, (*_CHANGE, "INSTANCE_NOT_ERRORED"))
    _add(made, f"POST {_ONE}/rewind", to.rewind, wire.Restarted, (*_CHANGE, "STEP_NOT_FOUND"))
    forked = ("INSTANCE_NOT_FOUND", "STEP_NOT_FOUND", "INVALID_INSTANCE_ID", "INSTANCE_ID_ALREADY_EXISTS", *_BODY)
    _add(made, f"POST {_ONE}/fork", to.fork, wire.InstanceItem, forked, status=201)
    settled = (*_CHANGE, "STEP_NOT_FOUND", "STEP_NOT_OPEN", "INSTANCE_TERMINAL", "NAME_INVALID", "VALUE_REFUSED")
    valued = (*settled, "NOT_SERIALIZABLE", "PAYLOAD_TOO_LARGE")
    _add(made, f"POST {_ONE}/set-result", to.set_result, wire.Settled, valued)
    _add(made, f"POST {_ONE}/skip", to.skip, wire.Settled, settled)
    _add(made, f"POST {_ONE}/restart-or-create", to.restart_or_create, wire.Begun, (*_NEW, "PRECONDITION_FAILED"))
    _add(made, f"POST {_ONE}/events", to.send_event, wire.EventSent, _EVENT)


def _add_topics(made: APIRouter, to: topics.Topics) -> None:
    codes = ("INVALID_TOPIC", "NAME_INVALID", "NOT_SERIALIZABLE", "PAYLOAD_TOO_LARGE", "EMISSION_MISMATCH", *_BODY)
    _add(made, "POST /topics/{topic:path}/emit", to.emit, topics.Emitted, codes)
    _add(made, "GET /topics/{topic:path}/waiters", to.waiters, topics.WaiterList, ("INVALID_TOPIC", "INVALID_CURSOR"))


def _add_running(made: APIRouter, to: Running, *, with_tick: bool) -> None:
    if with_tick:
        _add(made, "POST /_runner/tick", to.tick, wire.Ticked, _BODY)
    _add(made, "GET /healthz", to.healthz, wire.Healthy, ())
    _add(made, "GET /readyz", to.readyz, wire.Healthy, ("NOT_READY",))
