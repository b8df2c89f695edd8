"""One side of a pair: work on a thread of its own, which can be made to wait at a gate, or while it holds a lock."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import Any

START = "start"
"""The gate before all work."""
_SECONDS = 30.0
_LOCKS = re.compile(r"\s*(INSERT|UPDATE|DELETE|WITH)\b|.*\bFOR (NO KEY )?UPDATE\b", re.DOTALL)


class HoldAt(StrEnum):
    """Where the first transaction that takes a lock is held open."""

    LOCK = "lock"
    """After the statement that took its first lock, so that it may still want others."""
    COMMIT = "commit"
    """With all its locks, before it commits."""


class RolledBack(Exception):
    """What ends a transaction that is to roll back."""


class Act:
    """Work on a thread of its own, which first stops where its code calls `pass_gate(gate)`."""

    def __init__(self, threads: ThreadPoolExecutor, work: Callable[[], Any], *, gate: str = START) -> None:
        self.is_held = False
        """Whether it was held while it had a lock."""
        self._work, self._gate = work, gate
        self._hold_at: HoldAt | None = None
        self._rolls_back, self._after = False, 0
        self._is_locking = False
        self._news, self._go = threading.Event(), threading.Event()
        self.future: Future[Any] = threads.submit(self._run)

    def _run(self) -> Any:
        _here.act = self
        try:
            self.at_gate(START)
            return self._work()
        finally:
            _here.act = None
            self._news.set()

    # --- from the test's thread -----------------------------------------------------------------

    def wait(self) -> None:
        """Until it stands at its gate or in its hold, or has ended."""
        assert self._news.wait(_SECONDS), "the act neither stops nor ends"

    @property
    def is_resting(self) -> bool:
        """Whether it stands at its gate or in its hold, or has ended."""
        return self._news.is_set()

    def hold(self, at: HoldAt, *, rolls_back: bool = False, after: int = 0) -> None:
        """From now on: stop with the first lock that is taken; then `go` on, to roll back or to commit.

        ``after``: so many transactions with locks pass before.
        """
        self._hold_at, self._rolls_back, self._after, self._is_locking = at, rolls_back, after, False

    def go(self) -> None:
        """Go on from the gate, or from the hold."""
        self._news.clear()
        if self.future.done():
            self._news.set()
        self._go.set()

    # --- from the act's thread ------------------------------------------------------------------

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
        self._go.clear()
        self._news.set()
        assert self._go.wait(_SECONDS), "nobody let the act go on"


class _Here(threading.local):
    act: Act | None = None


_here = _Here()


def current_act() -> Act | None:
    """The act whose thread this is."""
    return _here.act


def pass_gate(name: str) -> None:
    """A place in a workflow's code where an act may be made to stop."""
    if (act := current_act()) is not None:
        act.at_gate(name)
