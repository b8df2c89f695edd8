"""A worker in this process, with its dispatcher, for `durable dev`. Its messages are lost when it stops (LAW 1)."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from celery import signals

from celery_durable import tasks
from celery_durable.app import Durable
from celery_durable.model import RunRef

_POLL_SECONDS = 0.1


class LocalWorker:
    """Runs a worker of threads beside the main thread, until a signal or the worker's exit ends both.

    Callbacks run on the main thread: ``on_start`` before the worker starts; ``on_progress`` again and again, with the
    runs that the worker has advanced since the last call; ``on_stop`` at the first signal. A second ends the process.
    """

    def __init__(
        self,
        durable: Durable,
        *,
        concurrency: int,
        on_start: Callable[[], None],
        on_progress: Callable[[AbstractSet[RunRef]], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._durable = durable
        self._on_start, self._on_progress, self._on_stop = on_start, on_progress, on_stop
        self._has_started = threading.Event()
        """Set when the worker consumes, or has exited."""
        app: Any = durable.app
        app.set_default()  # the pool's threads find their tasks in it
        self._worker = app.WorkController(
            pool="threads",
            concurrency=concurrency,
            hostname=f"dev@{os.getpid()}",
            without_mingle=True,
            without_gossip=True,
            without_heartbeat=True,
            ready_callback=lambda _: self._has_started.set(),
        )
        self._is_stopping = False
        self._stops: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Ends a pause. Its `put` is safe in a signal handler; `Event.set` needs a lock that this thread may hold."""
        self._task_events: queue.SimpleQueue[tuple[RunRef, bool]] = queue.SimpleQueue()
        self._running: set[RunRef] = set()

    def run(self) -> int:
        """Run until a signal arrives or the worker exits. Returns the exit code of the worker."""
        thread = threading.Thread(target=self._run_worker, name="durable-dev-worker", daemon=True)
        with self._signals(), self._recording_runs():
            self._on_start()
            thread.start()
            while self._pause():
                try:
                    self._on_progress(self._active_runs())
                except Exception as exc:
                    if not self._durable.internals.store.is_transient(exc):
                        raise
                    # Like the worker, wait until the database is back.
            self._has_started.wait()  # Celery forgets a stop() that comes before
            self._worker.stop()
            thread.join()
            self._on_progress(self._active_runs())
        self._durable.close()
        return int(self._worker.exitcode or 0)

    def stop(self) -> None:
        """Make `run` return as soon as the running passes have ended, each at its next step boundary."""
        self._durable.internals.stop_flag.set()
        self._end()

    def _end(self) -> None:
        self._is_stopping = True
        self._stops.put(None)

    def _pause(self) -> bool:
        """Wait for a poll interval, or until `run` has to return. Returns False if it has to."""
        with contextlib.suppress(queue.Empty):
            self._stops.get(timeout=_POLL_SECONDS)
        return not self._is_stopping

    def _run_worker(self) -> None:
        try:
            self._worker.start()
        finally:
            self._has_started.set()
            self._end()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handle_signal(*_: object) -> None:
            if self._is_stopping:
                os._exit(128 + signal.SIGINT)  # bodies run on threads that Python would wait for
            self.stop()
            self._on_stop()

        before = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _recording_runs(self) -> Iterator[None]:
        """Record which runs the worker starts and stops advancing, for the main thread."""

        def record_event(*, sender: Any, args: Any, signal: Any, **_: Any) -> None:
            if sender.name == tasks.ADVANCE:
                self._task_events.put((RunRef(*args), signal is signals.task_prerun))

        signals.task_prerun.connect(record_event)
        signals.task_postrun.connect(record_event)
        try:
            yield
        finally:
            signals.task_prerun.disconnect(record_event)
            signals.task_postrun.disconnect(record_event)

    def _active_runs(self) -> AbstractSet[RunRef]:
        ended: set[RunRef] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                ref, is_running = self._task_events.get_nowait()
                if is_running:
                    self._running.add(ref)
                else:
                    self._running.discard(ref)
                    ended.add(ref)
        return ended | self._running
