"""The routes about the serving process: run due workflows in it, and health checks."""

from __future__ import annotations

import asyncio
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from fastapi import Body
from starlette.responses import Response

from celery_durable.app import Durable
from celery_durable.http import timeouts
from celery_durable.http.access import requires
from celery_durable.http.problems import NotReady
from celery_durable.http.reading import json_response
from celery_durable.model import Permission
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.migrations import migrate
from celery_durable.wire.requests import TickRequest
from celery_durable.wire.responses import Healthy, Ticked

logger = logging.getLogger("celery_durable.http")

_MAX_CONCURRENT_TICKS = 4
"""Further ticks wait for a thread. They have their own threads, because a tick has no time limit."""


class ProcessRoutes:
    """The endpoints for ticks and health checks."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_MAX_CONCURRENT_TICKS, thread_name_prefix="durable-tick")

    @requires(Permission.TICK)
    async def tick(self, body: Annotated[TickRequest | None, Body()] = None) -> Response:
        """Run due workflows in the serving process.

        For deployments in which a scheduler such as cron replaces Celery workers. One tick runs up to `maxInstances`
        passes, each of up to `maxSteps` steps. Several ticks may run at the same time. `processed` is the number of
        passes.
        """
        asked = body or TickRequest()
        work = functools.partial(self._durable.tick, max_instances=asked.max_instances, max_steps=asked.max_steps)
        processed = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return json_response(Ticked(processed=processed))

    @requires(Permission.HEALTH)
    async def healthz(self) -> Response:
        """Check whether the process responds.

        It uses neither the database nor the broker.
        """
        return json_response(Healthy(status="ok"))

    @requires(Permission.HEALTH)
    async def readyz(self) -> Response:
        """Check whether the database responds and is migrated."""
        try:
            await timeouts.run_probe(lambda: migrate.check_revision(self._durable.internals.store))
        except Exception as exc:
            logger.warning("Not ready: %s", describe_fault(exc))
            raise NotReady from exc
        return json_response(Healthy(status="ok"))
