"""Housekeeping: the jobs that a process does beside its tasks, such as heartbeats, sweeps and renewals of leases.

One thread, the clock, starts each job when it is due, on a thread that is idle or new, and never waits itself. So a job
that hangs delays no other (LAW 7 of docs/design.md).

If a process forks while a job runs, the child inherits locked locks, for example SQLite's, that no thread releases. So
a fork waits for jobs, but not long: a pool forks in Celery's main loop. The child starts without jobs.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger("celery_durable")

_RETRY_SECONDS = 1.0
_MAX_FORK_WAIT_SECONDS = 1.0


class Job:
    """Work to do again and again, by one thread at a time.

    ``run`` returns after how many seconds the job is due again; `math.inf` ends it. ``is_quick``: it never waits, so
    the clock runs it. ``delays_forks``: a fork waits until it has run. Jobs of one ``lane`` run one after another. The
    log of a job with a ``purpose``, such as "check for due work", has the first of several errors, and their end.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], float],
        *,
        is_quick: bool = False,
        delays_forks: bool = True,
        lane: object = None,
        purpose: str | None = None,
    ) -> None:
        self.name, self.run, self.is_quick, self.delays_forks = name, run, is_quick, delays_forks
        self.lane, self.purpose, self._is_failing = lane or self, purpose, False

    def start(self, *, after: float = 0.0) -> None:
        """Let the job run in ``after`` seconds, if it is not due earlier. A running job runs once more."""
        _process.start(self, after)

    def wake(self) -> None:
        """Let the job run now, unless it has ended or was stopped."""
        with _process.changed:
            if self in _process.due_at or _process.running.get(self):
                self.start()

    def stop(self, timeout: float = 0.0) -> None:
        """End the job, if it is running with this run, and wait for that for at most ``timeout`` seconds."""
        stop_jobs([self], timeout)

    def wait(self, timeout: float) -> bool:
        """Wait until the job has ended; returns False if it has not after ``timeout`` seconds."""
        with _process.changed:
            return _process.changed.wait_for(lambda: not self.is_started(), timeout)

    def is_started(self) -> bool:
        """Whether the job is running or will run."""
        return self in _process.due_at or self in _process.running

    def record_run(self, error: BaseException | None) -> None:
        """Log how a run has ended, if that is worth a line."""
        if self.purpose is None or not isinstance(error, Exception | None):
            if error is not None:
                logger.error("%s failed and is done again", self.name, exc_info=error)
        elif self._is_failing and error is None:
            logger.info("This process can %s again", self.purpose)
        elif not self._is_failing and error is not None:
            logger.warning("This process cannot %s and will retry: %s", self.purpose, str(error).partition("\n")[0])
        self._is_failing = error is not None


def stop_jobs(jobs: Collection[Job], timeout: float) -> None:
    """End jobs, and wait for all of them for at most ``timeout`` seconds."""
    for job in jobs:
        _process.stop(job)
    with _process.changed:
        _process.changed.wait_for(lambda: not any(job.is_started() for job in jobs), timeout)


class CallQueue:
    """Calls that a job makes in order. At most ``size`` wait; they are lost with the process."""

    def __init__(self, name: str, size: int, *, delays_forks: bool = True) -> None:
        self._calls: deque[tuple[str, Callable[[], object]]] = deque()
        self._size, self._job = size, Job(name, self._make_next, delays_forks=delays_forks)
        reset_in_child(self)

    def add(self, call: Callable[[], object], *, what: str) -> bool:
        """Queue a call and return at once; returns False if the queue is full.

        The log has a line about that, and about an error of the call. It begins with ``what``, such as "The claim".
        """
        if len(self._calls) >= self._size:
            logger.warning("%s is given up: %d calls of this process are waiting already", what, self._size)
            return False
        self._calls.append((what, call))
        self._job.start()
        return True

    def finish(self, timeout: float) -> None:
        """Wait until all calls are made, for at most ``timeout`` seconds."""
        if not self._job.wait(timeout):
            logger.warning("%d calls of this process are given up: they did not end in time", len(self._calls) + 1)

    def _make_next(self) -> float:
        if self._calls:
            what, call = self._calls.popleft()
            try:
                call()
            except Exception as exc:  # noqa: BLE001  # an error of one call must not stop the next one
                logger.warning("%s is given up: %s", what, exc)
        return 0.0 if self._calls else math.inf

    def reset_in_child(self) -> None:
        """Forget the parent's calls."""
        self._calls.clear()


class HasParentState(Protocol):
    """What a forked child resets."""

    def reset_in_child(self) -> None:
        """Forget what is the parent's. Its threads do not exist here, and its locks may be held."""


class HasFiles(Protocol):
    """What closes files before a fork."""

    def prepare_fork(self) -> None:
        """Close the files that no thread is using. A child would inherit them, and may close them under their user."""


