"""Clients that follow instances, in streams and long polls: how many there may be, and the looks that they share."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

from celery_durable.errors import DurableError
from celery_durable.http import timeouts
from celery_durable.model import VersionedInstance
from celery_durable.operations import Operations
from celery_durable.runtime import steady


class TooManyStreams(DurableError):
    """As many clients as this process takes follow instances already."""

    code, http_status = "TOO_MANY_STREAMS", 429

    def __init__(self, limit: int) -> None:
        super().__init__(f"This server follows instances for {limit} clients at a time. Come again later.")


class Followers:
    """Those of one API in one process."""

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0
        self._shared_reads: dict[tuple[object, ...], tuple[float, asyncio.Task[VersionedInstance]]] = {}

    def enter(self) -> None:
        """Count one; raises TooManyStreams. `leave` must follow."""
        if self._count >= self._limit:
            raise TooManyStreams(self._limit)
        self._count += 1

    def leave(self) -> None:
        """One is gone."""
        self._count -= 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one for as long as the block lasts; raises TooManyStreams."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def read_shared(
        self, operations: Operations, workflow: str, instance_id: str, *, within: float
    ) -> VersionedInstance:
        """How an instance stands, as one look saw it that began within the last seconds; raises InstanceNotFound.

        Those who follow the same instance in the same scope share it.
        """
        loop = asyncio.get_running_loop()
        key = (loop, operations.scope_text, workflow, instance_id)
        started_at, shared = self._shared_reads.get(key, (0.0, None))
        if shared is None or steady() - started_at > within:
            # In no client's context: the look outlives a client that breaks off.
            read = timeouts.run_read(operations.read_with_tag, workflow, instance_id)
            shared = loop.create_task(read, context=contextvars.Context())
            self._shared_reads[key] = (steady(), shared)
            loop.call_later(_FORGET_SECONDS, self._forget, key, shared)
        return await asyncio.shield(shared)

    def _forget(self, key: tuple[object, ...], shared: asyncio.Task[VersionedInstance]) -> None:
        if shared.done() and not shared.cancelled():
            shared.exception()  # seen: if every client has gone meanwhile, nobody else retrieves it
        if self._shared_reads.get(key, (0.0, None))[1] is shared:
            del self._shared_reads[key]


_FORGET_SECONDS = 2.0
"""Longer than any client shares a look."""
