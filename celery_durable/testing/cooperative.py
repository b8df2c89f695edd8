"""Runners at the same time, one at a time: threads that take turns, so that every run of a test is the same.

A lane runs only while somebody waits for it in `go`. It hands the turn back where it is held (a barrier), where
it lets others go first (a checkpoint between two effects), and when it ends.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_current: contextvars.ContextVar[CooperativeThread | None] = contextvars.ContextVar("celery_durable_lane", default=None)


class Crash(BaseException):
    """The process dies here: nothing that it does from now on reaches the database."""


class CooperativeThread:
    """One delivery of a message, on a thread of its own. ``takes_turns``: it also stops at checkpoints."""

    def __init__(self, run: Callable[[], str], *, name: str, takes_turns: bool = False) -> None:
        self.name, self.takes_turns = name, takes_turns
        self.result: str | None = None
        self.parked_at: str | None = None
        self.bodies = 0
        """How many bodies it is in: what holds locks must not wait for others."""
        self._run = run
        self._error: BaseException | None = None
        self._must_die = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=f"durable-lane-{name}", daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the delivery has ended."""
        return self.result is not None or self._error is not None

    @property
    def is_held(self) -> bool:
        """Whether it stands before a barrier, until that is released."""
        return self.parked_at is not None and self.parked_at.startswith("barrier ")

    def go(self) -> None:
        """Let it run until it parks or ends; raises what the delivery raised."""
        self.parked_at = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """End it where it is parked, as a crash."""
        self._must_die = True
        while not self.is_over:
            self.go()

    def park(self, where: str) -> None:
        """Hand the turn back and wait for the next one; on the lane's own thread."""
        self.parked_at = where
        self._back.release()
        self._turn.acquire()
        if self._must_die:
            raise Crash(where)

    def _main(self) -> None:
        _current.set(self)
        try:
            self.result = self._run()
        except BaseException as exc:  # noqa: BLE001  # raised again where the turn goes
            self._error = exc
        finally:
            self._back.release()


def current_cooperative_thread() -> CooperativeThread | None:
    """The lane that runs this code; None on the test's own thread."""
    return _current.get()


@contextmanager
def in_body() -> Iterator[None]:
    """While a body runs, its lane does not let others go first."""
    thread = current_cooperative_thread()
    if thread is None:
        yield
        return
    thread.bodies += 1
    try:
        yield
    finally:
        thread.bodies -= 1
