"""Background work: one daemon thread per process for what Celery's main loop must not wait for (LAW 8).

A worker's main loop sends and receives the messages of all its tasks. A query or a publish in it delays every task of
the application: when a pool process died while the database hung, no task ran for 75 s. The queue is bounded and is
lost with the process. So it takes only work that a sweep or the end of a lease finds later in any case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

from celery_durable.tasks.fork_safety import ForkSafeThread

logger = logging.getLogger("celery_durable.tasks")

_MAX_JOBS = 1000
_Job = tuple[str, Callable[[], object]]


class BackgroundQueue(ForkSafeThread):
    """Runs jobs one after another, in order. A forked child has a new, empty queue."""

    def __init__(self, size: int = _MAX_JOBS) -> None:
        super().__init__()
        self._size = size
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(self._size)
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], object], *, what: str) -> bool:
        """Queue ``job`` and return at once; returns False, and logs a warning, if the queue is full.

        If the job raises, the log line begins with ``what``, for example "The claim of a dead process".
        """
        if self._pid != os.getpid():  # the lock and the queue may have been in use when the parent process forked
            self._reset()
        with self._lock:
            try:
                self._jobs.put_nowait((what, job))
            except queue.Full:
                logger.warning(
                    "%s is left to the sweep: %d background jobs of this process are waiting already", what, self._size
                )
                return False
            if self._thread is None or not self._thread.is_alive():
                self.reset_fork_lock()
                self._thread = threading.Thread(
                    target=self._loop, args=(self._jobs,), name="durable-background", daemon=True
                )
                self._thread.start()
        return True

    def close(self, timeout: float) -> bool:
        """Run the queued jobs for at most ``timeout`` seconds; returns False if the jobs did not end in time.

        A later `submit` starts a new thread.
        """
        if self._pid != os.getpid():
            return True
        # A concurrent `submit` puts its job into the old queue before the end mark, or into the new queue.
        with self._lock:
            thread, self._thread = self._thread, None
            jobs, self._jobs = self._jobs, queue.Queue(self._size)
        if thread is None or not thread.is_alive():
            return True
        with contextlib.suppress(queue.Full):  # then the thread gets no end mark; `join` waits for it, at most timeout
            jobs.put_nowait(None)
        thread.join(timeout)
        if thread.is_alive():
            logger.warning(
                "%d background jobs of this process are left to the sweep: they did not end in time", jobs.qsize() + 1
            )
        return not thread.is_alive()

    def _loop(self, jobs: queue.Queue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            with self.fork_lock:
                self._run(*job)

    @staticmethod
    def _run(what: str, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as exc:  # noqa: BLE001  # an error of one job must not stop the next one
            logger.warning("%s is left to the sweep: %s", what, exc)
