"""Held tasks: the tasks of steps that a worker has received and that have not ended, in memory alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from celery import states

from celery_durable.model import REFERENCE_HEADER, TaskReference

_KEPT_SECONDS = 10.0
"""How long a list keeps the tasks that came over a connection which is lost: another worker lists them by then."""


def is_requeued(task: Any, state: Any, retval: Any) -> bool:
    """Whether a task that ended has returned its message to the queue (``Reject(requeue=True)``).

    False if the message was acknowledged before the task ran: then Celery rejects nothing, and the message is gone.
    """
    return bool(state == states.REJECTED and getattr(retval, "requeue", False) and task.acks_late)


class HeldTasks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Each request with its reference, and the connection over which it came.
        self._requests: weakref.WeakKeyDictionary[Any, tuple[TaskReference, weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._connection: Any = None
        self._last: Sequence[TaskReference] = ()
        self._kept: Sequence[TaskReference] = ()
        self._kept_until = 0.0

    def record_received(self, request: Any, connection: Any) -> None:
        """Record a task, and the connection over which it came, before it waits for an ETA or a rate limit."""
        reference = TaskReference.read(request.request_dict.get(REFERENCE_HEADER))
        if reference is not None:
            with self._lock:
                self._requests[request] = reference, weakref.ref(connection)

    def references(self, consumer: Any, now: float) -> Sequence[TaskReference]:
        """The tasks that the worker holds now, from any thread. ``consumer`` None: the worker shuts down.

        Celery has no list of them. A task that waits for its ETA or a rate limit is neither reserved nor active, but
        its message is not acknowledged. A task that has ended is acknowledged and is in neither set.

        When a connection is lost, Celery drops what waits, and the broker delivers it again. The dropped request is
        never acknowledged, and exists until Python's garbage collector breaks its cycle, maybe after hours. So a
        message of an earlier connection is not held, unless the worker's pool has it: Celery drops nothing there, and a
        pool of threads has all tasks without an ETA.
        """
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        with self._lock:
            requests = list(self._requests.items())
        if consumer is not None and consumer.connection is not self._connection:
            self._connection, self._kept, self._kept_until = consumer.connection, self._last, now + _KEPT_SECONDS
        held = [
            reference
            for request, (reference, connection) in requests
            if (
                not request.acknowledged
                and (consumer is None or connection() is consumer.connection or _is_in_pool(request))
            )
            or request in state.active_requests
            or request in state.reserved_requests
        ]
        self._last = held if now >= self._kept_until else list(dict.fromkeys([*held, *self._kept]))
        return self._last


def _is_in_pool(request: Any) -> bool:
    """Whether the worker has given the task to its pool, which runs it whatever happens to the connection."""
    return getattr(request, "_apply_result", None) is not None
