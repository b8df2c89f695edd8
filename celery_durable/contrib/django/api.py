"""The view that passes a request of Django to the ASGI application of the HTTP API.

The view is async: under ASGI a stream costs no thread. Under WSGI it would occupy one of the server until it ends, so
it is refused with the remedy.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from celery_durable.app import Durable
from celery_durable.contrib.django import wiring
from celery_durable.http import Access, Authorize, Permission, Unauthenticated, asgi
from celery_durable.http.problems import build_problem

_PERMISSIONS = (
    "view_instance", "create_instance", "pause_instance", "retry_instance", "terminate_instance",
    "send_event_instance", "complete_step_instance",
)  # fmt: skip
_REQUIRED = {
    "create": {"create_instance"},
    "create_batch": {"create_instance"},
    "restart_or_create": {"create_instance", "retry_instance"},
    "fork": {"create_instance", "retry_instance"},
    "pause": {"pause_instance"},
    "resume": {"pause_instance"},
    "wake": {"pause_instance"},
    "cancel": {"terminate_instance"},
    "terminate": {"terminate_instance"},
    "restart": {"retry_instance"},
    "retry": {"retry_instance"},
    "rewind": {"retry_instance"},
    "set_result": {"complete_step_instance"},
    "skip": {"complete_step_instance"},
    "send_event": {"send_event_instance"},
    "emit": {"send_event_instance"},
}
"""The permissions that an operation requires. Operations that read require the permission to view."""


_STREAM = re.compile("workflows/[^/]+/instances/[^/]+/stream")


async def serve(request: HttpRequest, path: str) -> HttpResponseBase:
    """Serve a request by the API."""
    is_stream = _STREAM.fullmatch(path) is not None
    if is_stream and not isinstance(request, ASGIRequest):
        refused = build_problem(
            501, "STREAM_NEEDS_ASGI", "Streams need an ASGI server. Poll the instance with ?wait= instead."
        )
        return HttpResponse(bytes(refused.body), status=refused.status_code, content_type=refused.media_type)
    user, permissions = await sync_to_async(read_user)(request)
    scope = build_scope(request, path, user, permissions)
    return await Call(_make_application(wiring.find_durable()), scope, request.body).respond(is_stream=is_stream)


for _alias in connections.settings:  # the API has connections of its own, and Django refuses ATOMIC_REQUESTS here
    transaction.non_atomic_requests(using=_alias)(serve)


def read_user(request: HttpRequest) -> tuple[str | None, frozenset[str]]:
    """Return a user's name and permissions of the API, on Django's thread for database work, so hooks need none."""
    user: Any = request.user
    if not user.is_authenticated:
        return None, frozenset()
    return user.get_username(), frozenset(each for each in _PERMISSIONS if user.has_perm(f"celery_durable.{each}"))


# --- permissions --------------------------------------------------------------------------------

_USER, _GRANTED = "celery_durable.user", "celery_durable.permissions"


@functools.lru_cache(maxsize=1)
def _make_application(durable: Durable) -> Any:
    return asgi(durable, authorize=HOOKS)


async def _authorize(access: Access) -> bool:
    scope = access.request.scope
    if scope[_USER] is None:
        raise Unauthenticated("Log in first.", challenge="Session")
    if access.permission is Permission.HEALTH:
        return False
    if access.permission is Permission.READING:
        return "view_instance" in scope[_GRANTED]
    required = _REQUIRED.get(access.operation)
    return required is not None and required <= scope[_GRANTED]


async def _find_actor(access: Access) -> str | None:
    name: str | None = access.request.scope[_USER]
    return name


HOOKS = Authorize(request=_authorize, actor=_find_actor)
"""The hooks of the API and of the dashboard: the permissions of Django's users decide."""


# --- one request --------------------------------------------------------------------------------


def build_scope(request: HttpRequest, path: str, user: str | None, permissions: frozenset[str]) -> dict[str, Any]:
    """Return the scope of ASGI for a request, with the user and the permissions for the hooks."""
    headers = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in request.headers.items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": request.path[: len(request.path) - len(path) - 1],
        "query_string": request.META.get("QUERY_STRING", "").encode(),
        "headers": headers,
        _USER: user,
        _GRANTED: permissions,
    }


class Call:
    """One call of the application. Its response is either collected, or streamed while the application runs."""

    def __init__(self, application: Any, scope: dict[str, Any], body: bytes) -> None:
        self._application, self._scope = application, scope
        self._received = iter([{"type": "http.request", "body": body, "more_body": False}])
        self._sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=1)

    async def respond(self, *, is_stream: bool) -> HttpResponseBase:
        """Call the application, and return its response."""
        task = asyncio.create_task(self._run())
        try:
            start = await self._sent.get()
            if start is None:
                await task  # raises what the application raised
            assert start is not None  # an application sends the start of its response first
            is_streamed = is_stream and start["status"] == HTTPStatus.OK
            content = None if is_streamed else b"".join([part async for part in self._read_body(task)])
        except BaseException:
            task.cancel()
            raise
        response: HttpResponseBase = (
            StreamingHttpResponse(_Stream(self._read_body(task), task)) if content is None else HttpResponse(content)
        )
        response.status_code = start["status"]
        del response["Content-Type"]
        for name, value in start["headers"]:
            if name == b"set-cookie":  # there may be several, and Django keeps them apart from the headers
                response.cookies.load(value.decode("latin-1"))
            else:
                response[name.decode("latin-1")] = value.decode("latin-1")
        return response

    async def _run(self) -> None:
        try:
            await self._application(self._scope, self._receive, self._sent.put)
        except asyncio.CancelledError:
            raise  # the response is no longer read
        except BaseException:
            await self._sent.put(None)
            raise
        await self._sent.put(None)

    async def _receive(self) -> dict[str, Any]:
        for message in self._received:
            return message
        return await asyncio.Future()  # the client's disconnection cancels the task instead

    async def _read_body(self, task: asyncio.Task[None]) -> AsyncIterator[bytes]:
        """Yield the body. The application ends with its reader."""
        try:
            while (message := await self._sent.get()) is not None:
                if message.get("body"):
                    yield message["body"]
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])


class _Stream:
    """The body of a response that is streamed. Django closes it when the client disconnects, on another thread."""

    def __init__(self, parts: AsyncIterator[bytes], task: asyncio.Task[None]) -> None:
        self._parts, self._task = parts, task

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts

    def close(self) -> None:
        """End the application."""
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)
