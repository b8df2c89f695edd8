"""A worker's reports of the tasks that it holds, in its heartbeat row, from which dispatchers detect its death.

A job of its own (LAW 8) renews the row every two seconds, and every second while the tasks change. It also reports
whether Celery's main loop turns: a message in the worker's socket is in no list yet. A solo pool's loop runs the bodies
of tasks, so it may not turn for hours. Another loop that does not turn is stuck, and the log shows its stack.
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
from celery_durable.model import REFERENCE_HEADER, TaskReference
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.tasks.heartbeats import LANE
from celery_durable.tasks.pools import pool_name

logger = logging.getLogger("celery_durable.lost")

_LIST_SECONDS = 1.0
_RENEW_SECONDS = 2.0
_MAX_BYTES_PER_SECOND = 200_000
"""How much of a long list is written: a worker without a prefetch limit may hold thousands of tasks."""
_TURN_ITERATIONS = 2
"""How many iterations of the worker's loop are a turn, so that it reads messages that wait in its socket."""
_ASK_AGAIN_SECONDS = 5.0
"""When to ask the loop again to turn: a loop that ended with a lost connection has dropped the request."""
_STUCK_SECONDS = 20.0
_STACK_FRAMES = 16
"""How many frames of a stuck loop's stack to log: enough for a client library and its caller."""
_KEPT_SECONDS = 10.0
"""How long a list keeps the tasks that came over a connection which is lost: another worker lists them by then."""


class HeldTaskReporter:
    """Reports the held tasks of one worker, from `start` to `stop`.

    ``consumer`` returns the worker's consumer, which receives its messages; None when the worker shuts down.
    """

    def __init__(self, store: Callable[[], Store], runtime: Runtime, *, heartbeat_id: Callable[[], str | None]) -> None:
        self.held = HeldTasks()
        self._job = Job("durable-held-tasks", self._work, purpose="report its tasks", lane=LANE)
        self._store, self._runtime, self._heartbeat_id = store, runtime, heartbeat_id
        self._written, self._renew_at, self._list_at = "", -math.inf, -math.inf
        self._asked_at, self._is_loop_stuck = -math.inf, False

    def start(self, consumer: Callable[[], Any]) -> None:
        self._consumer, self._loop_thread = consumer, threading.get_ident()
        self._turned_at = self._runtime.monotonic()
        self._job.start()

    def stop(self, timeout: float) -> None:
        self._job.stop(timeout)

    def _work(self) -> float:
        if (heartbeat_id := self._heartbeat_id()) is not None:
            self._report(heartbeat_id)
        return _LIST_SECONDS

    def _report(self, heartbeat_id: str) -> None:
        now, consumer = self._runtime.monotonic(), self._consumer()
        has_turned = consumer is None or self._turned_at >= self._asked_at  # before the list is made
        held = heartbeats.encode_held(self.held.references(consumer, now))
        new = held if held != self._written and now >= self._list_at else None
        if new is None and now < self._renew_at:
            return
        is_current = has_turned and held == (new or self._written)
        is_stuck = self._check_loop(consumer, 0.0 if has_turned else now - self._turned_at)
        if not self._store().transact_once(
            lambda tx: heartbeats.renew_worker(tx, heartbeat_id, held=new, is_current=is_current, is_stuck=is_stuck)
        ):
            self._written = ""
            return
        self._renew_at = now + _RENEW_SECONDS
        if new is not None:
            self._written, self._list_at = new, now + len(new) / _MAX_BYTES_PER_SECOND
        # After the renewal: what has reached the worker by then is in the list that is made when the loop has turned.
        if consumer is not None and (has_turned or now >= self._asked_at + _ASK_AGAIN_SECONDS):
            self._asked_at = self._runtime.monotonic()
            consumer.call_soon(self._turn, consumer, _TURN_ITERATIONS)

    def _turn(self, consumer: Any, iterations: int) -> None:
        if iterations:
            consumer.call_soon(self._turn, consumer, iterations - 1)
        else:
            self._turned_at = self._runtime.monotonic()

    def _check_loop(self, consumer: Any, seconds: float) -> bool:
        """Whether the loop is stuck that has not turned for these seconds, and log when that changes.

        A solo pool's loop is not stuck: it runs the bodies of tasks.
        """
        was_stuck = self._is_loop_stuck
        self._is_loop_stuck = seconds >= _STUCK_SECONDS and pool_name(type(consumer.pool)) != "solo"
        if self._is_loop_stuck and not was_stuck:
            frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  # documented, for debuggers
            logger.warning(
                "The main loop of this worker has been stuck for %.0f s: it receives and starts no tasks, and its "
                "tasks go to other workers. The stack of the loop:\n%s",
                seconds,
                "".join(traceback.format_stack(frame, _STACK_FRAMES)),
            )
        elif was_stuck and not self._is_loop_stuck:
            logger.info("The main loop of this worker runs again")
        return self._is_loop_stuck


class HeldTasks:
    """The tasks of steps that a worker has received and that have not ended, in memory alone."""

    def __init__(self) -> None:
        # Each request with its reference, and the connection over which it came.
        self._requests: dict[Any, tuple[TaskReference, Any]] = {}
        self._connection: Any = None
        self._kept_until = -math.inf

    def record_received(self, request: Any, connection: Any) -> None:
        """Record a task, and the connection over which it came, before it waits for an ETA or a rate limit."""
        reference = TaskReference.read(request.request_dict.get(REFERENCE_HEADER))
        if reference is not None:
            self._requests[request] = reference, connection

    def references(self, consumer: Any, now: float) -> list[TaskReference]:
        """The tasks that the worker holds now, from one thread at a time. ``consumer`` None: the worker shuts down.

        Celery has no list of them. A task that waits for its ETA or a rate limit is neither reserved nor active, but
        its message is not acknowledged. A task that has ended is acknowledged and is in neither set.

        When a connection is lost, Celery drops what waits, and the broker delivers it again. So a message of an earlier
        connection is not held for long, unless the worker's pool has it: Celery drops nothing there, and a pool of
        threads has all tasks without an ETA.
        """
        from celery.worker import state  # noqa: PLC0415  # a process that is no worker does not need Celery's

        if consumer is not None and consumer.connection is not self._connection:
            self._connection, self._kept_until = consumer.connection, now + _KEPT_SECONDS
        keeps_all = consumer is None or now < self._kept_until
        held = []
        for request, (reference, connection) in list(self._requests.items()):
            is_with_worker = keeps_all or connection is self._connection or _is_in_pool(request)
            is_waiting = not request.acknowledged and is_with_worker
            if is_waiting or request in state.active_requests or request in state.reserved_requests:
                held.append(reference)
            else:
                del self._requests[request]
        return held


def _is_in_pool(request: Any) -> bool:
    """Whether the worker has given the task to its pool, which runs it whatever happens to the connection."""
    return getattr(request, "_apply_result", None) is not None
