"""A worker's answers to inventories, and the short heartbeat by which its death is known in time.

Every two seconds one UPDATE says that the worker lives, and one SELECT tells whether the roll was called. On a thread
of its own (LAW 8): Celery's main loop is asked for nothing but the list of what is here. A loop that does not answer
stands still, which nothing else in the worker shows; the log then says where.
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
"""Of the worker's loop: what lies unread in its socket is read before it answers."""
_AGAIN_SECONDS = 5.0
"""A loop that was ended by a lost connection has forgotten that it was asked."""
_FRAMES = 16
"""Of the stack of a loop that stands still: enough for a client library and what called it."""


class InventoryReporter(ForkSafeThread):
    """Answers for one worker, from `start` to `stop`. ``row``: the id of its heartbeat's row, None: there is none."""

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
        """The worker has received a message; a marker is reported at once."""
        if self._held.received(request):
            self._soon.set()

    def start(self, consumer: Callable[[], Any]) -> None:
        """Begin; ``consumer``: Celery's consumer of the worker, None while it has none or no longer receives."""
        self.stop()
        self._consumer, self._stop, self._loop_thread = consumer, threading.Event(), threading.get_ident()
        self.reset_fork_lock()
        self._thread = threading.Thread(target=self._loop, args=(self._stop,), name="durable-roll-call", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 0.0) -> None:
        """End the thread, waiting for at most ``timeout`` seconds."""
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
        except Exception as exc:  # noqa: BLE001  # whatever it is, the next beat says the same
            if not self._is_blind:
                logger.warning("This worker cannot say what it holds, trying on: %s", exc)
            self._is_blind = True
        else:
            self._is_blind = False

    def _report(self, row: str) -> None:
        received_markers, store = self._held.received_markers(), self._store()
        if received_markers != self._written:
            store.attempt(lambda tx: inventories.note_passed(tx, row, received_markers))
            self._written = received_markers
        number = store.attempt(lambda tx: inventories.beat(tx, row))
        answer = self._answer
        if answer is not None and answer[0] > self._answered:
            store.attempt(lambda tx: inventories.answer(tx, row, *answer))
            self._answered = answer[0]
        if number > self._answered:
            self._ask(number)

    def _ask(self, number: int) -> None:
        """Have the worker's loop list what is here."""
        now = self._runtime.monotonic()
        if number == self._asked and now - self._asked_at < _AGAIN_SECONDS:
            return
        self._asked, self._asked_at = number, now
        consumer = self._consumer()
        if consumer is None:  # it receives nothing, not yet or not any more
            self._list(number)
            return
        if self._waits_since is None:
            self._waits_since = now
        self._report_stillness(now - self._waits_since, consumer)
        consumer.call_soon(self._turn, consumer, number, _TURNS)

    def _report_stillness(self, seconds: float, consumer: Any) -> None:
        """Say once where the loop stands, if it has not turned for long. A solo pool's runs the bodies of tasks."""
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
        self._answer = (number, self._held.ids())
        self._waits_since = None
        if self._stands_still:
            self._stands_still = False
            logger.info("The main loop of this worker turns again")
        self._soon.set()
