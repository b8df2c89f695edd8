"""Time, chance, threads and crash points: all that a test replaces. Nothing else asks for them."""

from __future__ import annotations

import functools
import os
import queue
import random
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

import uuid_utils

T = TypeVar("T")
Purpose = Literal["sleep", "retry", "event"]
"""What a span of waiting is for: `step.sleep`, the pause before a retry, the timeout of a wait."""


def steady() -> float:
    """Seconds of this machine's steady clock, in tests too: for waits on peers that no test's clock can shorten."""
    return time.monotonic()


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it may have been raised for a person: by Python's own handler of SIGINT, which runs on the main thread.

    Celery's workers replace that handler: there a KeyboardInterrupt is the author's.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return (
        isinstance(error, KeyboardInterrupt)
        and is_main
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


@dataclass(frozen=True, slots=True)
class ConcurrentBody:
    """One body to run. ``run`` never raises; ``on_done`` gets what it returned, None after the timeout.

    ``on_done`` is called on the thread that called `run_branches`, one branch at a time: it commits.
    """

    run: Callable[[], Any]
    on_done: Callable[[Any], None]
    timeout_seconds: float | None


class Runtime:
    """The production runtime: the database's time, random ids, one thread for each branch."""

    clock: Callable[[], int] | None = None
    """Microseconds since the epoch instead of the database's time; only tests set it."""

    def new_id(self) -> str:
        """A random id that sorts by its time of making."""
        return str(uuid_utils.uuid7())

    def new_token(self) -> str:
        """A token that nobody else ever held: random, not counted, so that a failed-over database cannot repeat it."""
        return str(uuid.uuid4())

    def new_secret(self) -> str:
        """128 random bits in hexadecimal, which nobody can guess: who names them has read them."""
        return secrets.token_hex(16)

    def monotonic(self) -> float:
        """Seconds of this process's steady clock."""
        return time.monotonic()

    def wall_clock(self) -> datetime:
        """This machine's clock, to be compared with the database's: nothing is decided by it (LAW 4)."""
        return datetime.now(UTC)

    def back_off(self, times: int) -> None:
        """Pause before something is done again for the ``times``-th time; spread, so that rivals do not meet again."""
        time.sleep(min(1.0, 0.01 * 2**times) * random.uniform(0.5, 1.0))  # noqa: S311  # only spreads load

    def spread(self, seconds: float) -> float:
        """About so long: up to a fifth less or more, so that many who wait for the same thing do not meet again."""
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311  # only spreads load

    def sleep(self, seconds: float) -> None:
        """Pause the calling thread, between two looks at something."""
        time.sleep(seconds)

    def repeat(self, seconds: float, work: Callable[[], bool], *, name: str) -> None:
        """Call ``work`` on a daemon thread after every pause of ``seconds``, until it answers False."""

        def loop() -> None:
            self.sleep(seconds)
            while work():
                self.sleep(seconds)

        threading.Thread(target=loop, name=name, daemon=True).start()

    def wait_duration(
        self,
        length: timedelta,
        *,
        purpose: Purpose,  # noqa: ARG002  # for runtimes that let some waits be short
        workflow: str,  # noqa: ARG002
        step: str,  # noqa: ARG002
    ) -> timedelta:
        """How long a step waits: as long as its author wrote."""
        return length

    def attempt(
        self,
        body: Callable[[], T],
        *,
        workflow: str,  # noqa: ARG002  # for runtimes that put something in the body's place
        instance_id: str,  # noqa: ARG002
        step: str,  # noqa: ARG002
        number: int,  # noqa: ARG002
    ) -> T:
        """Run the author's body for the ``number``-th time and return what it returns."""
        return body()

    def can_interrupt(self) -> bool:
        """Whether a timer signal can interrupt a body on this thread: it is the one that gets signals."""
        return threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def checkpoint(self, name: str) -> None:
        """A named place between two effects where tests stop, crash or look. Does nothing."""

    def run_concurrently(self, branches: Sequence[ConcurrentBody]) -> None:
        """Run the bodies at the same time, each on its own thread; hand in each result as it comes.

        A body that outlives its timeout is left behind: its result goes nowhere, its thread ends with it.
        """
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        crews = [_companions.take() for _ in branches]
        for index, (crew, branch) in enumerate(zip(crews, branches, strict=True)):
            crew.start(branch.run, functools.partial(_report, done, index))
        started = time.monotonic()
        open_ = set(range(len(branches)))
        try:
            while open_:
                index, result = self._next_done(branches, open_, done, started)
                open_.remove(index)
                if result is None:
                    crews[index].dismiss()
                else:
                    _companions.give_back(crews[index])
                branches[index].on_done(result)
        finally:
            for index in open_:
                crews[index].dismiss()

    @staticmethod
    def _next_done(
        branches: Sequence[ConcurrentBody], open_: set[int], done: queue.SimpleQueue[tuple[int, Any]], started: float
    ) -> tuple[int, Any]:
        deadlines = {i: started + t for i in open_ if (t := branches[i].timeout_seconds) is not None}
        while True:
            first = min(deadlines, key=deadlines.__getitem__) if deadlines else None
            left = None if first is None else max(0.0, deadlines[first] - time.monotonic())
            try:
                index, result = done.get(timeout=left)
            except queue.Empty:
                assert first is not None
                return first, None
            if index in open_:  # else: the late result of a body that timed out
                return index, result


def _report(done: queue.SimpleQueue[tuple[int, Any]], index: int, result: Any) -> None:
    done.put((index, result))


class _Companion:
    """A daemon thread that runs one body after another, so that thread-locals of user code live on."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # The thread knows the queue only: a companion that nobody holds any more ends it.
        threading.Thread(target=_work, args=(self._jobs,), name="durable-body", daemon=True).start()

    def __del__(self) -> None:
        self._jobs.put(None)

    def start(self, run: Callable[[], Any], report: Callable[[Any], None]) -> None:
        self._jobs.put((run, report))

    def dismiss(self) -> None:
        self._jobs.put(None)


_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        run, report = job
        report(run())


_MOST_IDLE = 4


class _Companions(threading.local):
    """The idle companions of the calling thread; those of a wide gather beyond a few end with their bodies."""

    def __init__(self) -> None:
        self.idle: list[_Companion] = []

    def take(self) -> _Companion:
        return self.idle.pop() if self.idle else _Companion()

    def forget(self) -> None:
        self.idle.clear()

    def give_back(self, companion: _Companion) -> None:
        if len(self.idle) < _MOST_IDLE:
            self.idle.append(companion)
        else:
            companion.dismiss()


_companions = _Companions()
# The forking thread's locals live on in the child, but the threads they name do not.
os.register_at_fork(after_in_child=_companions.forget)
