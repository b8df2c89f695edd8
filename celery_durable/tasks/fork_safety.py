"""Internal threads that pause while their process forks.

If a process forks while such a thread works, the child inherits locked locks, for example SQLite's, that no thread
releases.
"""

from __future__ import annotations

import os
import threading
import weakref

from celery_durable.runtime import real_monotonic

_MAX_FORK_WAIT_SECONDS = 1.0
"""How long a fork waits for all threads together.

The wait is short: a pool forks in Celery's main loop, and each thread may be waiting for a database that is down.
"""


class ForkSafeThread:
    """The base of classes with a thread of their own, which holds ``fork_lock`` while it works."""

    def __init__(self) -> None:
        self.fork_lock = threading.Lock()

    def reset_fork_lock(self) -> None:
        """Make a new lock for a thread that starts: the old lock may be a locked copy from the parent process."""
        self.fork_lock = threading.Lock()
        _started.add(self)

    def pause(self, timeout: float) -> bool:
        """Keep the thread from working until `resume`; returns False if the thread did not pause in time."""
        return self.fork_lock.acquire(timeout=timeout)

    def resume(self) -> None:
        self.fork_lock.release()


_started: weakref.WeakSet[ForkSafeThread] = weakref.WeakSet()
_paused: list[list[ForkSafeThread]] = []


def _before_fork() -> None:
    deadline = real_monotonic() + _MAX_FORK_WAIT_SECONDS
    _paused.append([each for each in list(_started) if each.pause(max(0.0, deadline - real_monotonic()))])


def _after_fork() -> None:
    for each in _paused.pop():
        each.resume()


def _in_child() -> None:
    _started.clear()
    _paused.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
