"""Builds the API: `router` for a FastAPI application, `asgi` as an application of its own.

These are functions, not methods of `Durable`, because `Durable` does not import the HTTP packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from celery_durable.app import Durable
from celery_durable.commands import COMMANDS, INSTANCE, INSTANCES
from celery_durable.http import openapi, timeouts
from celery_durable.http.access import AccessControl, Authorize, Hook, make_guarded_route, requires
from celery_durable.http.changes import CommandRoutes, TopicRoutes
from celery_durable.http.followers import Followers
from celery_durable.http.limits import LimitRoutes
from celery_durable.http.problems import build_http_exception_response
from celery_durable.http.process import ProcessRoutes
from celery_durable.http.reading import ReadRoutes
from celery_durable.insight.explain import Diagnosis
from celery_durable.model import InstanceDetails, LimitDetails, Permission, Record, Stats
from celery_durable.wire.requests import CreateInstance
from celery_durable.wire.responses import (
    Done,
    Emitted,
    Healthy,
    HistoryResponse,
    InstanceList,
    LimitList,
    PublishedValues,
    Ticked,
    WaiterList,
    WaitList,
    WorkflowList,
)

_ENVELOPE_BYTES = 64 * 1024


def router(
    durable: Durable,
    *,
    authorize: Authorize | Hook | None = None,
    allow_anonymous: bool = False,
    security_schemes: Mapping[str, Mapping[str, Any]] | None = None,
    tick: bool = False,
    max_body_bytes: int | None = None,
    max_streams: int = 1000,
) -> APIRouter:
    """Return the routes, to include in a FastAPI application. Each route calls the hooks itself.

    Args:
        durable: Your `Durable`.
        authorize: An `Authorize`, or one hook for every request.
        allow_anonymous: Allows every request. Use it, without hooks, if only trusted clients can reach the API.
        security_schemes: OpenAPI security schemes by name. They are added to the OpenAPI description of your
            application, as alternatives. They authorize nothing: the hooks do.
        tick: Whether to add the route that runs workflows in this process.
        max_body_bytes: The largest body of a request. The default is the payload limit plus 64 KiB.
        max_streams: How many streams and long polls may be open at the same time in this process.

    Raises:
        NoAuthorization: There is no hook, and ``allow_anonymous`` is not set; or both are given.
    """

    def limit() -> int:
        return max_body_bytes or durable.internals.settings.max_payload_bytes + _ENVELOPE_BYTES

    access_control = AccessControl(authorize, allow_anonymous=allow_anonymous, max_body_bytes=limit)
    schemes = [Depends(openapi.DescribedScheme(name, about)) for name, about in (security_schemes or {}).items()]
    made = APIRouter(route_class=make_guarded_route(access_control), tags=["workflows"], dependencies=schemes)
    _add_reading(made, ReadRoutes(durable, Followers(max_streams)))
    _add_changes(made, CommandRoutes(durable, access_control))
    _add_topics(made, TopicRoutes(durable, access_control))
    _add_limits(made, LimitRoutes(durable, access_control))
    _add_running(made, ProcessRoutes(durable), with_tick=tick)
    return made


def asgi(
    durable: Durable, *, security_schemes: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
) -> FastAPI:
    """Return an ASGI application with the routes, to serve or to mount.

    ``/openapi.json`` returns its OpenAPI description. It requires the permission to read.

    Args:
        durable: Your `Durable`.
        security_schemes: OpenAPI security schemes by name. They are added to the description, as alternatives. They
            authorize nothing: the hooks do.
        **options: The other arguments of `router`.

    Raises:
        NoAuthorization: There is no hook, and ``allow_anonymous`` is not set; or both are given.
    """
    app = FastAPI(title=openapi.TITLE, version=openapi.VERSION, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _no_route)
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None and security_schemes:
            found = plain()
            found["components"]["securitySchemes"] = {name: dict(each) for name, each in security_schemes.items()}
            found["security"] = [{name: []} for name in security_schemes]
        return plain()

    app.openapi = described  # type: ignore[method-assign]  # FastAPI documents this way to extend the description

    routes = router(durable, **options)
    routes.add_api_route("/openapi.json", _describe, include_in_schema=False)
    # With include_router, FastAPI would build each of these routes a second time.
    app.router.routes.extend(routes.routes)
    return app


@requires(Permission.READING)
def _describe(request: Request) -> Response:
    """Return the description of this API. FastAPI keeps each endpoint for ever: one that knew an app would keep it."""
    return JSONResponse(request.app.openapi())


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return build_http_exception_response(error)


_RUN = ("INSTANCE_NOT_FOUND", "RUN_NOT_FOUND", "INVALID_CURSOR")
_BODY = ("BODY_TOO_LARGE", "UNSUPPORTED_ENCODING")
_LABELS = ("INVALID_LABEL", "TOO_MANY_LABELS")


def _add(
    made: APIRouter,
    where: str,
    endpoint: Callable[..., Any],
    model: type[Record] | None,
    codes: tuple[str, ...],
    *,
    status: int = 200,
    responses: dict[int | str, dict[str, Any]] | None = None,
    response_class: type[Response] = JSONResponse,
) -> None:
    """Add a route. ``where``: method and path. ``codes``: the problem codes that only some routes return."""
    method, path = where.split()
    made.add_api_route(
        path,
        endpoint if inspect.iscoroutinefunction(endpoint) else timeouts.in_request_thread(endpoint),
        methods=[method],
        status_code=status,
        response_model=model,
        response_class=response_class,
        responses={**openapi.example(status, model), **(responses or {}), **openapi.errors(*codes)},
        operation_id=openapi.operation_id(endpoint.__name__),
        summary=openapi.summary(endpoint),
        description=openapi.description(endpoint),
    )


def _add_reading(made: APIRouter, to: ReadRoutes) -> None:
    _add(made, "GET /workflows", to.list_workflows, WorkflowList, ())
    listed = ("WORKFLOW_NOT_FOUND", "INVALID_CURSOR", *_LABELS)
    _add(made, f"GET {INSTANCES}", to.list_instances, InstanceList, listed)
    _add(made, "GET /instances", to.list_all_instances, InstanceList, ("INVALID_CURSOR", *_LABELS))
    _add(made, "GET /stats", to.stats, Stats, ())
    _add(made, "GET /waits", to.waits, WaitList, ("INVALID_CURSOR",))
    one = ("INSTANCE_NOT_FOUND", "TOO_MANY_STREAMS")
    _add(made, f"GET {INSTANCE}", to.get, InstanceDetails, one, responses=openapi.NOT_MODIFIED)
    _add(made, f"GET {INSTANCE}/explain", to.explain, Diagnosis, ("INSTANCE_NOT_FOUND",))
    _add(made, f"GET {INSTANCE}/history", to.history, HistoryResponse, _RUN)
    _add(made, f"GET {INSTANCE}/published", to.published, PublishedValues, ("INSTANCE_NOT_FOUND", "RUN_NOT_FOUND"))
    _add(
        made,
        f"GET {INSTANCE}/stream",
        to.stream,
        None,
        (*_RUN, "TOO_MANY_STREAMS"),
        responses=openapi.STREAM,
        response_class=Response,
    )


def _add_changes(made: APIRouter, to: CommandRoutes) -> None:
    for each in COMMANDS.values():
        existing = openapi.EXISTING if each.request is CreateInstance else None
        where, status = f"POST {each.path}", each.response.http_status
        _add(made, where, to.endpoint(each), each.response, each.codes, status=status, responses=existing)


def _add_topics(made: APIRouter, to: TopicRoutes) -> None:
    codes = ("INVALID_TOPIC", "NAME_INVALID", "NOT_SERIALIZABLE", "PAYLOAD_TOO_LARGE", "EMISSION_MISMATCH", *_BODY)
    _add(made, "POST /topics/{topic:path}/emit", to.emit, Emitted, codes)
    _add(made, "GET /topics/{topic:path}/waiters", to.waiters, WaiterList, ("INVALID_TOPIC", "INVALID_CURSOR"))


def _add_limits(made: APIRouter, to: LimitRoutes) -> None:
    _add(made, "GET /limits", to.list_limits, LimitList, ("INVALID_CURSOR",))
    _add(made, "GET /limits/{limitName}", to.get_limit, LimitDetails, ("LIMIT_NOT_FOUND",))
    refused = ("LIMIT_NOT_FOUND", "NAME_INVALID", "VALUE_REFUSED", *_BODY)
    _add(made, "PATCH /limits/{limitName}", to.change_limit, Done, refused)


def _add_running(made: APIRouter, to: ProcessRoutes, *, with_tick: bool) -> None:
    if with_tick:
        _add(made, "POST /_runner/tick", to.tick, Ticked, _BODY)
    _add(made, "GET /healthz", to.healthz, Healthy, ())
    _add(made, "GET /readyz", to.readyz, Healthy, ("NOT_READY",))
