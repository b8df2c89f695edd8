"""The bootstep of a Celery worker: it starts and stops this library's jobs, and finds dead pool processes early.

It also removes the cancelled entries from the timer of the worker's main loop, which would keep them until their time.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured

from celery_durable.errors import DurableError
from celery_durable.model import REFERENCE_HEADER
from celery_durable.tasks.pools import pool_name, runs_workflows, stop_consuming
from celery_durable.tasks.redis_watchdog import RedisWatchdog

_CHECK_SECONDS = 0.5
_INTERNAL_PREFIX = "celery_durable."


class DurableStep(bootsteps.StartStopStep):
    """Keeps a worker off the workflow queue if its pool runs no workflows, and starts this library's jobs."""

    # A beat inside the worker is forked before our jobs use the database.
    requires = ("celery.worker.components:Pool", "celery.worker.components:Beat")

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._internals: Any = parent.app.durable.internals
        self._pool = pool_name(parent.pool_cls)
        self._startup_error: Exception | None = None
        self._timers: list[Any] = []
        self._redis_watchdog = RedisWatchdog()
        self._internals.unsupported_pool = None if runs_workflows(self._pool) else self._pool
        self._internals.has_threads_pool = self._pool == "threads"
        if not runs_workflows(self._pool):
            self._stop_consuming(parent.app)
        super().__init__(parent, **kwargs)

    def _stop_consuming(self, app: Any) -> None:
        """Leave the queue before the worker prints its queues; an error is kept and raised when the worker starts."""
        try:
            queue = self._internals.settings.queue
            stop_consuming(app, queue, self._pool, is_named_by_user=queue in self._internals.processes.named_queues)
        except (DurableError, ImproperlyConfigured) as exc:
            self._startup_error = exc

    def start(self, parent: Any) -> None:
        if self._startup_error is not None:
            raise self._startup_error
        self._internals.processes.start_worker(parent.hostname, self._pool, lambda: _find_consumer(parent))

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Check twice a second for dead pool processes, whether the worker stopped consuming, and for old timers."""
        for timer in self._timers:  # the worker calls this method again for each new connection to the broker
            timer.cancel()
        self._redis_watchdog.watch(parent.consumer)
        self._timers = [
            hub.call_repeatedly(_CHECK_SECONDS, check_for_dead_processes, parent.pool),
            hub.call_repeatedly(_CHECK_SECONDS, self._redis_watchdog.check),
            hub.call_repeatedly(_CHECK_SECONDS, CancelledTimers(hub.timer).remove_if_many),
        ]

    def stop(self, parent: Any) -> None:  # noqa: ARG002  # the bootstep's signature
        """Stop the jobs, but not the reports of held tasks: the pool, which stops later, still works on them."""
        self._internals.processes.stop_worker()

    def terminate(self, parent: Any) -> None:
        """Stop all: Celery kills the pool next, and sends no signal when the worker has ended."""
        self.stop(parent)
        self._internals.processes.stop_reports()


def _find_consumer(worker: Any) -> Any:
    """The worker's consumer while it receives messages or is about to; None when the worker shuts down."""
    states: Any = bootsteps
    return None if worker.blueprint.state in (states.CLOSE, states.TERMINATE) else worker.consumer


def check_for_dead_processes(pool: Any) -> None:
    """Make Celery check its pool now, not every 5 s, if a process with a task of ours is gone (LAW 8)."""
    from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

    pids = {request.worker_pid for request in list(state.active_requests) if _is_internal_or_step_task(request)}
    pids.discard(None)  # no process has accepted this task yet
    processes = getattr(getattr(pool, "_pool", None), "_pool", None) if pids else None
    if processes is not None and not pids <= {process.pid for process in processes if process.exitcode is None}:
        pool.maintain_pool()


def _is_internal_or_step_task(request: Any) -> bool:
    """Whether a request is for an internal task, or for a task that does a step. Its name may be for monitors alone."""
    return request.request_dict["task"].startswith(_INTERNAL_PREFIX) or REFERENCE_HEADER in request.request_dict


_FEW = 1_000


class CancelledTimers:
    """The cancelled entries of one timer. Only the main loop, which uses the timer, may call it."""

    # A prefork worker enters a timer for each task that has a time limit, and cancels it when the task ends. kombu only
    # marks the entry, and drops it at its time. Internal tasks have a limit of a day: a worker with 100 messages a
    # second would keep millions of entries. Measured: 400 bytes each.

    def __init__(self, timer: Any) -> None:
        self._timer, self._limit = timer, _FEW

    def remove_if_many(self) -> None:
        """Remove them if the timer has doubled since the last time, so that each entry is looked at twice or less."""
        timer = self._timer
        if len(timer) <= self._limit:
            return
        entries = [each for each in timer.queue if not each.entry.canceled]  # a sorted copy
        timer.clear()
        for eta, priority, entry in entries:
            timer.enter_at(entry, eta, priority)
        self._limit = 2 * len(entries) + _FEW
