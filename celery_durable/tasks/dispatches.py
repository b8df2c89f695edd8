"""Hints of what a commit made due: published after it, at best effort.

What a commit makes due counts as sent with it, so that no dispatcher sends it a second time. What then does not leave
is given back: it is offered again as soon as the broker, or the queue, takes something.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from celery_durable.model import DueRun
from celery_durable.store import sweeps
from celery_durable.store.engine import Store
from celery_durable.tasks.publishing import PublishReport, SendState

logger = logging.getLogger("celery_durable.tasks")

_REST = timedelta(seconds=1)
_CHUNK = 500


class DispatchPublisher:
    """Publishes for those who have committed."""

    def __init__(self, store: Store, publish: Callable[[Sequence[DueRun]], PublishReport]) -> None:
        self._store, self._publish = store, publish

    def wake(self, due_runs: Sequence[DueRun]) -> None:
        """Publish a hint for each; never raises for a broker or a database that is away."""
        if not due_runs:
            return
        kept = self._publish(due_runs).with_state(due_runs, SendState.UNSENT, SendState.REFUSED)
        if not kept or self._store.is_held_by_a_step:  # else SQLite's only write lock would be waited for
            return
        try:
            for start in range(0, len(kept), _CHUNK):
                given_back = kept[start : start + _CHUNK]
                self._store.attempt(functools.partial(sweeps.unsend, due_runs=given_back, delay=_REST))
        except Exception as exc:  # noqa: BLE001  # the commit stands; the rule of lost hints finds them too
            logger.info("%d hints that did not leave are found later: %s", len(kept), exc)
