"""Time, randomness, crash points, how bodies run: everything that tests replace. No other module uses it directly."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol, TypeVar

import uuid_utils

from celery_durable.concurrency import ConcurrentBody, run_concurrently
from celery_durable.housekeeping import Job

T = TypeVar("T")
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
        """Run the bodies at the same time, and pass each result to its ``on_done`` as it arrives."""
        run_concurrently(branches)
