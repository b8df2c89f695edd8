"""What a worker holds: the tasks of steps that it has received and that have not ended.

Kept by Celery's signal in the worker's parent process, in memory alone: nothing is written per task.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from celery import states

HEADER = "durable"
"""The header by which a message says that its task does a step."""
_MARKERS = 50


def is_requeued(task: Any, state: Any, retval: Any) -> bool:
    """Whether a task that ended has put its message back (``Reject(requeue=True)``), which then comes again.

    Not if it was acknowledged before the task ran: Celery rejects nothing then, and the message is gone.
    """
    return bool(state == states.REJECTED and getattr(retval, "requeue", False) and task.acks_late)


class HeldTasks:
    """The tasks of steps that this worker holds, and the markers that it has received last."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._requests: weakref.WeakSet[Any] = weakref.WeakSet()
        self._passed: deque[str] = deque(maxlen=_MARKERS)

    def received(self, request: Any) -> bool:
        """Note what the worker has received, before it waits for an ETA or a rate limit. True for a marker."""
        if request.name == self._marker:
            self._passed.append(str(request.id))
            return True
        if HEADER in request.request_dict:
            self._requests.add(request)
        return False

    def received_markers(self) -> list[str]:
        """The markers, oldest first."""
        return list(self._passed)

    def ids(self) -> list[str]:
        """The ids of the tasks that are here now; to be asked for in the thread that receives messages.

        Celery keeps no list of all of them: what waits for its ETA or a rate limit is neither reserved nor active,
        but its message is not acknowledged. A task that has ended is acknowledged, and in neither set.
        """
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        return [
            str(request.id)
            for request in list(self._requests)
            if not request.acknowledged or request in state.active_requests or request in state.reserved_requests
        ]
