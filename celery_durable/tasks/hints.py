"""Hints of what a commit made due: published after it, at best effort.

What a commit makes due counts as sent with it, so that no dispatcher sends it a second time. What then does not leave
is given back: it is offered again as soon as the broker, or the queue, takes something.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from celery_durable.model import Due
from celery_durable.store import sweeps
from celery_durable.store.engine import Store
from celery_durable.tasks.publishing import PublishReport, SendState

logger = logging.getLogger("celery_durable.tasks")

_REST = timedelta(seconds=1)
_CHUNK = 500


class Hints:
    """Publishes for those who have committed."""

    def __init__(self, store: Store, publish: Callable[[Sequence[Due]], PublishReport]) -> None:
        self._store, self._publish = store, publish

    def wake(self, dues: Sequence[Due]) -> None:
        """Publish a hint for each; never raises for a broker or a database that is away."""
        if not dues:
            return
        kept = self._publish(dues).with_state(dues, SendState.UNSENT, SendState.REFUSED)
        if not kept or self._store.is_held_by_a_step:  # else SQLite's only write lock would be waited for
            return
        try:
            for start in range(0, len(kept), _CHUNK):
                given_back = kept[start : start + _CHUNK]
                self._store.attempt(functools.partial(sweeps.unsend, dues=given_back, delay=_REST))
        except Exception as exc:  # noqa: BLE001  # the commit stands; the rule of lost hints finds them too
            logger.info("%d hints that did not leave are found later: %s", len(kept), exc)
