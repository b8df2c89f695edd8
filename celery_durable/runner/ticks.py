"""Ticks: passes in the caller's own process, for deployments that use a scheduler such as cron instead of workers.

They may run beside each other and beside workers: the claim makes that safe (LAW 2 of docs/design.md).
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

from celery_durable.config import Settings
from celery_durable.model import DueRun, PassResult
from celery_durable.operations.topics import continue_abandoned_emission
from celery_durable.redispatch import Redispatch
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.runs import schedule, sweeps
from celery_durable.store.runs.claims import RESUMING, STARTING

logger = logging.getLogger("celery_durable.runner")

_MAX_RELEASED_CLAIMS = 100
"""The maximum number of expired claims that one tick releases, per queue and priority."""


class Ticker:
    """Finds due runs and advances them. ``advance``: like `Runner.advance`."""

    def __init__(self, store: Store, settings: Settings, runtime: Runtime, advance: Callable[..., PassResult]) -> None:
        self._store, self._settings, self._runtime, self._advance_run = store, settings, runtime, advance
        self._redispatch = Redispatch(
            timedelta(seconds=settings.redispatch_seconds), timedelta(seconds=settings.redispatch_max_seconds)
        )

    def tick(self, *, max_instances: int, max_steps: int | None = None) -> int:
        """Advance each due run once, resumed runs first; returns the number of passes.

        It ends after ``max_instances`` passes, or with the pass in which ``durable_pass_seconds`` are over.
        """
        if not self._settings.is_execution_enabled:
            return 0
        started, passes = self._runtime.monotonic(), 0
        for due in self._take_due_runs():
            passes += self._advance(due, max_steps)
            if passes >= max_instances or self._runtime.monotonic() - started > self._settings.pass_seconds:
                break
        return passes

    def _take_due_runs(self) -> Iterator[DueRun]:
        taken_pks: list[int] = []  # a released run is due again, but each run is advanced once per tick
        while continue_abandoned_emission(self._store):
            pass
        for priority in (RESUMING, STARTING):
            yield from self._store.transact(functools.partial(self._release_dead_claims, priority=priority))
            while True:
                take = functools.partial(
                    sweeps.take_due_run,
                    priority=priority,
                    published_within=self._settings.grace,
                    redispatch=self._redispatch,
                    excluded_pks=taken_pks,
                )
                if (found := self._store.transact(take)) is None:
                    break
                pk, due = found
                taken_pks.append(pk)
                yield due

    def _release_dead_claims(self, tx: Tx, *, priority: int) -> list[DueRun]:
        return [
            due
            for queue in schedule.read(tx).queues_by_due_time(priority)
            for due in sweeps.sweep_expired_claims(
                tx,
                queue=queue,
                priority=priority,
                limit=_MAX_RELEASED_CLAIMS,
                redispatch=self._redispatch,
                lease=self._settings.lease,
            )
        ]

    def _advance(self, due: DueRun, max_steps: int | None) -> int:
        """Run one pass and return 1; 0 if another process has the run, or the database failed for a moment."""
        task_id = f"tick:{self._runtime.new_token()}"
        try:
            result = self._advance_run(due.ref, task_id=task_id, node=socket.gethostname(), max_steps=max_steps)
        except Exception as exc:
            if not self._store.is_transient(exc):
                raise
            logger.warning("A tick could not advance %s, a later tick tries again: %s", due.ref, describe_fault(exc))
            return 0
        return int(result.was_executed)
