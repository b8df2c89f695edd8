"""The start and stop of the internal jobs with Celery's processes."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

from billiard.exceptions import WorkerLostError
from celery import Celery, signals
from celery.utils.text import str_to_list

from celery_durable import tasks
from celery_durable.config import Settings
from celery_durable.errors import DurableError
from celery_durable.event_loop import event_loop
from celery_durable.housekeeping import CallQueue
from celery_durable.runtime import real_monotonic
from celery_durable.signals import listen
from celery_durable.store.engine import Store
from celery_durable.store.lanes import steps
from celery_durable.store.runs import claims, releases, step_rows
from celery_durable.store.schema.dialects import POSTGRESQL
from celery_durable.tasks import beat_schedules
from celery_durable.tasks.dispatcher import Dispatcher
from celery_durable.tasks.heartbeats import ProcessHeartbeat
from celery_durable.tasks.lost.reporter import HeldTaskReporter
from celery_durable.tasks.pools import import_for_passes
from celery_durable.tasks.process_stops import StopFlag
from celery_durable.tasks.publishing import Publisher
from celery_durable.tasks.start import START
from celery_durable.tasks.task_ends import TaskEndHandler
from celery_durable.tasks.task_starts import guard_starts

logger = logging.getLogger("celery_durable")

_STOP_SECONDS = 3.0


class ProcessParts(Protocol):
    """The parts of a `Durable` that `CeleryProcesses` starts, stops and uses."""

    stop_flag: StopFlag
    celery_app: Celery | None

    @property
    def app(self) -> Celery: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def store(self) -> Store: ...
    @property
    def publisher(self) -> Publisher: ...
    @property
    def dispatcher(self) -> Dispatcher: ...
    @property
    def heartbeat(self) -> ProcessHeartbeat: ...
    @property
    def background_queue(self) -> CallQueue: ...
    @property
    def held_task_reporter(self) -> HeldTaskReporter: ...
    @property
    def task_end_handler(self) -> TaskEndHandler: ...
    @property
    def unsupported_pool(self) -> str | None: ...
    def read_settings(self) -> Settings: ...


class CeleryProcesses:
    """Starts and stops the internal jobs with Celery's beat and workers, whose signals reach all apps of a process."""

    def __init__(self, internals: ProcessParts) -> None:
        self._internals = internals
        self.named_queues: frozenset[str] = frozenset()
        """The queues that the worker's option ``-Q`` names."""

    def connect(self, app: Celery) -> None:
        """Connect the receivers of Celery's signals. Called once, by `Durable.init_app`."""
        app.on_after_configure.connect(self._configure, weak=False)  # sent again if the app's configuration is replaced
        if app.configured:  # type: ignore[attr-defined]  # celery-types lacks it
            self._configure()
        listen(signals.beat_init, self._start_beat)
        listen(signals.celeryd_init, self._read_worker_options)
        listen(signals.worker_init, self._prepare_worker)
        listen(signals.worker_shutting_down, self._set_stop_flag)
        listen(signals.task_failure, self._release_dead_claim)
        listen(signals.worker_shutdown, self._end_worker)
        listen(signals.worker_process_shutdown, _stop_event_loop)
        listen(signals.task_received, self._record_received)
        self._internals.task_end_handler.connect()

    def _is_own(self, app: Any) -> bool:
        return app is self._internals.celery_app

    def _configure(self, **_: Any) -> None:
        # These settings are not kept: the application may still change them before their first use.
        settings = self._internals.read_settings()
        if settings.dispatcher in ("beat", "both"):
            tasks.add_beat_entry(self._internals.app.conf.beat_schedule, settings.queue)

    def _start_beat(self, sender: Any, **_: Any) -> None:
        if not self._is_own(sender.app):
            return
        parts = self._internals
        try:
            beat_schedules.note_occurrences(sender.scheduler, START)
            if parts.settings.dispatcher in ("beat", "both"):
                tasks.ensure_beat_entry(sender.scheduler, parts.settings.queue)
                tasks.skip_superfluous_sweeps(sender.scheduler)
                parts.heartbeat.register("dispatcher", f"beat@{socket.gethostname()}")
                parts.heartbeat.start()
                parts.dispatcher.start()
                atexit.register(self.stop_jobs)  # Celery has no signal for the end of beat
        except DurableError as exc:
            # Celery only logs an exception of a signal's receiver: beat would run without a dispatcher.
            logger.critical("celery beat does not start: %s", exc)
            raise SystemExit(1) from exc

    def _read_worker_options(self, instance: Any, options: Any, **_: Any) -> None:
        if self._is_own(instance.app):
            self.named_queues = frozenset(str_to_list(options.get("queues")) or ())

    def _prepare_worker(self, sender: Any, **_: Any) -> None:
        if self._is_own(sender.app):
            self._internals.stop_flag.clear()
            guard_starts(self._internals.app, self._internals.task_end_handler.is_superfluous)
            import_for_passes()
            try:
                _compile_for_passes(self._internals.store)
            except DurableError as exc:  # the first pass of each process reports it again
                logger.warning("The worker's processes compile their statements themselves: %s", exc)

    def _set_stop_flag(self, **_: Any) -> None:
        self._internals.stop_flag.set()

    def start_worker(self, node: str, pool: str, consumer: Callable[[], Any]) -> None:
        """Start the heartbeat and the reports, and the dispatcher if settings want one here. For the bootstep.

        ``consumer``: see `HeldTaskReporter`.
        """
        parts = self._internals
        parts.task_end_handler.set_main_loop_pid(os.getpid() if pool == "prefork" else None)
        parts.heartbeat.register("worker", node, pool=pool)
        parts.heartbeat.start()
        parts.heartbeat.is_row_needed = True
        parts.held_task_reporter.start(consumer)
        if parts.settings.dispatcher in ("worker", "both") and parts.unsupported_pool is None:
            parts.dispatcher.start()

    def stop_worker(self) -> None:
        """Stop the jobs. The worker's bootstep calls it before the pool stops, also if Celery sent no signal."""
        self._internals.stop_flag.set()
        self.stop_jobs()

    def stop_reports(self) -> None:
        """Stop to report: the worker's pool has ended, or Celery is about to kill it."""
        self._internals.held_task_reporter.stop(_STOP_SECONDS)
        self._internals.heartbeat.is_row_needed = False
        self._internals.heartbeat.stop(_STOP_SECONDS)

    def _record_received(self, sender: Any, request: Any, **_: Any) -> None:
        if self._is_own(sender.app):
            self._internals.held_task_reporter.held.record_received(request, sender.connection)

    def _end_worker(self, sender: Any, **_: Any) -> None:
        if self._is_own(sender.app):
            self.stop_reports()

    def stop_jobs(self) -> None:
        """End the jobs of this process; waits `_STOP_SECONDS` at most, so that a slow database delays nothing."""
        end, made = real_monotonic() + _STOP_SECONDS, vars(self._internals)
        for name in ("dispatcher", "heartbeat"):
            if name in made:
                made[name].stop(max(0.0, end - real_monotonic()))
        self._internals.background_queue.finish(max(0.0, end - real_monotonic()))

    def _release_dead_claim(self, sender: Any, task_id: str, exception: Any, args: Any, **_: Any) -> None:
        """Release the claim of a pool process that died in `advance`, so that the run need not wait for the lease."""
        parts = self._internals
        if self._is_own(sender.app) and sender.name == tasks.ADVANCE and isinstance(exception, WorkerLostError):
            parts.background_queue.add(
                lambda: tasks.release_dead_claim(
                    parts.store, parts.publisher.publish, task_id, args, grace=parts.settings.grace, died=str(exception)
                ),
                what=f"The claim of task {task_id}, whose process died,",
            )


def _stop_event_loop(**_: Any) -> None:
    event_loop.stop()  # pool processes call no atexit functions


def _compile_for_passes(store: Store) -> None:
    """Compile the statements of most passes before the pool forks: claim, record a finished step, end the run (10 ms).

    Only for PostgreSQL: SQLAlchemy compiles for MariaDB as it finds the server when it connects.
    """
    if store.database is POSTGRESQL:
        for each in (
            claims.claim_run,
            *step_rows.HOT_STATEMENTS,
            *steps.choose_hot_statements(),
            *releases.HOT_STATEMENTS,
        ):
            store.compiled(each)
