"""Held tasks: the tasks of steps that a worker has received and that have not ended, in memory alone."""

from __future__ import annotations

import math
from typing import Any

from celery_durable.model import REFERENCE_HEADER, TaskReference

_KEPT_SECONDS = 10.0
"""How long a list keeps the tasks that came over a connection which is lost: another worker lists them by then."""


class HeldTasks:
    def __init__(self) -> None:
        # Each request with its reference, and the connection over which it came.
        self._requests: dict[Any, tuple[TaskReference, Any]] = {}
        self._connection: Any = None
        self._kept_until = -math.inf

    def record_received(self, request: Any, connection: Any) -> None:
        """Record a task, and the connection over which it came, before it waits for an ETA or a rate limit."""
        reference = TaskReference.read(request.request_dict.get(REFERENCE_HEADER))
        if reference is not None:
            self._requests[request] = reference, connection

    def references(self, consumer: Any, now: float) -> list[TaskReference]:
        """The tasks that the worker holds now, from one thread at a time. ``consumer`` None: the worker shuts down.

        Celery has no list of them. A task that waits for its ETA or a rate limit is neither reserved nor active, but
        its message is not acknowledged. A task that has ended is acknowledged and is in neither set.

        When a connection is lost, Celery drops what waits, and the broker delivers it again. So a message of an earlier
        connection is not held for long, unless the worker's pool has it: Celery drops nothing there, and a pool of
        threads has all tasks without an ETA.
        """
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        if consumer is not None and consumer.connection is not self._connection:
            self._connection, self._kept_until = consumer.connection, now + _KEPT_SECONDS
        keeps_all = consumer is None or now < self._kept_until
        held = []
        for request, (reference, connection) in list(self._requests.items()):
            is_with_worker = keeps_all or connection is self._connection or _is_in_pool(request)
            is_waiting = not request.acknowledged and is_with_worker
            if is_waiting or request in state.active_requests or request in state.reserved_requests:
                held.append(reference)
            else:
                del self._requests[request]
        return held


def _is_in_pool(request: Any) -> bool:
    """Whether the worker has given the task to its pool, which runs it whatever happens to the connection."""
    return getattr(request, "_apply_result", None) is not None
