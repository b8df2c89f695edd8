"""The runtime of a harness: virtual time, seeded random values, one thread at a time, and numbered crash points."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from celery_durable.concurrency import ConcurrentBody
from celery_durable.runtime import CallAsync, Purpose, Runtime
from celery_durable.testing.clock import Clock
from celery_durable.testing.cooperative import Crash, current_cooperative_thread, in_body
from celery_durable.testing.mocks import Attempt, Mocks

T = TypeVar("T")

CHECKPOINTS = (
    "claimed",
    "before-body",
    "after-body",
    "before-commit",
    "after-commit",
    "before-publish",
    "after-publish",
)
"""The places at which a test can end a process: between any two effects of a pass."""

_HOLDS_NO_LOCK = frozenset({"claimed", "before-body", "after-commit"})


class HarnessRuntime(Runtime):
    """The runtime of one process. ``name`` and ``seed`` decide all random values."""

    def __init__(self, clock: Clock, *, name: str, seed: int = 0, mocks: Mocks | None = None) -> None:
        self.clock = clock.read
        self.is_dead = False
        self.passed: list[str] = []
        """The checkpoints that the process has passed."""
        self.crash_at: int | str | None = None
        """Die at the checkpoint of this number, counted from 0 in this process, or at the next one of this name."""
        self.at: dict[int | str, Callable[[], object]] = {}
        """Functions to call once: at the checkpoint of a number, or at the next one of a name."""
        self._clock, self._mocks = clock, mocks
        self._random = random.Random(f"{seed}/{name}")  # noqa: S311  # reproducible on purpose
        self._stopped_at: float | None = None
        self._aside = 0

    # --- time and chance ------------------------------------------------------------------------

    def new_id(self) -> str:
        """Return the next id from the seed."""
        return self.new_token()

    def new_token(self) -> str:
        """Return the next token from the seed."""
        return str(uuid.UUID(int=self._random.getrandbits(128)))

    def new_secret(self) -> str:
        """Return the next secret from the seed."""
        return f"{self._random.getrandbits(128):032x}"

    def random_fraction(self) -> float:
        """Return the next random number from the seed."""
        return self._random.random()

    def monotonic(self) -> float:
        """Return the seconds of the harness's clock. They stand still while the process is suspended."""
        return self._clock.read() / 1_000_000 if self._stopped_at is None else self._stopped_at

    def sleep(self, seconds: float) -> None:
        """Move the clock instead of waiting."""
        self._clock.advance(seconds)

    async def wait_for_progress_async(self, pause: float, left: float, call_async: CallAsync) -> None:
        """Move the clock instead of waiting, and do what is due, on the thread of async calls."""
        await call_async(lambda: self.wait_for_progress(pause, left))

    def back_off(self, times: int) -> None:
        """Do not wait."""

    # --- the process ----------------------------------------------------------------------------

    @property
    def is_suspended(self) -> bool:
        """Whether the process is frozen, as under SIGSTOP."""
        return self._stopped_at is not None

    def suspend(self) -> None:
        """Stop the clock of this process, and so the renewal of its leases."""
        self._stopped_at = self.monotonic()

    def wake_up(self) -> None:
        """Start the clock of this process again."""
        self._stopped_at = None

    def die(self) -> None:
        """End the process here, as kill -9 does; never returns. For code that runs in it."""
        self.is_dead = True
        raise Crash("died")

    def checkpoint(self, name: str) -> None:
        """Count the checkpoint. Then crash, call the test's function, or let another runner run first."""
        if self._aside:  # called from `repeat`, which is another thread in production
            return
        number = len(self.passed)
        self.passed.append(name)
        if self.crash_at in (number, name):
            self.is_dead = True
            raise Crash(f"{name} ({number})")
        for key in (number, name):
            if (wanted := self.at.pop(key, None)) is not None:
                wanted()
        thread = current_cooperative_thread()
        if thread is not None and thread.takes_turns and name in _HOLDS_NO_LOCK and not thread.bodies:
            thread.park(name)

    def start_periodic_job(self, seconds: float, work: Callable[[], bool], *, name: str) -> None:
        """Call ``work`` every ``seconds`` of the clock, in place of a thread."""

        def call() -> None:
            if self.is_dead:
                return
            self._aside += 1
            try:
                continues = self.is_suspended or work()
            finally:
                self._aside -= 1
            if continues:
                self.start_periodic_job(seconds, work, name=name)

        self._clock.call_after(timedelta(seconds=seconds), call)

    # --- bodies ---------------------------------------------------------------------------------

    def can_interrupt(self) -> bool:
        """Return False: timeouts use virtual time, and no signal touches a test's own timer."""
        return False

    def run_concurrently(self, branches: Sequence[ConcurrentBody]) -> None:
        """Run the branches one after the other, in an order from the seed. Each is stored before the next begins.

        A branch that moved the clock past its timeout has timed out.
        """
        for branch in self._random.sample(branches, len(branches)):
            began = self.monotonic()
            outcome = branch.run()
            timeout = branch.timeout_seconds
            branch.on_done(None if timeout is not None and self.monotonic() - began > timeout else outcome)

    def wait_duration(self, length: timedelta, *, purpose: Purpose, workflow: str, step: str) -> timedelta:
        """Return the length of a wait: the author's, unless a mock changes it."""
        return length if self._mocks is None else self._mocks.wait_duration(length, purpose, workflow, step)

    def run_attempt(self, body: Callable[[], T], *, workflow: str, instance_id: str, step: str, number: int) -> T:
        """Call the step's function, or the mock that replaces it."""
        if self._mocks is None:
            return body()
        attempt = Attempt(workflow, instance_id, step, number)
        with in_body():
            result: T = self._mocks.run_attempt(body, attempt, die=self.die)
        return result
