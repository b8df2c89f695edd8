"""FastAPI: errors as responses, and the end of the process. Needs ``celery-durable[fastapi]``.

The dependency is `Durable.client`, and the routes of the HTTP API are those of `celery_durable.http`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from celery_durable.app import Durable
from celery_durable.errors import DurableError
from celery_durable.http.problems import build_error_response

__all__ = ["add_exception_handlers", "lifespan"]


def lifespan(durable: Durable) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan, for ``FastAPI(lifespan=...)`` or to enter in a lifespan of your own.

    At the start it reads the settings, so that a wrong one stops the server. At the end it closes the Durable.

    Args:
        durable: Your `Durable`.
    """

    @asynccontextmanager
    async def run(_: FastAPI) -> AsyncIterator[None]:
        durable.internals.read_settings()
        try:
            yield
        finally:
            await asyncio.to_thread(durable.close)

    return run


def add_exception_handlers(app: FastAPI) -> None:
    """Answer an error of this package that leaves a route as the HTTP API does: 404, 409, 400 and others.

    The body is ``application/problem+json`` with the error's ``code`` and ``message``.

    Args:
        app: Your application.
    """
    app.add_exception_handler(DurableError, _answer)


async def _answer(_: Request, error: Exception) -> Response:
    return build_error_response(error)
