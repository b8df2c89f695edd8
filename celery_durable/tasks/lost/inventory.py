"""A worker's answers to inventories, and its short heartbeat, from which the dispatchers detect its death.

Every two seconds, one UPDATE renews the heartbeat and one SELECT reads whether an inventory was requested. This happens
on a thread of its own (LAW 8); Celery's main loop only makes the list of held tasks. A loop that does not answer is
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

from celery_durable.runtime import Runtime
from celery_durable.store import inventories
from celery_durable.store.engine import Store
from celery_durable.store.inventories import BEAT
from celery_durable.tasks.fork_safety import ForkSafeThread
from celery_durable.tasks.lost.detection import UNRESPONSIVE_SECONDS
from celery_durable.tasks.lost.held import HeldTasks
from celery_durable.tasks.pools import pool_name

logger = logging.getLogger("celery_durable.lost")

_TURNS = 2
"""How many turns the worker's loop makes before it answers, so that it reads messages that wait in its socket."""
_AGAIN_SECONDS = 5.0
"""When to ask the loop again: a loop that ended with a lost connection has dropped the request."""
_FRAMES = 16
"""How many frames of a stuck loop's stack to log: enough for a client library and its caller."""


class InventoryReporter(ForkSafeThread):
    """Answers inventories for one worker, from `start` to `stop`.

    ``row`` returns the id of the worker's heartbeat row, or None if there is none.
    """

    def __init__(
        self, store: Callable[[], Store], runtime: Runtime, held: HeldTasks, *, row: Callable[[], str | None]
    ) -> None:
        super().__init__()
        self._store, self._runtime, self._held, self._row = store, runtime, held, row
        self._stop, self._soon = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._consumer: Callable[[], Any] = lambda: None
        self._written: list[str] = []
        self._answered, self._asked, self._asked_at = 0, 0, -math.inf
        self._answer: tuple[int, list[str]] | None = None
        self._waits_since: float | None = None
        self._stands_still = False
        self._loop_thread = 0
        self._is_blind = False

    def received(self, request: Any) -> None:
        """Record that the worker has received a task; a marker is reported at once."""
        if self._held.received(request):
            self._soon.set()

    def start(self, consumer: Callable[[], Any]) -> None:
        """Start the thread; ``consumer`` returns the worker's Celery consumer, or None if it receives no messages."""
        self.stop()
        self._consumer, self._stop, self._loop_thread = consumer, threading.Event(), threading.get_ident()
        self.reset_fork_lock()
        self._thread = threading.Thread(target=self._loop, args=(self._stop,), name="durable-roll-call", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 0.0) -> None:
        """Tell the thread to end, and wait for it for at most ``timeout`` seconds."""
        self._stop.set()
        self._soon.set()
        if self._thread is not None and timeout > 0:
            self._thread.join(timeout)

    def _loop(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self.fork_lock:
                self._beat()
            self._soon.wait(BEAT.total_seconds())
            self._soon.clear()

    def _beat(self) -> None:
        row = self._row()
        if row is None:
            return
        try:
            self._report(row)
        except Exception as exc:  # noqa: BLE001  # an outage must not end the thread; the next beat tries again
            if not self._is_blind:
                logger.warning("This worker cannot say what it holds, trying on: %s", exc)
            self._is_blind = True
        else:
            self._is_blind = False

    def _report(self, row: str) -> None:
        received_markers, store = self._held.received_markers(), self._store()
        if received_markers != self._written:
            store.transact_once(lambda tx: inventories.note_passed(tx, row, received_markers))
            self._written = received_markers
        number = store.transact_once(lambda tx: inventories.beat(tx, row))
        answer = self._answer
        if answer is not None and answer[0] > self._answered:
            store.transact_once(lambda tx: inventories.answer(tx, row, *answer))
            self._answered = answer[0]
        if number > self._answered:
            self._ask(number)

    def _ask(self, number: int) -> None:
        """Make the worker's main loop list the held tasks."""
        now = self._runtime.monotonic()
        if number == self._asked and now - self._asked_at < _AGAIN_SECONDS:
            return
        self._asked, self._asked_at = number, now
        consumer = self._consumer()
        if consumer is None:  # the worker receives no messages now, so this thread can make the list
            self._list(number)
            return
        if self._waits_since is None:
            self._waits_since = now
        self._report_stillness(now - self._waits_since, consumer)
        consumer.call_soon(self._turn, consumer, number, _TURNS)

    def _report_stillness(self, seconds: float, consumer: Any) -> None:
        """Log the loop's stack once if the loop is stuck; a solo pool's loop is not, since it runs the task bodies."""
        if self._stands_still or seconds < UNRESPONSIVE_SECONDS or pool_name(type(consumer.pool)) == "solo":
            return
        self._stands_still = True
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  # documented, for debuggers
        logger.warning(
            "The main loop of this worker has not turned for %.0f s: it receives and starts no tasks, and what it "
            "holds goes to other workers. It stands here:\n%s",
            seconds,
            "".join(traceback.format_stack(frame, _FRAMES)),
        )

    def _turn(self, consumer: Any, number: int, turns: int) -> None:
        if turns:
            consumer.call_soon(self._turn, consumer, number, turns - 1)
        else:
            self._list(number)

    def _list(self, number: int) -> None:
        # One assignment: this may run in the main loop, while the reporting thread reads the number and the ids.
        self._answer = (number, self._held.ids())
        self._waits_since = None
        if self._stands_still:
            self._stands_still = False
            logger.info("The main loop of this worker turns again")
        self._soon.set()
