"""The application: its routes, its files, and the pages of errors outside of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from celery_durable.app import Durable
from celery_durable.commands import INSTANCE
from celery_durable.dashboard import actions, attention, instance, instances, waits
from celery_durable.dashboard.rendering import STATIC_FILES, serve_static
from celery_durable.dashboard.visits import Endpoint, Site, make_error_page
from celery_durable.http import Authorize, Hook


def dashboard(
    durable: Durable,
    *,
    authorize: Authorize | Hook | None = None,
    allow_anonymous: bool = False,
    read_only: bool = False,
) -> Starlette:
    """Return the pages as an ASGI application, to serve or to mount.

    Args:
        durable: Your `Durable`.
        authorize: The hooks, as for `celery_durable.http.asgi`: the same object serves both.
        allow_anonymous: Allows every request. Use it, without hooks, if only trusted people can reach the pages.
        read_only: Refuses every change, and shows no buttons.

    Raises:
        NoAuthorization: There is no hook, and ``allow_anonymous`` is not set; or both are given.
    """
    return make_pages(Site(durable, authorize, allow_anonymous=allow_anonymous, is_read_only=read_only))


def make_pages(site: Site) -> Starlette:
    """Return the application of a site."""

    def route(path: str, *endpoints: Endpoint) -> Route:
        return Route(path, site.serve(*endpoints), methods=[each.method for each in endpoints])

    async def refuse(request: Request, error: Exception) -> Response:
        return make_error_page(site, request, error)

    return Starlette(
        routes=[
            route("/", attention.SHOW),
            route("/instances", instances.SHOW),
            route("/instances/change", instances.PREVIEW, instances.CHANGE),
            route("/waits", waits.SHOW),
            route(INSTANCE, instance.SHOW),
            route(f"{INSTANCE}/answer", waits.ASK, waits.ANSWER),
            route(f"{INSTANCE}/stream", instance.STREAM),
            route(f"{INSTANCE}/{{command}}", actions.ASK, actions.CHANGE),
            Route(f"/{STATIC_FILES}/{{version}}/{{name}}", serve_static),
        ],
        exception_handlers={HTTPException: refuse},
    )
