"""Held tasks: the tasks of steps that a worker has received and that have not ended.

A signal of Celery reports each received task in the worker's parent process. The list is kept in memory alone; nothing
is written per task.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from celery import states

from celery_durable.model import REFERENCE_HEADER

_MAX_MARKERS = 50


def is_requeued(task: Any, state: Any, retval: Any) -> bool:
    """Whether a task that ended has returned its message to the queue (``Reject(requeue=True)``).

    False if the message was acknowledged before the task ran: then Celery rejects nothing, and the message is gone.
    """
    return bool(state == states.REJECTED and getattr(retval, "requeue", False) and task.acks_late)


class HeldTasks:
    """The tasks of steps that this worker holds, and the newest markers that it has received."""

    def __init__(self, marker: str) -> None:
        self._marker_task = marker
        # Each request with the connection over which it came.
        self._requests: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._received_markers: deque[str] = deque(maxlen=_MAX_MARKERS)

    def record_received(self, request: Any, connection: Any) -> bool:
        """Record a received task, before it waits for an ETA or a rate limit; returns True if it is a marker.

        ``connection``: the connection to the broker over which the task came.
        """
        if request.name == self._marker_task:
            self._received_markers.append(str(request.id))
            return True
        if REFERENCE_HEADER in request.request_dict:
            self._requests[request] = weakref.ref(connection)
        return False

    def received_markers(self) -> list[str]:
        """The markers, oldest first."""
        return list(self._received_markers)

    def list_ids(self, consumer: Any) -> list[str]:
        """The ids of the tasks that the worker holds now.

        Call it in the thread that receives messages, so that no message is received meanwhile. Celery has no list of
        all held tasks. A task that waits for its ETA or a rate limit is neither reserved nor active, but its message is
        not acknowledged. A task that has ended is acknowledged and is in neither set.

        When a connection is lost, Celery drops what waits, and the broker delivers it again, maybe to another worker.
        The dropped request is never acknowledged. It is part of a reference cycle, so it exists until Python's garbage
        collector runs, which an idle worker may not do for hours. So a message of an earlier connection is not held,
        unless the worker's pool has it: Celery drops nothing there, and a pool of threads has all tasks without an ETA.

        ``consumer``: the worker's Celery consumer. None: the worker shuts down, and any connection counts.
        """
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        return [
            str(request.id)
            for request, connection in list(self._requests.items())
            if (
                not request.acknowledged
                and (consumer is None or connection() is consumer.connection or _is_in_pool(request))
            )
            or request in state.active_requests
            or request in state.reserved_requests
        ]


def _is_in_pool(request: Any) -> bool:
    """Whether the worker has given the task to its pool, which runs it whatever happens to the connection."""
    return getattr(request, "_apply_result", None) is not None
