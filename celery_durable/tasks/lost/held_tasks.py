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
        self._requests: weakref.WeakSet[Any] = weakref.WeakSet()
        self._received_markers: deque[str] = deque(maxlen=_MAX_MARKERS)

    def record_received(self, request: Any) -> bool:
        """Record a received task, before it waits for an ETA or a rate limit; returns True if it is a marker."""
        if request.name == self._marker_task:
            self._received_markers.append(str(request.id))
            return True
        if REFERENCE_HEADER in request.request_dict:
            self._requests.add(request)
        return False

    def received_markers(self) -> list[str]:
        """The markers, oldest first."""
        return list(self._received_markers)

    def list_ids(self) -> list[str]:
        """The ids of the tasks that the worker holds now.

        Call it in the thread that receives messages, so that no message is received meanwhile. Celery has no list of
        all held tasks. A task that waits for its ETA or a rate limit is neither reserved nor active, but its message is
        not acknowledged. A task that has ended is acknowledged and is in neither set.
        """
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        return [
            str(request.id)
            for request in list(self._requests)
            if not request.acknowledged or request in state.active_requests or request in state.reserved_requests
        ]
