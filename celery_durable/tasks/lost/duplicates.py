"""Duplicates: copies of tasks that have been answered already; a worker discards them before it runs their bodies.

A message comes twice in two cases. Redis restores a message after its visibility timeout if a dead worker had not
acknowledged it. And a dispatcher may send a task again that was not lost after all. So the worker looks up only
messages that the broker marks as redelivered, and messages whose `TaskReference.delivery` is above 0: the task was sent
again because it was considered lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_durable.model import REFERENCE_HEADER, TaskReference
from celery_durable.runtime import Runtime
from celery_durable.store import lost_tasks
from celery_durable.store.database_identity import find_database_id
from celery_durable.store.engine import Store, Tx
from celery_durable.tasks.background_queue import BackgroundQueue

logger = logging.getLogger("celery_durable.lost")

_DELAY = timedelta(seconds=2)


class DuplicateFilter:
    """Looks up in the background whether a step still waits for a task that may be a copy."""

    def __init__(self, store: Callable[[], Store], runtime: Runtime, background: BackgroundQueue) -> None:
        self._store, self._runtime, self._background = store, runtime, background

    def check(self, request: Any) -> None:
        """If the received task may be a copy, delay it for two seconds and look it up in the background.

        If the look-up takes longer, the task runs once more, as any step may.
        """
        reference = TaskReference.read(request.request_dict.get(REFERENCE_HEADER))
        if reference is None or not (reference.delivery or request.delivery_info.get("redelivered")):
            return
        is_queued = self._background.submit(
            lambda: self._revoke_if_answered(request.id, reference), what="A copy of a task"
        )
        if is_queued and request.eta is None and hasattr(request, "_eta"):
            # The race: without the delay a free pool process would start the task before the look-up has ended.
            # Celery reads `_eta` after this signal, and its timer then holds the task.
            request._eta = self._runtime.wall_clock() + _DELAY  # noqa: SLF001

    def _revoke_if_answered(self, task_id: str, reference: TaskReference) -> None:
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        def is_over(tx: Tx) -> bool:
            return find_database_id(tx) == reference.database_id and not lost_tasks.is_unanswered(tx, reference)

        if self._store().read(is_over):
            # Celery checks this set once more before it gives a task to its pool.
            state.revoked.add(task_id)
            logger.info("The worker discards a copy of task %s, which has been answered already", task_id)
