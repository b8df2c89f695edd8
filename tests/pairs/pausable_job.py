"""Work on its own thread, which a test can stop at a gate in its code, or while it holds a lock."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import Any

START = "start"
"""The gate before the work starts."""
_SECONDS = 30.0
_LOCKS = re.compile(r"\s*(INSERT|UPDATE|DELETE|WITH)\b|.*\bFOR (NO KEY )?UPDATE\b", re.DOTALL)


class HoldAt(StrEnum):
    """Where the first transaction that takes a lock is held open."""

    LOCK = "lock"
    """After the statement that took its first lock. It may still need other locks."""
    COMMIT = "commit"
    """Before it commits, with all its locks."""


class RolledBack(Exception):
    """Raised in the held transaction to make it roll back."""


class PausableJob:
    """Work on its own thread. It first stops where its code calls `pass_gate(gate)`."""

    def __init__(self, threads: ThreadPoolExecutor, work: Callable[[], Any], *, gate: str = START) -> None:
        self.is_held = False
        """Whether it was stopped while it had a lock."""
        self._work, self._gate = work, gate
        self._hold_at: HoldAt | None = None
        self._rolls_back, self._after = False, 0
        self._is_locking = False
        self._stopped, self._may_proceed = threading.Event(), threading.Event()
        self.future: Future[Any] = threads.submit(self._run)

    def _run(self) -> Any:
        _here.job = self
        try:
            self.at_gate(START)
            return self._work()
        finally:
            _here.job = None
            self._stopped.set()

    # --- from the test's thread -----------------------------------------------------------------

    def wait(self) -> None:
        """Wait until it stops at its gate or with its lock, or has ended."""
        assert self._stopped.wait(_SECONDS), "the job neither stops nor ends"

    def stops_within(self, seconds: float) -> bool:
        """Return whether it stops at its gate or with its lock, or ends, in this time."""
        return self._stopped.wait(seconds)

    def hold(self, at: HoldAt, *, rolls_back: bool = False, after: int = 0) -> None:
        """Make the job stop with the first lock that it takes from now on. `proceed` then rolls back or commits.

        ``after`` is how many transactions with locks are not stopped before.
        """
        self._hold_at, self._rolls_back, self._after, self._is_locking = at, rolls_back, after, False

    def proceed(self) -> None:
        """Continue from the gate, or from the stop with a lock."""
        self._stopped.clear()
        if self.future.done():
            self._stopped.set()
        self._may_proceed.set()

    # --- from the job's thread ------------------------------------------------------------------

    def at_gate(self, name: str) -> None:
        if self._gate == name:
            self._gate = ""
            self._stop()

    def started(self) -> None:
        self._is_locking = False

    def executed(self, statement: str, rows: int) -> None:
        if rows and "workflow_" in statement and _LOCKS.match(statement):
            self._is_locking = True
            if self._hold_at is HoldAt.LOCK and self._after == 0:
                self._stop_with_lock()

    def commits(self) -> None:
        if self._hold_at is not None and self._is_locking:
            if self._hold_at is HoldAt.COMMIT and self._after == 0:
                self._stop_with_lock()
            self._after -= 1

    def _stop_with_lock(self) -> None:
        self._hold_at, self.is_held = None, True
        self._stop()
        if self._rolls_back:
            raise RolledBack

    def _stop(self) -> None:
        self._may_proceed.clear()
        self._stopped.set()
        assert self._may_proceed.wait(_SECONDS), "the test did not call proceed()"


class _Here(threading.local):
    job: PausableJob | None = None


_here = _Here()


def current_job() -> PausableJob | None:
    """Return the job that runs on this thread, or None."""
    return _here.job


def pass_gate(name: str) -> None:
    """Mark a place in a workflow's code where a test can stop the job."""
    if (job := current_job()) is not None:
        job.at_gate(name)
