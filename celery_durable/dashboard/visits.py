"""One request of a page: who may make it, that the browser meant it, and what the page may offer.

The hooks of the HTTP API decide, with the names of its operations. A change must come from a form of these pages: from
the same origin, with the token of the visitor's cookie.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hmac import compare_digest
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from celery_durable.all_operations import Operations
from celery_durable.app import Durable
from celery_durable.commands import COMMANDS
from celery_durable.dashboard.checkups import Checkups
from celery_durable.dashboard.rendering import render
from celery_durable.dashboard.surveys import Surveys
from celery_durable.errors import DurableError
from celery_durable.http import Access, Authorize, Hook, timeouts
from celery_durable.http.access import AccessControl, restrict_to_request_scope
from celery_durable.http.changes import CommandRoutes
from celery_durable.http.followers import Followers
from celery_durable.http.problems import build_error_response
from celery_durable.http.reading import ReadRoutes
from celery_durable.insight.explain import YOUR_APP
from celery_durable.model import Permission
from celery_durable.redaction import Redaction
from celery_durable.store.instances.instances import read_clock

_COOKIE = "durable_form"
_TOKEN = re.compile("[0-9a-f]{32}")
_ENVELOPE_BYTES = 64 * 1024
_MAX_STREAMS = 1000
BUFFERED = "celery_durable.buffered"
"""Set in the scope by servers that send a response only after its end."""


class ForeignRequest(DurableError):
    """The request for a change did not come from a form of these pages."""

    code, http_status = "FOREIGN_REQUEST", 403

    def __init__(self) -> None:
        super().__init__("This change was not sent by a form of this page. Reload the page, and send it again.")


class ReadOnly(DurableError):
    """The dashboard was made with ``read_only=True``."""

    code, http_status = "READ_ONLY", 403

    def __init__(self) -> None:
        super().__init__("This dashboard only reads. Use the command line, or a dashboard that may make changes.")


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that the hooks have allowed. ``offers``: the commands for which the page may show buttons."""

    site: Site
    request: Request
    token: str
    offers: frozenset[str] = frozenset()
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def operations(self) -> Operations:
        """The operations, in the scope that the hooks allow."""
        return restrict_to_request_scope(self.site.durable.internals.operations)

    @property
    def query(self) -> Mapping[str, str]:
        """The query of the address."""
        return self.request.query_params

    @property
    def is_read_only(self) -> bool:
        """Whether no change is possible here."""
        return self.site.is_read_only

    @property
    def can_stream(self) -> bool:
        """Whether the server sends a response while it is made."""
        return not self.request.scope.get(BUFFERED, False)

    @property
    def address(self) -> str:
        """The path and the query of this page."""
        return self.request.url.path + (f"?{self.request.url.query}" if self.request.url.query else "")

    @property
    def pages(self) -> Sequence[tuple[str, str]]:
        """The pages of the menu, with their paths."""
        return [("Attention", self.path()), ("Instances", self.path("instances")), ("Waits", self.path("waits"))]

    def redaction(self, workflow: str, instance_id: str) -> Redaction:
        """Return what applies the ``redact`` function to the records of one instance."""
        return self.site.durable.internals.redaction(workflow, instance_id)

    def now(self) -> datetime:
        """Return the time of the database, whose clock wrote all stored times."""
        return self.site.durable.internals.store.read(read_clock)

    def path(self, *words: str, **query: str) -> str:
        """Return the path of a page, below the place where the dashboard is mounted."""
        where = "/".join(quote(word, safe="") for word in words)
        given = {name: value for name, value in query.items() if value}
        return f"{_find_root(self.request)}/{where}" + (f"?{urlencode(given)}" if given else "")

    def instance_path(self, workflow: str, instance_id: str, *words: str, **query: str) -> str:
        """Return the path of the page of an instance, or of one of its forms."""
        return self.path("workflows", workflow, "instances", instance_id, *words, **query)

    def command_line(self, text: str) -> str:
        """Return a command as the people of this application type it."""
        app = self.site.durable.internals.celery_app
        return text.replace(YOUR_APP, YOUR_APP if app is None else app.main or YOUR_APP)

    async def admit(self, command: str, workflow: str, instance_id: str) -> None:
        """Return if the hooks allow this command on this instance. Otherwise raises the error of the API."""
        await self.site.access_control.admit(
            Access(COMMANDS[command].permission, command, workflow, instance_id, self.request)
        )

    async def find_actor(self, command: str, workflow: str | None = None, instance_id: str | None = None) -> str | None:
        """Return the name of the user from the actor hook, or None."""
        access = Access(COMMANDS[command].permission, command, workflow, instance_id, self.request)
        return await self.site.access_control.actor(access)

    def show(self, template: str, *, status: int = 200, **context: Any) -> Response:
        """Return a page."""
        response = render(template, {"visit": self, **context}, status=status)
        if self.request.cookies.get(_COOKIE) != self.token:
            is_secure, root = self.request.url.scheme == "https", _find_root(self.request)
            response.set_cookie(_COOKIE, self.token, path=root or "/", secure=is_secure, httponly=True, samesite="lax")
        return response

    def redirect(self, path: str) -> Response:
        """Return a redirect; after a change, so that a reload does not repeat it."""
        return RedirectResponse(path, 303)


