"""Access control: every request passes the hooks of the application before anything else happens.

A request is refused unless each of its hooks, at least one, returns True or a `Scope`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from celery_durable import values
from celery_durable.all_operations import Operations
from celery_durable.errors import DurableError
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
from celery_durable.model import Permission, Scope

E = TypeVar("E", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Access:
    """What a hook decides on: a client wants to do an operation.

    The hooks for a creation are called twice: before the body is read, without an id, and then with each id that will
    be written.

    Attributes:
        permission: The permission that the route requires.
        operation: The name of the operation, such as "create".
        workflow: The workflow's name; None if the request concerns all workflows.
        instance_id: The instance's id; None if the request does not concern one instance.
        request: The request of the client.
    """

    permission: Permission
    operation: str
    workflow: str | None
    instance_id: str | None
    request: Request


HookResult = bool | Scope | Response
Hook = Callable[[Access], HookResult | Awaitable[HookResult]]
"""Returns True to allow the request, or a `Scope` to limit it to these instances. Anything else refuses the request: a
Response is sent as it is, any other value becomes a 403. A hook may raise `Unauthenticated`, `Forbidden` and
HTTPException. Functions that are not ``async`` run on a thread."""


Actor = Callable[[Access], str | Awaitable[str | None] | None]
"""Returns the name of the user, which is recorded with cancels, terminations and changes of steps by hand; None if the
user is not known."""


@dataclass(frozen=True, slots=True)
class Authorize:
    """The hooks of an application.

    Attributes:
        request: Called for every request, before the hook for its permission. Both must allow the request.
        creation: Called for requests that create instances.
        reading: Called for requests that read.
        management: Called for requests that change instances.
        events: Called for requests that send events.
        tick: Called for requests that run workflows in this process.
        health: Called for the probes `/healthz` and `/readyz`.
        actor: Returns the name of the user. It allows or refuses nothing.
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
        """Return the hooks for a permission."""
        policy: Hook | None = getattr(self, permission.value)
        return [hook for hook in (self.request, policy) if hook is not None]


_scope: ContextVar[Scope | None] = ContextVar("celery_durable_scope", default=None)


def restrict_to_request_scope(operations: Operations) -> Operations:
    """Return the operations, limited to the scope that the hooks returned for the current request."""
    scope = _scope.get()
    return operations if scope is None else operations.restrict_to(scope)


class AccessControl:
    """The outermost layer of every route: it calls the hooks, checks the body's size, and makes errors problems."""

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
        # Separate threads, so that hooks that hang do not delay the probes of a load balancer.
        self._threads, self._health_threads = HookThreads("hooks"), HookThreads("health-hooks", 4)

    async def admit(self, access: Access) -> None:
        """Return if the hooks allow this access. Otherwise raises HookResponse, Forbidden or the error of the hook."""
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
        """Return the user's name from the actor hook, or None. Raises TypeError if the hook returns another type."""
        if self._hooks is None or self._hooks.actor is None:
            return None
        name = await self._call_hook(self._hooks.actor, access)
        if name is None or isinstance(name, str):
            return name
        raise TypeError(f"The actor hook returned a {type(name).__name__}, not a name or None.")

    async def _call_hook(self, hook: Hook | Actor, access: Access) -> object:
        call: Any = hook
        threads = self._health_threads if access.permission is Permission.HEALTH else self._threads
        is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call.__call__)
        answer = call(access) if is_async else await threads.call(call, access)
        return await threads.wait_for(answer) if inspect.isawaitable(answer) else answer

    async def allows(self, access: Access) -> bool:
        """Return whether the hooks would allow this access, without any effect on the current request."""
        token = _scope.set(_scope.get())
        try:
            await self.admit(access)
        except (HookResponse, DurableError, HTTPException):
            return False
        finally:
            _scope.reset(token)
        return True

    async def serve(
        self,
        request: Request,
        permission: Permission,
        operation: str,
        inner: Callable[[Request], Awaitable[Response]],
        *,
        refuse: Callable[[Exception], Response] = build_error_response,
    ) -> Response:
        """Return the response to a request, or what ``refuse`` makes of the error that refuses it."""
        request = self._limit_body(request)
        token = _scope.set(None)
        try:
            await self.admit(_build_access(request, permission, operation))
            _check_encoding(request)
            if request.method in ("POST", "PATCH"):
                await request.body()  # the request caches it; FastAPI would report BodyTooLarge as an invalid body
            if permission is Permission.TICK:  # it runs workflows, without a time limit
                response = await inner(request)
            else:
                response = await timeouts.serve_in_time(lambda: inner(request))
        except HookResponse as answered:
            response = answered.response
        except Exception as error:  # noqa: BLE001  # the only place where errors become responses
            response = refuse(error)
        finally:
            _scope.reset(token)
        response.headers.setdefault("Cache-Control", "private, no-cache")
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    def _limit_body(self, request: Request) -> Request:
        """Return the same request, but reading its body raises BodyTooLarge beyond the limit."""
        size = 0

        async def receive() -> Any:
            nonlocal size
            message = await request.receive()
            size += len(message.get("body", b""))
            if size > (limit := self._max_body_bytes()):
                raise BodyTooLarge(limit)
            return message

        return Request(request.scope, receive, request._send)  # noqa: SLF001  # there is no public way to pass it on


