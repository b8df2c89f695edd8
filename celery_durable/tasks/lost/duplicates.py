"""Copies of tasks that were answered meanwhile: a worker discards them before they cost a body.

A message comes twice where Redis restores one that a dead worker had not acknowledged, after its visibility timeout,
and where a task was sent again that was not lost after all. Only such messages are looked up: those that a broker
delivers again, and those with a delivery number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_durable.model import TaskReference
from celery_durable.runtime import Runtime
from celery_durable.store import lost_tasks
from celery_durable.store.database_identity import store_id
from celery_durable.store.engine import Store, Tx
from celery_durable.tasks.background_queue import BackgroundQueue
from celery_durable.tasks.lost.held import HEADER

logger = logging.getLogger("celery_durable.lost")

_HELD = timedelta(seconds=2)


class DuplicateFilter:
    """Looks up, in the background, whether the step of a copy still waits for it."""

    def __init__(self, store: Callable[[], Store], runtime: Runtime, background: BackgroundQueue) -> None:
        self._store, self._runtime, self._background = store, runtime, background

    def received(self, request: Any) -> None:
        """A worker has received a task: if it may be a copy, hold it for two seconds, and have it looked up.

        A look-up that takes longer is late: the task runs once more, as any step may.
        """
        reference = TaskReference.read(request.request_dict.get(HEADER))
        if reference is None or not (reference.delivery or request.delivery_info.get("redelivered")):
            return
        is_looked_up = self._background.submit(lambda: self._look_up(request.id, reference), what="A copy of a task")
        if is_looked_up and request.eta is None and hasattr(request, "_eta"):
            # Celery reads it after this signal, and has its timer hold the task; a free pool would begin at once.
            request._eta = self._runtime.wall_clock() + _HELD  # noqa: SLF001

    def _look_up(self, task_id: str, reference: TaskReference) -> None:
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        def is_over(tx: Tx) -> bool:
            return store_id(tx) == reference.store_id and not lost_tasks.is_out(tx, reference)

        if self._store().read(is_over):
            # Celery looks there once more before it hands a task to its pool.
            state.revoked.add(task_id)
            logger.info("Task %s is a copy of one that has been answered, and is discarded", task_id)
