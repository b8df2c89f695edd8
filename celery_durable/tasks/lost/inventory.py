"""A worker's answers to inventories, and the renewal of its heartbeat row, from which dispatchers detect its death.

Every two seconds, one UPDATE renews the row and one SELECT reads whether an inventory was requested. This is a job of
its own (LAW 8); Celery's main loop only makes the list of held tasks. A loop that does not answer is
stuck, and nothing else in the worker shows that. Then the log shows the stack of the loop.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from celery_durable.housekeeping import Job
from celery_durable.runtime import Runtime
from celery_durable.store import inventories
from celery_durable.store.engine import Store
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.inventories import RENEW_INTERVAL
from celery_durable.tasks.heartbeats import LANE
from celery_durable.tasks.lost.detection import STUCK_LOOP_SECONDS
from celery_durable.tasks.lost.held_tasks import HeldTasks
from celery_durable.tasks.pools import pool_name

logger = logging.getLogger("celery_durable.lost")

_LOOP_ITERATIONS = 2
"""How many iterations the worker's loop runs before it answers, so that it reads messages that wait in its socket."""
_REQUEST_AGAIN_SECONDS = 5.0
"""When to ask the loop again: a loop that ended with a lost connection has dropped the request."""
_STACK_FRAMES = 16
"""How many frames of a stuck loop's stack to log: enough for a client library and its caller."""


class InventoryReporter:
    """Answers inventories for one worker, from `start` to `stop`.

    ``heartbeat_id`` returns the id of the worker's heartbeat row, or None if there is none.
    """

    def __init__(
        self, store: Callable[[], Store], runtime: Runtime, held: HeldTasks, *, heartbeat_id: Callable[[], str | None]
    ) -> None:
        self._store, self._runtime, self._held, self._heartbeat_id = store, runtime, held, heartbeat_id
        self._job = Job("durable-inventory", self._try_report, lane=LANE)
        self._consumer: Callable[[], Any] = lambda: None
        self._stored_markers: list[str] = []
        self._answered_number, self._requested_number, self._requested_at = 0, 0, -math.inf
        self._answer: tuple[int, list[str]] | None = None
        self._unanswered_since: float | None = None
        self._is_loop_stuck = False
        self._loop_thread = 0
        self._is_failing = False

    def record_received(self, request: Any, connection: Any) -> None:
        """Record that the worker has received a task over a connection; a marker is reported at once."""
        if self._held.record_received(request, connection):
            self._job.wake()

    def start(self, consumer: Callable[[], Any]) -> None:
        """Start the job; ``consumer`` returns the worker's Celery consumer, or None if it receives no messages."""
        self._consumer, self._loop_thread = consumer, threading.get_ident()
        self._job.start()

    def stop(self, timeout: float) -> None:
        """End the job, and wait for it for at most ``timeout`` seconds."""
        self._job.stop(timeout)

    def _try_report(self) -> float:
        try:
            if (heartbeat_id := self._heartbeat_id()) is not None:
                self._report(heartbeat_id)
        except Exception as exc:  # noqa: BLE001  # an outage must not end the job; the next renewal tries again
            if not self._is_failing:
                logger.warning("This worker cannot report its tasks and will retry: %s", describe_fault(exc))
            self._is_failing = True
        else:
            self._is_failing = False
        return RENEW_INTERVAL.total_seconds()

    def _report(self, heartbeat_id: str) -> None:
        received_markers, store = self._held.received_markers(), self._store()
        if received_markers != self._stored_markers:
            store.transact_once(lambda tx: inventories.record_received_markers(tx, heartbeat_id, received_markers))
            self._stored_markers = received_markers
        number = store.transact_once(lambda tx: inventories.renew_worker(tx, heartbeat_id))
        answer = self._answer
        if answer is not None and answer[0] > self._answered_number:
            store.transact_once(lambda tx: inventories.answer_inventory(tx, heartbeat_id, *answer))
            self._answered_number = answer[0]
        if number > self._answered_number:
            self._request_list(number)

    def _request_list(self, number: int) -> None:
        """Make the worker's main loop list the held tasks."""
        now = self._runtime.monotonic()
        if number == self._requested_number and now - self._requested_at < _REQUEST_AGAIN_SECONDS:
            return
        self._requested_number, self._requested_at = number, now
        consumer = self._consumer()
        if consumer is None:  # the worker receives no messages now, so this job can make the list
            self._list_held_tasks(None, number)
            return
        if self._unanswered_since is None:
            self._unanswered_since = now
        self._log_stuck_loop(now - self._unanswered_since, consumer)
        consumer.call_soon(self._list_after_iterations, consumer, number, _LOOP_ITERATIONS)

    def _log_stuck_loop(self, seconds: float, consumer: Any) -> None:
        """Log the loop's stack once if the loop is stuck; a solo pool's loop is not, since it runs the task bodies."""
        if self._is_loop_stuck or seconds < STUCK_LOOP_SECONDS or pool_name(type(consumer.pool)) == "solo":
            return
        self._is_loop_stuck = True
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  # documented, for debuggers
        logger.warning(
            "The main loop of this worker has been stuck for %.0f s: it receives and starts no tasks, and its tasks "
            "go to other workers. The stack of the loop:\n%s",
            seconds,
            "".join(traceback.format_stack(frame, _STACK_FRAMES)),
        )

    def _list_after_iterations(self, consumer: Any, number: int, iterations: int) -> None:
        if iterations:
            consumer.call_soon(self._list_after_iterations, consumer, number, iterations - 1)
        else:
            self._list_held_tasks(consumer, number)

    def _list_held_tasks(self, consumer: Any, number: int) -> None:
        # One assignment: this may run in the main loop, while the reporting thread reads the number and the ids.
        self._answer = (number, self._held.list_ids(consumer))
        self._unanswered_since = None
        if self._is_loop_stuck:
            self._is_loop_stuck = False
            logger.info("The main loop of this worker runs again")
        self._job.wake()