class HookResponse(Exception):
    """A hook returned the response to the request."""

    def __init__(self, response: Response) -> None:
        self.response = response
        super().__init__(response.status_code)


def _check_encoding(request: Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding


def _restrict_scope(permission: Permission, scope: Scope) -> None:
    """Limit the request to the instances that this and the earlier hooks allow. Raises Forbidden if there are none."""
    if permission is Permission.TICK:
        raise Forbidden("A tick concerns all instances: the hook has to return True for it, or refuse it.")
    values.check_labels(scope.labels)
    before = _scope.get()
    both = scope if before is None else before.intersect(scope)
    if both is None:
        raise Forbidden
    _scope.set(both)


def _build_access(request: Request, permission: Permission, operation: str) -> Access:
    # The decoded path parameters, exactly as the endpoint gets them.
    found = request.path_params
    return Access(permission, operation, found.get("workflowName"), found.get("instanceId"), request)


def requires(permission: Permission) -> Callable[[E], E]:
    """Declare the permission that an endpoint requires. Every route must declare one."""

    def set_permission(endpoint: E) -> E:
        setattr(endpoint, _PERMISSION_ATTRIBUTE, permission)
        return endpoint

    return set_permission


def required_permission(endpoint: Any) -> Permission:
    """Return the permission that an endpoint requires. Raises TypeError if it declares none."""
    permission = getattr(endpoint, _PERMISSION_ATTRIBUTE, None)
    if not isinstance(permission, Permission):
        raise TypeError(f"{endpoint!r} declares no permission.")
    return permission


_PERMISSION_ATTRIBUTE = "__durable_permission__"
_UNREADABLE_BODY = {"loc": ("body",), "msg": "The body cannot be read as JSON in UTF-8"}
_OF_FASTAPI = "There was an error parsing the body"
"""The detail of FastAPI's exception for such a body. An application may raise exceptions of the same class."""


def _refuse_unreadable_body(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Give a body that FastAPI cannot parse the same response as one that does not fit."""

    async def handle(request: Request) -> Any:
        try:
            return await handler(request)
        except HTTPException as exc:
            if exc.status_code == HTTPStatus.BAD_REQUEST and exc.detail == _OF_FASTAPI:
                raise RequestValidationError([_UNREADABLE_BODY]) from exc
            raise

    return handle


def make_guarded_route(access_control: AccessControl) -> type[APIRoute]:
    """Return a route class that applies this access control, also in the router of another application."""
    routes: list[GuardedRoute] = []

    class GuardedRoute(APIRoute):
        def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
            super().__init__(path, endpoint, **options)
            routes.append(self)

        @property
        def served(self) -> set[str]:
            # HEAD is served like GET, except for the stream, which would not end. HEAD is not added to the methods
            # of the route, because the OpenAPI description would list it.
            methods = self.methods or set()
            return methods | {"HEAD"} if "GET" in methods and not self.path_format.endswith("/stream") else methods

        def matches(self, scope: ASGIScope) -> tuple[Match, ASGIScope]:
            found, child = super().matches(scope)
            return (Match.FULL if found is Match.PARTIAL and scope["method"] in self.served else found), child

        async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
            if scope["method"] in self.served:
                if scope["method"] == "HEAD":  # the server leaves the body out
                    scope = {**scope, "method": "GET"}
                return await super().handle(scope, receive, send)
            # One path may match several routes: `batch` is also a possible id of an instance.
            path = self.path_format.format(**scope["path_params"])
            served = {each for route in routes if route.path_regex.match(path) for each in route.served}
            refused = HTTPException(405, "Method Not Allowed", headers={"Allow": ", ".join(sorted(served))})
            return await build_http_exception_response(refused)(scope, receive, send)

        def get_route_handler(self) -> Callable[[Request], Any]:
            inner = _refuse_unreadable_body(super().get_route_handler())
            permission, operation = required_permission(self.endpoint), self.endpoint.__name__

            async def handle(request: Request) -> Response:
                return await access_control.serve(request, permission, operation, inner)

            return handle

    return GuardedRoute
