"""Who may do what: hooks of the application, asked in one place before anything else happens.

Deny by default: what no hook answers with True is refused, and so is what no hook was given for.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from celery_durable import values
from celery_durable.http import timeouts
from celery_durable.http.problems import (
    BodyTooLarge,
    Forbidden,
    NoAuthorization,
    UnsupportedEncoding,
    build_error_response,
    build_http_exception_response,
)
from celery_durable.http.timeouts import HookThreads
from celery_durable.model import Scope
from celery_durable.operations import Operations

E = TypeVar("E", bound=Callable[..., Any])


class Permission(StrEnum):
    """What a route needs. Every route names one."""

    CREATION = "creation"
    READING = "reading"
    MANAGEMENT = "management"
    EVENTS = "events"
    TICK = "tick"
    HEALTH = "health"


@dataclass(frozen=True, slots=True)
class Access:
    """What a hook decides on: somebody wants to do ``operation``, under ``right``, to this workflow and instance.

    ``workflow`` is None where a request concerns all of them, ``instance_id`` where it concerns no single one. A
    creation is asked for twice: before its body is read, without an id, and then with each id that will be written.
    """

    permission: Permission
    operation: str
    workflow: str | None
    instance_id: str | None
    request: Request


HookResult = bool | Scope | Response
Hook = Callable[[Access], HookResult | Awaitable[HookResult]]
"""Returns True to let the request go on, or a `Scope` to let it reach these instances alone. Anything else refuses
it: a Response is sent, else it is a 403; `Unauthenticated`, `Forbidden` and HTTPException may be raised. Plain
functions run on a thread."""


Actor = Callable[[Access], str | Awaitable[str | None] | None]
"""Answers with the name of who is asking, which is written down with what is done by hand; None: not known."""


@dataclass(frozen=True, slots=True)
class Authorize:
    """The hooks. ``request`` is asked for every access, then the one of its right. Both must answer with True.

    ``actor`` decides nothing: it says who is asking.
    """

    request: Hook | None = None
    creation: Hook | None = None
    reading: Hook | None = None
    management: Hook | None = None
    events: Hook | None = None
    tick: Hook | None = None
    health: Hook | None = None
    actor: Actor | None = None

    def hooks(self, permission: Permission) -> list[Hook]:
        """Those that decide on a right."""
        policy: Hook | None = getattr(self, permission.value)
        return [hook for hook in (self.request, policy) if hook is not None]


_scope: ContextVar[Scope | None] = ContextVar("celery_durable_scope", default=None)


def restrict_to_request_scope(operations: Operations) -> Operations:
    """The verbs for the request that is served, as far as its hooks let it reach."""
    scope = _scope.get()
    return operations if scope is None else operations.restrict_to(scope)


class AccessControl:
    """The outermost layer of every route: access first, then the size of the body, and every error as a problem."""

    def __init__(
        self,
        authorize: Authorize | Hook | None,
        *,
        allow_anonymous: bool,
        max_body_bytes: Callable[[], int],
    ) -> None:
        hooks = authorize if authorize is None or isinstance(authorize, Authorize) else Authorize(authorize)
        if (hooks is None or not any(hooks.hooks(permission) for permission in Permission)) != allow_anonymous:
            raise NoAuthorization(is_contradiction=allow_anonymous)
        self._hooks, self._max_body_bytes = hooks, max_body_bytes
        # The probes of a load balancer are not answered late because other hooks hang.
        self._threads, self._health_threads = HookThreads("hooks"), HookThreads("health-hooks", 4)

    async def admit(self, access: Access) -> None:
        """Return if the hooks let this go on; raises what refuses it."""
        if self._hooks is None:
            return
        hooks = self._hooks.hooks(access.permission)
        if not hooks:
            raise Forbidden(f"This API serves no requests of the kind {access.permission.value!r}.")
        for hook in hooks:
            answer = await self._call_hook(hook, access)
            if isinstance(answer, Response):
                raise HookResponse(answer)
            if isinstance(answer, Scope):
                _restrict_scope(access.permission, answer)
            elif answer is not True:
                raise Forbidden

    async def actor(self, access: Access) -> str | None:
        """Who is asking, as the application knows it; None where it does not say. Raises TypeError for no name."""
        if self._hooks is None or self._hooks.actor is None:
            return None
        name = await self._call_hook(self._hooks.actor, access)
        if name is None or isinstance(name, str):
            return name
        raise TypeError(f"The actor hook answered with a {type(name).__name__}, not with a name or None.")

    async def _call_hook(self, hook: Hook | Actor, access: Access) -> object:
        call: Any = hook
        threads = self._health_threads if access.permission is Permission.HEALTH else self._threads
        is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call.__call__)
        answer = call(access) if is_async else await threads.call(call, access)
        return await threads.wait_for(answer) if inspect.isawaitable(answer) else answer

    async def serve(
        self, request: Request, permission: Permission, operation: str, inner: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Serve a request, or refuse it."""
        request = self._limit_body(request)
        token = _scope.set(None)
        try:
            await self.admit(_build_access(request, permission, operation))
            _check_encoding(request)
            if request.method == "POST":
                await request.body()  # kept by the request; what parses it would take our error for a bad body
            if permission is Permission.TICK:  # runs bodies, which take as long as they like
                response = await inner(request)
            else:
                response = await timeouts.serve_in_time(lambda: inner(request))
        except HookResponse as answered:
            response = answered.response
        except Exception as error:  # noqa: BLE001  # the one place where errors become answers
            response = build_error_response(error)
        finally:
            _scope.reset(token)
        response.headers.setdefault("Cache-Control", "private, no-cache")
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    def _limit_body(self, request: Request) -> Request:
        """The same request, whose body breaks off where it gets too large, whoever reads it."""
        size = 0

        async def receive() -> Any:
            nonlocal size
            message = await request.receive()
            size += len(message.get("body", b""))
            if size > (limit := self._max_body_bytes()):
                raise BodyTooLarge(limit)
            return message

        return Request(request.scope, receive, request._send)  # noqa: SLF001  # there is no public way to hand it on


