"""Concurrent runners as threads of which one runs at a time, so that a test does the same every time.

A thread runs while the test waits for it in `go`. It returns control when a barrier holds it, at a checkpoint at which
another thread may run first, and when it ends.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_durable.testing.errors import HeldOutside

_current: contextvars.ContextVar[CooperativeThread | None] = contextvars.ContextVar("durable_cooperative", default=None)


class Crash(BaseException):
    """The process dies here. Nothing that it does afterwards reaches the database."""


def _locked() -> threading.Lock:
    """Return a lock that another thread releases: to wait for it costs a tenth of what a semaphore does."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class CooperativeThread:
    """One delivery of a message on its own thread. With ``takes_turns`` it also stops at checkpoints."""

    def __init__(self, run: Callable[[], str], *, name: str, takes_turns: bool = False) -> None:
        self.name, self.takes_turns = name, takes_turns
        self.result: str | None = None
        self.parked_at: str | None = None
        self.bodies = 0
        """The number of step functions that it is in. There it may hold locks, and does not stop at checkpoints."""
        self._run = run
        self._error: BaseException | None = None
        self._must_die = False
        self._turn, self._back = _locked(), _locked()
        self._thread = threading.Thread(target=self._main, name=f"durable-cooperative-{name}", daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the delivery has ended."""
        return self.result is not None or self._error is not None

    @property
    def is_held(self) -> bool:
        """Whether a barrier holds it."""
        return self.parked_at is not None and self.parked_at.startswith("barrier ")

    def go(self) -> None:
        """Run it until it parks or ends. Raises what the delivery raised."""
        self.parked_at = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self.is_over:
            self._thread.join()  # its connections are closed when it ends: not while another thread runs
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """End it with a Crash at the place where it is parked."""
        self._must_die = True
        while not self.is_over:
            self.go()

    def park(self, where: str) -> None:
        """Return control and wait for the next `go`. Called on the thread itself."""
        self.parked_at = where
        self._back.release()
        self._turn.acquire()
        if self._must_die:
            raise Crash(where)

    def _main(self) -> None:
        _current.set(self)
        try:
            self.result = self._run()
        except BaseException as exc:  # noqa: BLE001  # `go` raises it again on the test's thread
            self._error = exc
        finally:
            self._back.release()


def current_cooperative_thread() -> CooperativeThread | None:
    """Return the thread that runs this code; None on the test's own thread."""
    return _current.get()


@contextmanager
def in_body() -> Iterator[None]:
    """Mark that a step's function runs, so that its thread does not stop at checkpoints."""
    thread = current_cooperative_thread()
    if thread is None:
        yield
        return
    thread.bodies += 1
    try:
        yield
    finally:
        thread.bodies -= 1


# Barriers: each holds the function of a step back, in its runner, until the test releases it.


class Barrier:
    """Holds the function of a step back before it begins. ``harness.faults.hold(step)`` makes one."""

    def __init__(self, step: str, workflow: str | None) -> None:
        self.step, self.workflow = step, workflow
        self.is_open = False
        self._held: list[CooperativeThread] = []

    def __repr__(self) -> str:
        return f"<Barrier before step {self.step!r}, {'open' if self.is_open else f'holding {self.holds}'}>"

    @property
    def holds(self) -> int:
        """The number of runners that wait here."""
        return sum(not thread.is_over for thread in self._held)

    def release(self) -> list[str]:
        """Open the barrier and let each held runner continue as far as it can.

        Returns:
            The result of each pass that ended, as from `DurableHarness.deliver`.
        """
        self.is_open = True
        held, self._held = self._held, []
        for thread in held:
            if not thread.is_over:
                thread.takes_turns = False  # the threads that it took turns with have ended, or are held too
                thread.go()
        return [thread.result for thread in held if thread.result is not None]

    def abandon(self) -> None:
        """End the held threads without continuing their passes. The harness calls it when it closes."""
        self.is_open = True
        held, self._held = self._held, []
        for thread in held:
            thread.kill()

    def stop(self) -> None:
        """Wait here while the barrier is closed. The runtime calls it before it calls a step's function."""
        thread = current_cooperative_thread()
        if thread is None:
            raise HeldOutside(
                f"{self!r} would hold the test itself: have the harness deliver, with tick(), run_until_idle() or "
                "deliver()."
            )
        if not self.is_open:
            self._held.append(thread)
            thread.park(f"barrier {self.step}")
