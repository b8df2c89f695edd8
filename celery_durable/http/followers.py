"""Clients that follow instances, in streams and long polls: their limit, and the database reads that they share."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

from celery_durable.all_operations import Operations
from celery_durable.errors import DurableError
from celery_durable.http import timeouts
from celery_durable.model import VersionedInstance
from celery_durable.runtime import real_monotonic

_ReadKey = tuple[asyncio.AbstractEventLoop, str, str, str]


class TooManyStreams(DurableError):
    """The process already serves the largest number of streams and long polls."""

    code, http_status = "TOO_MANY_STREAMS", 429

    def __init__(self, limit: int) -> None:
        super().__init__(f"This server follows instances for {limit} clients at a time. Try again later.")


class Followers:
    """The clients of one API in one process that follow instances."""

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0
        self._shared_reads: dict[_ReadKey, tuple[float, asyncio.Task[VersionedInstance]]] = {}

    def enter(self) -> None:
        """Count a client. Raises TooManyStreams. The caller must call `leave` later."""
        if self._count >= self._limit:
            raise TooManyStreams(self._limit)
        self._count += 1

    def leave(self) -> None:
        """Stop counting a client."""
        self._count -= 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a client while the block runs. Raises TooManyStreams."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def read_shared(
        self, operations: Operations, workflow: str, instance_id: str, *, within: float
    ) -> VersionedInstance:
        """Return an instance and its tag from a read in this scope that is at most ``within`` seconds old."""
        loop = asyncio.get_running_loop()
        key = (loop, operations.scope_text, workflow, instance_id)
        started_at, shared = self._shared_reads.get(key, (0.0, None))
        if shared is None or real_monotonic() - started_at > within:
            # In an empty context, not the client's: the read continues if this client disconnects.
            read = timeouts.run_read(operations.queries.read_with_tag, workflow, instance_id)
            shared = loop.create_task(read, context=contextvars.Context())
            # Each request of a WSGI server has a loop of its own, which ends before it forgets its reads.
            self._shared_reads = {of: read for of, read in self._shared_reads.items() if not of[0].is_closed()}
            self._shared_reads[key] = (real_monotonic(), shared)
            loop.call_later(_FORGET_SECONDS, self._forget, key, shared)
        return await asyncio.shield(shared)

    def _forget(self, key: _ReadKey, shared: asyncio.Task[VersionedInstance]) -> None:
        if shared.done() and not shared.cancelled():
            shared.exception()  # retrieves it, since all clients may have disconnected; asyncio logs it otherwise
        if self._shared_reads.get(key, (0.0, None))[1] is shared:
            del self._shared_reads[key]


_FORGET_SECONDS = 2.0
"""How long a read is kept. Longer than any client shares one."""
