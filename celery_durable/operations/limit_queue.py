"""The queues of limits: serve those that wait after a commit that has freed something, and all of them in a job.

No pass and no commit depends on it: what a process leaves undone, the job of another one does within a second.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from celery_durable.config import Settings
from celery_durable.model import DueRun
from celery_durable.store.engine import Store
from celery_durable.store.engine.time_limits import LOOP
from celery_durable.store.instances import limit_waits
from celery_durable.store.runs import limits
from celery_durable.store.runs.holds import LimitKey, Waiter
from celery_durable.store.runs.limits import Served

logger = logging.getLogger("celery_durable.limits")

_CHECK_SECONDS, _BACKLOG_SECONDS = 1.0, 0.05
_MAX_WAKES, _MAX_KEYS = 100, 100
"""Grants and keys in one run of the job."""
_MAX_ROUNDS = 20
"""How often one call serves a key."""


class LimitQueue:
    """Serves limits, and wakes the runs whose steps have got something."""

    def __init__(self, store: Store, settings: Settings, publish_runs: Callable[[Sequence[DueRun]], None]) -> None:
        self._store, self._settings, self._publish = store, settings, publish_runs
        self._last_key: LimitKey | None = None

    def serve_after_commit(self, served: Served) -> None:
        """Wake those that a commit has granted something, and serve the limits that it has left. Never raises."""
        try:
            self.serve(served.unfinished, served.granted)
        except Exception as exc:  # noqa: BLE001  # the commit has happened, and a job does the rest
            logger.warning("Limits are served by a later check: %s", str(exc).partition("\n")[0])

    def serve(self, keys: Iterable[LimitKey], granted: Sequence[Waiter] = (), *, skip_locked: bool = False) -> None:
        """Grant what is free of these limits, and wake those that have got something."""
        waiters, unserved = list(granted), sorted(set(keys))
        for _ in range(_MAX_ROUNDS):
            freed: set[LimitKey] = set()
            for key in unserved:
                served = self._store.transact(functools.partial(limits.serve, key=key), timeouts=LOOP)
                waiters += served.granted
                freed |= served.unfinished
            for waiter in waiters:
                freed |= self._wake(waiter, skip_locked=skip_locked)
            waiters, unserved = [], sorted(freed)
            if not unserved:
                return

    def _wake(self, waiter: Waiter, *, skip_locked: bool) -> set[LimitKey]:
        settings = self._settings
        wake = functools.partial(
            limit_waits.wake,
            waiter=waiter,
            skip_locked=skip_locked,
            grace=timedelta(seconds=settings.grace_seconds),
            lease=settings.lease,
        )
        woken = self._store.transact(wake, timeouts=LOOP)
        if woken.due_run is not None:
            self._publish([woken.due_run])
        return set(woken.freed)

    def run_job(self) -> float:
        """Do what other processes have left undone. Returns after how many seconds to call it again."""
        due = self._store.read(functools.partial(limit_waits.find_to_wake, limit=_MAX_WAKES), timeouts=LOOP)
        keys = self._store.read(
            functools.partial(limit_waits.find_keys, after=self._last_key, limit=_MAX_KEYS), timeouts=LOOP
        )
        self._last_key = keys[-1] if len(keys) == _MAX_KEYS else None
        self.serve(keys, due, skip_locked=True)  # a lock that somebody holds for long would stop the job
        return _BACKLOG_SECONDS if len(due) == _MAX_WAKES or len(keys) == _MAX_KEYS else _CHECK_SECONDS