_to_reset: weakref.WeakSet[HasParentState] = weakref.WeakSet()
_to_prepare: weakref.WeakSet[HasFiles] = weakref.WeakSet()


def reset_in_child(it: HasParentState) -> None:
    """Call ``it.reset_in_child()`` in each forked child, for as long as ``it`` exists."""
    _to_reset.add(it)


def prepare_forks(it: HasFiles) -> None:
    """Call ``it.prepare_fork()`` before each fork, when no job is running, for as long as ``it`` exists."""
    _to_prepare.add(it)


@contextmanager
def delay_forks() -> Iterator[None]:
    """Let a fork wait until the block has ended, for at most a second."""
    block = object()
    with _process.changed:
        _process.changed.wait_for(lambda: not _process.fork_count)
        _process.delaying_forks.add(block)
    try:
        yield
    finally:
        with _process.changed:
            _process.delaying_forks.discard(block)
            _process.changed.notify_all()


class _Process:
    """The jobs of this process and their threads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.changed = threading.Condition()
        self.due_at: dict[Job, float] = {}
        self.running: dict[Job, bool] = {}
        """The running jobs, and whether they may run again."""
        self.delaying_forks: set[object] = set()
        self.fork_count = 0
        self._has_clock = False
        self._has_idle_thread = False
        self._handed_over: SimpleQueue[Job] = SimpleQueue()

    def start(self, job: Job, after: float) -> None:
        with self.changed:
            due_at = time.monotonic() + after
            if due_at < self.due_at.get(job, math.inf):
                self.due_at[job] = due_at
                self.changed.notify_all()
            self._has_clock = self._has_clock or _start_thread(self._run_clock, job, "durable-clock")

    def stop(self, job: Job) -> None:
        with self.changed:
            self.due_at.pop(job, None)
            if job in self.running:
                self.running[job] = False
            self.changed.notify_all()

    # --- threads --------------------------------------------------------------------------------

    def _run_clock(self) -> None:
        while True:
            job = self._take_due_job()
            if job.is_quick:
                self._run(job)
            elif self._take_idle_thread():
                self._handed_over.put(job)
            elif not _start_thread(functools.partial(self._run_jobs, job), job, job.name):
                self._end_run(job, _RETRY_SECONDS)

    def _take_due_job(self) -> Job:
        with self.changed:
            while True:
                busy = {job.lane for job in self.running}
                waiting = [] if self.fork_count else [job for job in self.due_at if job.lane not in busy]
                job = min(waiting, key=self.due_at.__getitem__, default=None)
                left = math.inf if job is None else self.due_at[job] - time.monotonic()
                if job is not None and left <= 0:
                    del self.due_at[job]
                    self.running[job] = True
                    if job.delays_forks:
                        self.delaying_forks.add(job)
                    return job
                self.changed.wait(None if left == math.inf else left)

    def _take_idle_thread(self) -> bool:
        with self.changed:
            had_idle_thread, self._has_idle_thread = self._has_idle_thread, False
        return had_idle_thread

    def _run_jobs(self, job: Job) -> None:
        """Run a job and then those that are handed over, until another thread waits for these."""
        while True:
            threading.current_thread().name = job.name
            self._run(job)
            threading.current_thread().name = "durable-idle"
            with self.changed:
                if self._has_idle_thread:
                    return
                self._has_idle_thread = True
            job = self._handed_over.get()

    def _run(self, job: Job) -> None:
        pause, error = _RETRY_SECONDS, None
        try:
            pause = job.run()
        except BaseException as exc:  # noqa: BLE001  # it is logged
            error = exc
        job.record_run(error)
        self._end_run(job, pause)

    def _end_run(self, job: Job, pause: float) -> None:
        with self.changed:
            self.delaying_forks.discard(job)
            if self.running.pop(job) and pause < math.inf:
                self.start(job, pause)
            self.changed.notify_all()

    # --- forks ----------------------------------------------------------------------------------

    def pause(self) -> None:
        with self.changed:
            self.fork_count += 1
            self.changed.wait_for(lambda: not self.delaying_forks, _MAX_FORK_WAIT_SECONDS)

    def resume(self) -> None:
        with self.changed:
            self.fork_count -= 1
            self.changed.notify_all()


def _start_thread(run: Callable[[], None], job: Job, name: str) -> bool:
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as exc:  # the limit of threads is reached, or the interpreter ends
        logger.warning("%s is late, because no thread can be started: %s", job.name, exc)
        return False
    return True


def _before_fork() -> None:
    _process.pause()
    for each in list(_to_prepare):
        each.prepare_fork()


def _in_child() -> None:
    _process.reset()
    for each in list(_to_reset):
        each.reset_in_child()


_process = _Process()
os.register_at_fork(before=_before_fork, after_in_parent=_process.resume, after_in_child=_in_child)