class HookResponse(Exception):
    """A hook answers the request itself."""

    def __init__(self, response: Response) -> None:
        self.response = response
        super().__init__(response.status_code)


def _check_encoding(request: Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding


def _restrict_scope(permission: Permission, scope: Scope) -> None:
    """Have the request reach what this hook and those before it allow; raises Forbidden where that is nothing."""
    if permission is Permission.TICK:
        raise Forbidden("A tick concerns all instances: the hook has to return True for it, or refuse it.")
    values.check_labels(scope.labels)
    before = _scope.get()
    both = scope if before is None else before.intersect(scope)
    if both is None:
        raise Forbidden
    _scope.set(both)


def _build_access(request: Request, permission: Permission, operation: str) -> Access:
    # The very texts that the endpoint gets.
    found = request.path_params
    return Access(permission, operation, found.get("workflowName"), found.get("instanceId"), request)


def requires(permission: Permission) -> Callable[[E], E]:
    """Say what an endpoint needs; one that does not say it cannot be made a route."""

    def set_permission(endpoint: E) -> E:
        setattr(endpoint, _PERMISSION_ATTRIBUTE, permission)
        return endpoint

    return set_permission


def required_permission(endpoint: Any) -> Permission:
    """The right that an endpoint needs."""
    permission = getattr(endpoint, _PERMISSION_ATTRIBUTE, None)
    if not isinstance(permission, Permission):
        raise TypeError(f"{endpoint!r} does not say what it needs.")
    return permission


_PERMISSION_ATTRIBUTE = "__durable_permission__"


def make_guarded_route(access_control: AccessControl) -> type[APIRoute]:
    """The class of routes that nobody passes but through this gate, also in the router of another application."""
    methods: defaultdict[str, set[str]] = defaultdict(set)

    class GuardedRoute(APIRoute):
        def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
            super().__init__(path, endpoint, **options)
            methods[self.path_format].update(self.methods or ())
            if self._is_read:
                methods[self.path_format].add("HEAD")

        @property
        def _is_read(self) -> bool:
            # Not the stream, which would not end. HEAD is no method of the route: the description would name it too.
            return "GET" in (self.methods or ()) and not self.path_format.endswith("/stream")

        def matches(self, scope: ASGIScope) -> tuple[Match, ASGIScope]:
            found, child = super().matches(scope)
            return (Match.FULL if found is Match.PARTIAL and self._serves(scope) else found), child

        def _serves(self, scope: ASGIScope) -> bool:
            return scope["method"] in (self.methods or ()) or (scope["method"] == "HEAD" and self._is_read)

        async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
            if self._serves(scope):
                if scope["method"] == "HEAD":  # the server leaves the body out
                    scope = {**scope, "method": "GET"}
                return await super().handle(scope, receive, send)
            allowed = ", ".join(sorted(methods[self.path_format]))
            refused = HTTPException(405, "Method Not Allowed", headers={"Allow": allowed})
            return await build_http_exception_response(refused)(scope, receive, send)

        def get_route_handler(self) -> Callable[[Request], Any]:
            inner = super().get_route_handler()
            permission, operation = required_permission(self.endpoint), self.endpoint.__name__

            async def handle(request: Request) -> Response:
                return await access_control.serve(request, permission, operation, inner)

            return handle

    return GuardedRoute
