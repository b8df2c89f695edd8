"""The check that a function is no async function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from celery_durable.errors import AsyncNotSupported


def refuse_async(what: str, fn: Callable[..., Any]) -> None:
    """Raise AsyncNotSupported for a coroutine function, an async generator, or an object that is called like one."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    code: Callable[..., Any] = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        raise AsyncNotSupported(what, getattr(inner, "__name__", repr(inner)))
