"""Dispatch messages for the runs that a commit made due, published after the commit at best effort.

The commit marks these runs as sent. If the broker does not take a message, the mark is removed, and a dispatcher
publishes it when the broker or the queue takes messages again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from celery_durable.model import DueRun
from celery_durable.store.engine import Store
from celery_durable.store.runs import sweeps
from celery_durable.tasks.publishing import PublishReport, SendState

logger = logging.getLogger("celery_durable.tasks")

_RETRY_DELAY = timedelta(seconds=1)
_CHUNK_SIZE = 500


class DispatchPublisher:
    def __init__(self, store: Store, publish: Callable[[Sequence[DueRun]], PublishReport]) -> None:
        self._store, self._publish = store, publish

    def publish(self, due_runs: Sequence[DueRun]) -> None:
        """Publish a dispatch message for each run; raises nothing if the broker or the database is down."""
        if not due_runs:
            return
        unsent = self._publish(due_runs).with_state(due_runs, SendState.UNSENT, SendState.REFUSED)
        if not unsent or self._store.is_write_locked_by_step:  # a step holds SQLite's only write lock
            return
        try:
            for start in range(0, len(unsent), _CHUNK_SIZE):
                chunk = unsent[start : start + _CHUNK_SIZE]
                self._store.transact_once(functools.partial(sweeps.undo_dispatch, due_runs=chunk, delay=_RETRY_DELAY))
        except Exception as exc:  # noqa: BLE001  # the commit stands; the sweep also finds lost messages by their age
            logger.info("%d dispatch messages were not sent; a sweep will publish them: %s", len(unsent), exc)
