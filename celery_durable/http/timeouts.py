"""Time limits of a response: if the database is silent, every client gets a 503 within seconds (LAW 7).

A request waits for one of the API's few threads, each with one connection, and then for the database, within
`limit_database_time`. A client that follows an instance reads it again and again: the limits hold for each read, on
threads of their own, so that other requests never wait behind them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, ParamSpec, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from celery_durable.errors import DurableError, StoreUnavailable
from celery_durable.runtime import real_monotonic
from celery_durable.store.engine.time_limits import CallerDeadline, limit_database_time

T = TypeVar("T")
P = ParamSpec("P")

_DATABASE_SECONDS = 5.0
"""The limit for all database operations of a request or of a poll together. Connecting may take 3 s more."""
_ANSWER_SECONDS = 8.5
_PROBE_SECONDS = 2.0
_PROBE_ANSWER_SECONDS = 2.5
_HOOK_THREADS = 40
# Each of these holds one connection at a time, so together they are the bound that docs/reference/http.md names.
_REQUEST_THREADS, _READ_THREADS, _PROBE_THREADS = 10, 4, 1
HOOK_SECONDS = 5.0
"""The limit for one hook. Without it, hooks that hang would eventually occupy every thread."""

_open: ContextVar[tuple[CancelScope, CallerDeadline] | None] = ContextVar("celery_durable_open_request", default=None)
_request_threads: RunVar[CapacityLimiter] = RunVar("celery_durable_request_threads")
_read_threads: RunVar[CapacityLimiter] = RunVar("celery_durable_read_threads")
_probe_threads: RunVar[CapacityLimiter] = RunVar("celery_durable_probe_threads")


class HookTimeout(DurableError):
    """A hook of the application did not return in time."""

    code, http_status = "HOOK_TIMEOUT", 503

    def __init__(self) -> None:
        super().__init__("A hook of the application did not return in time. Try again later.")


async def serve_in_time(serve: Callable[[], Awaitable[T]]) -> T:
    """Return what ``serve`` returns. Raises StoreUnavailable after 8.5 s, not counting calls of `pause`."""
    with anyio.move_on_after(_ANSWER_SECONDS) as scope, limit_database_time(_DATABASE_SECONDS) as limit:
        token = _open.set((scope, limit))
        try:
            return await serve()
        finally:
            _open.reset(token)
    raise StoreUnavailable


async def pause(seconds: float) -> None:
    """Sleep without a thread or a connection. Afterwards, the time limits of the request start again."""
    if (found := _open.get()) is None:
        await anyio.sleep(seconds)
        return
    scope, limit = found
    scope.deadline = anyio.current_time() + seconds + _ANSWER_SECONDS
    await anyio.sleep(seconds)
    limit.until = real_monotonic() + _DATABASE_SECONDS


async def run_in_request_thread(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``do`` on one of the request threads."""
    call = functools.partial(do, *args, **kwargs)
    return await to_thread.run_sync(call, limiter=_limiter(_request_threads, _REQUEST_THREADS))


def in_request_thread(endpoint: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    """Run a plain endpoint on a request thread; FastAPI would take one of the application's."""

    async def call(**given: Any) -> T:
        return await run_in_request_thread(endpoint, **given)

    functools.update_wrapper(call, endpoint)
    del call.__wrapped__  # type: ignore[attr-defined]  # FastAPI would unwrap it
    call.__signature__ = inspect.signature(endpoint, eval_str=True)  # type: ignore[attr-defined]
    return call


async def run_read(read: Callable[..., T], *args: Any) -> T:
    """Call a read for a client that follows an instance, on one of the read threads."""
    threads = _limiter(_read_threads, _READ_THREADS)
    if _open.get() is not None:
        return await to_thread.run_sync(read, *args, limiter=threads)

    def within() -> T:  # of a stream: the limits of its request ended when the response started
        with limit_database_time(_DATABASE_SECONDS):
            return read(*args)

    return await to_thread.run_sync(within, limiter=threads)


class HookThreads:
    """Threads for the hooks of an application. A hook that hangs occupies its own until it returns."""

    def __init__(self, name: str, count: int = _HOOK_THREADS) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"durable-{name}")

    async def call(self, hook: Callable[..., T], *args: Any) -> T:
        """Call a plain hook; raises HookTimeout after 5 s, including the wait for a thread."""
        context = copy_context()
        return await self.wait_for(asyncio.get_running_loop().run_in_executor(self._threads, context.run, hook, *args))

    @staticmethod
    async def wait_for(answer: Awaitable[T]) -> T:
        """Return what an ``async`` hook returns. Raises HookTimeout after 5 s."""
        with anyio.move_on_after(HOOK_SECONDS):
            return await answer
        raise HookTimeout


async def run_probe(probe: Callable[[], T]) -> T:
    """Call a health check of the database on its own thread. Raises StoreUnavailable after 2.5 s in any case."""
    threads = _limiter(_probe_threads, _PROBE_THREADS)
    with anyio.move_on_after(_PROBE_ANSWER_SECONDS), limit_database_time(_PROBE_SECONDS):
        return await to_thread.run_sync(probe, limiter=threads, abandon_on_cancel=True)
    raise StoreUnavailable


def _limiter(var: RunVar[CapacityLimiter], size: int) -> CapacityLimiter:
    """Return the limiter of the current event loop, because a limiter belongs to one loop."""
    try:
        return var.get()
    except LookupError:
        var.set(limiter := CapacityLimiter(size))
        return limiter
