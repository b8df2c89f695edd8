"""Time, randomness, threads and crash points: everything that tests replace. No other module uses them directly."""

from __future__ import annotations

import asyncio
import functools
import math
import queue
import random
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol, TypeVar

import uuid_utils

from celery_durable.housekeeping import Job, reset_in_child

T = TypeVar("T")
CANCEL_SECONDS = 5.0
"""How long an async body may take to end after it was cancelled."""
Purpose = Literal["sleep", "retry", "event"]
"""The purpose of a wait: `step.sleep`, the pause before a retry, or the timeout of a wait."""


real_monotonic = time.monotonic
"""Returns the seconds of the real monotonic clock, in tests too: no test clock shortens waits on other processes."""


def is_ctrl_c(error: BaseException) -> bool:
    """Whether the error comes from Ctrl-C: from Python's own handler of SIGINT, which runs on the main thread.

    Celery's workers replace that handler, so there a KeyboardInterrupt was raised by the author's code.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return (
        isinstance(error, KeyboardInterrupt)
        and is_main
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


class CallAsync(Protocol):
    """Calls a function for async code. The function runs on a thread and does not block the event loop."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Return what awaits the function's result."""


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


class Runtime:
    """The production runtime: the database's time, random ids, a thread or a task for each concurrent body."""

    clock: Callable[[], int] | None = None
    """Microseconds since the epoch, used instead of the database's time. Only tests set it."""

    pass_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes a context manager that the thread of each pass enters. Integrations of web frameworks set it."""

    def new_id(self) -> str:
        """A random id that sorts by creation time."""
        return str(uuid_utils.uuid7())

    def new_token(self) -> str:
        """A unique token. It is random, not a counter, so that a failed-over database cannot issue it again."""
        return str(uuid.uuid4())

    def new_secret(self) -> str:
        """128 random bits in hexadecimal, which cannot be guessed."""
        return secrets.token_hex(16)

    monotonic = staticmethod(time.monotonic)
    """Returns the seconds of this process's monotonic clock."""

    def wall_clock(self) -> datetime:
        """This machine's clock, only for comparison with the database's. No decision uses it (LAW 4)."""
        return datetime.now(UTC)

    def back_off(self, times: int) -> None:
        """Pause before the ``times``-th retry, for a random time, so that competing retries do not collide again."""
        time.sleep(min(1.0, 0.01 * 2**times) * random.uniform(0.5, 1.0))  # noqa: S311  # only spreads load

    def add_jitter(self, seconds: float) -> float:
        """Return ``seconds`` changed by up to 20 % at random, so that processes with equal intervals do not collide."""
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311  # only spreads load

    def random_fraction(self) -> float:
        """A random number from 0 to 1."""
        return random.random()  # noqa: S311  # only spreads load

    def sleep(self, seconds: float) -> None:
        """Pause the calling thread between two checks."""
        time.sleep(seconds)

    def wait_for_progress(self, pause: float, left: float) -> None:  # noqa: ARG002  # for runtimes with another clock
        """Pause a thread that waits for an instance for ``pause`` seconds. In ``left`` seconds the thread gives up."""
        self.sleep(pause)

    async def wait_for_progress_async(
        self,
        pause: float,
        left: float,  # noqa: ARG002
        call_async: CallAsync,  # noqa: ARG002  # for what a runtime does meanwhile
    ) -> None:
        """Do what `wait_for_progress` does, for a coroutine."""
        await asyncio.sleep(pause)

    def start_periodic_job(self, seconds: float, work: Callable[[], bool], *, name: str) -> None:
        """Call ``work`` on another thread after every pause of ``seconds``, until it returns False."""
        Job(name, lambda: seconds if work() else math.inf).start(after=seconds)

    def wait_duration(
        self,
        length: timedelta,
        *,
        purpose: Purpose,  # noqa: ARG002  # for runtimes that shorten some waits
        workflow: str,  # noqa: ARG002
        step: str,  # noqa: ARG002
    ) -> timedelta:
        """How long a step waits: the production runtime returns ``length``."""
        return length

    def run_attempt(
        self,
        body: Callable[[], T],
        *,
        workflow: str,  # noqa: ARG002  # for runtimes that replace the body
        instance_id: str,  # noqa: ARG002
        step: str,  # noqa: ARG002
        number: int,  # noqa: ARG002
    ) -> T:
        """Run the author's body for the ``number``-th time and return what it returns."""
        return body()

    def can_interrupt(self) -> bool:
        """Whether a timer signal can interrupt a body on this thread. Only the main thread receives signals."""
        return threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def checkpoint(self, name: str) -> None:
        """A crash point: a named position between two effects, where tests stop, crash or check. Does nothing here."""

    def run_concurrently(self, branches: Sequence[ConcurrentBody]) -> None:
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
                index, result = self._wait_for_next(unfinished, deadlines, done)
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

    @staticmethod
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
