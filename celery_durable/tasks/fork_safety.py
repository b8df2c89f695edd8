"""Threads of ours that hold still while their process forks.

A fork in the middle of their work would leave the child with locks, SQLite's own among them, that nobody opens.
"""

from __future__ import annotations

import os
import threading
import weakref

from celery_durable.runtime import steady

_PATIENCE_SECONDS = 1.0
"""For all of them together: a pool forks in Celery's main loop, and each thread may be waiting for a dead database."""


class ForkSafeThread:
    """Whoever works on a thread of its own, holding ``may_work`` meanwhile."""

    def __init__(self) -> None:
        self.fork_lock = threading.Lock()

    def reset_fork_lock(self) -> None:
        """A thread begins, with a lock of its own: the last one may be a parent's."""
        self.fork_lock = threading.Lock()
        _started.add(self)

    def hold_still(self, timeout: float) -> bool:
        """Keep the thread from working until `go_on`; False where it did not come to rest in time."""
        return self.fork_lock.acquire(timeout=timeout)

    def go_on(self) -> None:
        self.fork_lock.release()


_started: weakref.WeakSet[ForkSafeThread] = weakref.WeakSet()
_still: list[list[ForkSafeThread]] = []


def _before_fork() -> None:
    end = steady() + _PATIENCE_SECONDS
    _still.append([each for each in list(_started) if each.hold_still(max(0.0, end - steady()))])


def _after_fork() -> None:
    for each in _still.pop():
        each.go_on()


def _in_child() -> None:
    _started.clear()
    _still.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
