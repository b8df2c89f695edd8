"""How bodies run at the same time: each on a thread, which is kept for later bodies, or as a task of the event loop."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_durable.housekeeping import reset_in_child

CANCEL_SECONDS = 5.0
"""How long an async body may take to end after it was cancelled."""


@dataclass(frozen=True, slots=True)
class ConcurrentBody:
    """One body to run. ``run`` never raises; ``on_done`` gets what it returned, or None after the timeout, and commits.

    It is called on the thread that called `run_concurrently`, for one branch at a time.
    """

    run: Callable[[], Any]
    on_done: Callable[[Any], None]
    timeout_seconds: float | None
    on_start: Callable[[Callable[[], None]], None] | None = None
    """Receives a function that ends the body as its timeout does. Any thread may call it."""
    start: Callable[[Callable[[Any], None]], Callable[[], None]] | None = None
    """Starts an async body as a task, in place of ``run`` on a thread. The task calls the argument with what ``run``
    would return. ``start`` returns a function that cancels the task."""


def run_concurrently(branches: Sequence[ConcurrentBody]) -> None:
    """Run the bodies, each on its own thread or as a task, and pass each result to its ``on_done`` as it arrives.

    A body that runs past its timeout is abandoned: its result is ignored, and its thread ends with it. A task is
    cancelled, and abandoned if it has not ended `CANCEL_SECONDS` later.
    """
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    bodies: list[_BodyThread | _BodyTask] = []
    started, unfinished = time.monotonic(), set(range(len(branches)))
    deadlines = {i: started + t for i, branch in enumerate(branches) if (t := branch.timeout_seconds) is not None}
    cancelled: set[int] = set()
    try:
        for index, branch in enumerate(branches):
            bodies.append(_start(branch, functools.partial(_report, done, index)))
        while unfinished:
            index, result = _wait_for_next(unfinished, deadlines, done)
            if result is None and branches[index].start is not None:
                if index not in cancelled:
                    cancelled.add(index)
                    bodies[index].stop()
                    deadlines[index] = time.monotonic() + CANCEL_SECONDS
                if time.monotonic() < deadlines[index]:
                    continue
            unfinished.remove(index)
            deadlines.pop(index, None)
            if result is None:
                bodies[index].stop()
            else:
                bodies[index].release()
            branches[index].on_done(result)
    finally:
        for index, body in enumerate(bodies):
            if index in unfinished:
                body.stop()


def _wait_for_next(
    unfinished: set[int], deadlines: dict[int, float], done: queue.SimpleQueue[tuple[int, Any]]
) -> tuple[int, Any]:
    while True:
        first = min(deadlines, key=deadlines.__getitem__) if deadlines else None
        timeout = None if first is None else max(0.0, deadlines[first] - time.monotonic())
        try:
            index, result = done.get(timeout=timeout)
        except queue.Empty:
            assert first is not None
            return first, None
        if index in unfinished:  # otherwise it is the late result of a body that timed out
            return index, result


def _report(done: queue.SimpleQueue[tuple[int, Any]], index: int, result: Any) -> None:
    done.put((index, result))


def _start(branch: ConcurrentBody, report: Callable[[Any], None]) -> _BodyThread | _BodyTask:
    if branch.on_start is not None:
        branch.on_start(functools.partial(report, None))
    if branch.start is not None:
        return _BodyTask(branch.start(report))
    thread = _idle_threads.take()
    thread.start(branch.run, report)
    return thread


class _BodyTask:
    """A body that runs as a task of the event loop."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.stop = cancel

    def release(self) -> None:
        """Do nothing: the task has ended."""


class _BodyThread:
    """A daemon thread that runs one body after another, so that thread-locals of user code are kept."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # The thread holds only the queue, so an unreferenced `_BodyThread` is collected, and `__del__` ends the thread.
        threading.Thread(target=_run_jobs, args=(self._jobs,), name="durable-body", daemon=True).start()

    def __del__(self) -> None:
        self._jobs.put(None)

    def start(self, run: Callable[[], Any], report: Callable[[Any], None]) -> None:
        self._jobs.put((run, report))

    def stop(self) -> None:
        self._jobs.put(None)

    def release(self) -> None:
        _idle_threads.release(self)


_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]


def _run_jobs(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        run, report = job
        report(run())


_MAX_IDLE_THREADS = 4


class _IdleBodyThreads(threading.local):
    """The idle body threads that belong to the calling thread. It keeps a few; the others end with their bodies."""

    def __init__(self) -> None:
        self.idle: list[_BodyThread] = []

    def take(self) -> _BodyThread:
        return self.idle.pop() if self.idle else _BodyThread()

    def reset_in_child(self) -> None:
        """Forget the threads: a forked child has the forking thread's locals, but not the threads that these name."""
        self.idle.clear()

    def release(self, thread: _BodyThread) -> None:
        if len(self.idle) < _MAX_IDLE_THREADS:
            self.idle.append(thread)
        else:
            thread.stop()


_idle_threads = _IdleBodyThreads()
reset_in_child(_idle_threads)
