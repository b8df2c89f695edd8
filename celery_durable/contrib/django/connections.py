"""Closes the connections that Django opened for bodies, as Celery's own fixup does for tasks.

The fixup closes the connections of the thread that runs a task. The bodies of branches run on other threads, whose
connections it does not close.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from celery_durable import signals


class _Passes(threading.local):
    count = 0


_passes = _Passes()
"""How many passes this thread runs: more than one if eager tasks run inside a step."""


def connect() -> None:
    """Close connections after passes and after the bodies of branches, from now on."""
    signals.around_pass.connect(_around_pass)
    signals.around_step.connect(_around_body)


def is_branch_thread() -> bool:
    """Whether this thread runs the body of a branch, and not a pass. Its connections are closed after each body."""
    return not _passes.count


@contextmanager
def _around_pass(**_: Any) -> Iterator[None]:
    _passes.count += 1
    _close_old()
    try:
        yield
    finally:
        _passes.count -= 1
        _close_old()


@contextmanager
def _around_body(**_: Any) -> Iterator[None]:
    try:
        yield
    finally:
        if is_branch_thread():
            _close_all()


def _close_old() -> None:
    """Close connections that have failed or are older than CONN_MAX_AGE, as at the end of a request."""
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:  # the block of a test would end with its connection
            wrapper.close_if_unusable_or_obsolete()


def _close_all() -> None:
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:  # the block of this step; the pass commits it and closes the connection
            wrapper.close()