def _find_root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/")


Show = Callable[[Visit], Response | Awaitable[Response]]
"""Makes the response to a visit. Functions that are not ``async`` run on a request thread."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one method of a path does. ``operation``: as the HTTP API names it, for the hooks.

    ``offers``: the commands that the page may offer. ``find_workflow``: returns the workflow that a request concerns,
    if its path does not name one.
    """

    show: Show
    operation: str | Callable[[Request], str]
    method: str = "GET"
    permission: Permission | Callable[[Request], Permission] = Permission.READING
    offers: Sequence[str] = ()
    find_workflow: Callable[[Request], str | None] = lambda _: None


class Site:
    """The dashboard of one Durable: its hooks, and whether it may make changes and knows the broker."""

    def __init__(
        self,
        durable: Durable,
        authorize: Authorize | Hook | None,
        *,
        allow_anonymous: bool,
        is_read_only: bool,
        has_broker: bool = True,
    ) -> None:
        self.durable, self.is_read_only = durable, is_read_only
        self.checkups, self.surveys = Checkups(durable, has_broker=has_broker), Surveys(durable)
        self.reading = ReadRoutes(durable, Followers(_MAX_STREAMS))
        self.access_control = AccessControl(
            authorize, allow_anonymous=allow_anonymous, max_body_bytes=self._max_body_bytes
        )
        self.commands = CommandRoutes(durable, self.access_control)

    def _max_body_bytes(self) -> int:
        return self.durable.internals.settings.max_payload_bytes + _ENVELOPE_BYTES

    def serve(self, *endpoints: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return the function that serves a path, for a route."""
        by_method = {each.method: each for each in endpoints}

        async def serve(request: Request) -> Response:
            endpoint = by_method["GET" if request.method == "HEAD" else request.method]
            return await self._serve(endpoint, request)

        return serve

    async def _serve(self, endpoint: Endpoint, request: Request) -> Response:
        if (workflow := endpoint.find_workflow(request)) is not None:
            request.path_params["workflowName"] = workflow
        operation, permission = endpoint.operation, endpoint.permission

        async def respond(limited: Request) -> Response:
            return await self._respond(endpoint, limited)

        return await self.access_control.serve(
            request,
            permission if isinstance(permission, Permission) else permission(request),
            operation if isinstance(operation, str) else operation(request),
            respond,
            refuse=lambda error: make_error_page(self, request, error),
        )

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        form: Mapping[str, str] = {}
        if endpoint.method == "POST":
            if self.is_read_only:
                raise ReadOnly
            form = dict(parse_qsl((await request.body()).decode("utf-8", "replace"), keep_blank_values=True))
            _check_origin(request, form.get("token", ""))
        offers = frozenset[str]()
        if endpoint.offers and not self.is_read_only:
            offers = await self._find_offers(endpoint.offers, request)
        visit = Visit(self, request, _find_token(request) or self._new_token(), offers, form)
        if inspect.iscoroutinefunction(endpoint.show):
            made: Response = await endpoint.show(visit)
            return made
        return await timeouts.run_in_request_thread(endpoint.show, visit)  # type: ignore[arg-type]

    def _new_token(self) -> str:
        return self.durable.internals.runtime.new_secret()

    async def _find_offers(self, commands: Sequence[str], request: Request) -> frozenset[str]:
        """Return those of the commands that the hooks would allow. The hooks are asked again when one is sent."""
        params = request.path_params
        where = params.get("workflowName"), params.get("instanceId")
        return frozenset(
            [
                command
                for command in commands
                if await self.access_control.allows(Access(COMMANDS[command].permission, command, *where, request))
            ]
        )


def _find_token(request: Request) -> str | None:
    token = request.cookies.get(_COOKIE, "")
    return token if _TOKEN.fullmatch(token) else None


def _check_origin(request: Request, token: str) -> None:
    """Raise ForeignRequest unless a form of these pages sent the request.

    Browsers of today say where a request comes from; the header Origin serves the older ones.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin", "")
    is_own = bool(origin) and urlsplit(origin).netloc == request.headers.get("host")
    is_same = is_own if site is None else site == "same-origin"
    expected = _find_token(request)
    if not is_same or expected is None or not compare_digest(expected.encode(), token.encode()):
        raise ForeignRequest


def make_error_page(site: Site, request: Request, error: Exception) -> Response:
    """Return the page for an error, with the status and the sentence of the HTTP API."""
    answer = build_error_response(error)
    try:
        problem = json.loads(bytes(answer.body))
    except ValueError:  # a hook's HTTPException without a body
        return answer
    visit = Visit(site, request, "")
    page = render("error.html", {"visit": visit, "problem": problem}, status=answer.status_code)
    page.headers.update(
        {name: value for name, value in answer.headers.items() if name in ("www-authenticate", "retry-after", "allow")}
    )
    return page
