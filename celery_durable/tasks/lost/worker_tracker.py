"""The worker's part of the search for lost tasks: the tasks that it holds, and the pool processes that died."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from celery import signals

from celery_durable.housekeeping import CallQueue
from celery_durable.model import REFERENCE_HEADER, TaskReference
from celery_durable.runtime import Runtime
from celery_durable.store import lost_tasks
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.server_info import find_database_id
from celery_durable.tasks.lost.held_tasks import is_requeued
from celery_durable.tasks.lost.reporter import HeldTaskReporter

logger = logging.getLogger("celery_durable.lost")


class LossReporter(Protocol):
    """Reports losses (`AnswerOperations`)."""

    def report_lost(self, lost: Any, *, why: str) -> int: ...


class WorkerLossTracker:
    """Listens to Celery's signals in a worker, for one app."""

    def __init__(
        self,
        store: Callable[[], Store],
        runtime: Runtime,
        background: CallQueue,
        loss_reporter: Callable[[], LossReporter],
        *,
        heartbeat_id: Callable[[], str | None],
    ) -> None:
        self._store, self._runtime, self._background, self._loss_reporter = store, runtime, background, loss_reporter
        self.reporter = HeldTaskReporter(store, runtime, heartbeat_id=heartbeat_id)

    def connect(self, is_own_app: Callable[[Any], bool]) -> None:
        """Listen to the signals; ``is_own_app``: whether a sender's app is the app of this tracker."""

        def received(sender: Any, request: Any, **_: Any) -> None:
            if is_own_app(sender.app):
                self.reporter.held.record_received(request, sender.connection)

        def retried(sender: Any, request: Any, reason: Any, **_: Any) -> None:
            if is_own_app(sender.app):
                self._record(request, lambda tx, it: lost_tasks.record_retry(tx, it, sent_in=self._retry_delay(reason)))

        def ended(sender: Any, task: Any, state: Any, retval: Any, **_: Any) -> None:
            if is_own_app(sender.app) and is_requeued(task, state, retval):
                self._record(task.request, lambda tx, it: lost_tasks.record_retry(tx, it, sent_in=timedelta(0)))

        signals.task_postrun.connect(ended, weak=False)
        signals.task_received.connect(received, weak=False)
        signals.task_retry.connect(retried, weak=False)

    def record_process_death(self, reference: object, *, why: str) -> bool:
        """Report the death of a task's pool process in the background. False: it cannot be reported."""
        found = TaskReference.read(reference)
        if found is None:
            return False

        def report() -> None:
            if self._store().read(find_database_id) == found.database_id:
                self._loss_reporter().report_lost([(found, None)], why=why)

        return self._background.add(report, what=f"A task of {found.ref} whose process died")

    def record_replacement(self, request: Any) -> None:
        """Record that a task has replaced itself: no search can find those that do its work now."""
        self._record(request, lost_tasks.record_replacement)

    def _record(self, request: Any, note: Callable[[Tx, TaskReference], None]) -> None:
        reference = TaskReference.read(request.get(REFERENCE_HEADER))
        if reference is None:
            return
        try:
            self._store().transact_once(
                lambda tx: note(tx, reference) if find_database_id(tx) == reference.database_id else None
            )
        except Exception as exc:  # noqa: BLE001  # at worst the search sends the task once more
            logger.warning(
                "The worker cannot record that a task of %s was retried, requeued or replaced: %s", reference.ref, exc
            )

    def _retry_delay(self, reason: Any) -> timedelta:
        """For how long a retry waits; until then the message may be in the broker, and no worker holds the task."""
        when = getattr(reason, "when", None)
        if isinstance(when, (int, float)):
            return timedelta(seconds=max(0.0, when))
        if isinstance(when, datetime):
            aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
            return max(timedelta(0), aware - self._runtime.wall_clock())
        return timedelta(0)
