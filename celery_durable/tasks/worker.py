"""Where our parts live in Celery's processes: the dispatcher in beat and worker, what a dying worker leaves behind.

A flag in shared memory, made before the pool forks, tells the children that the worker shuts down: they
hand their runs on at the next step boundary.
"""

from __future__ import annotations

import mmap
from typing import Any

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured

from celery_durable.tasks.hearing import check_hearing

_LOOK_SECONDS = 0.5
_SUPPORTED_POOLS = ("prefork", "thread", "solo")


class StopFlag:
    """One byte that parent and children share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def is_set(self) -> bool:
        return self._memory[0] != 0

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0


class DurableStep(bootsteps.StartStopStep):
    """A worker's part: refuse pools we cannot keep our word on, and host the dispatcher where the settings say so."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self.durable: Any = parent.app.durable
        self._looks: list[Any] = []
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        check_pool(parent.pool_cls)
        self.durable.worker_started(parent.hostname)

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Look for pool processes that died, to hand on their runs: Celery sees some only every 5 s.

        And for a connection that was lost without Celery noticing.
        """
        for look in self._looks:  # each connection to the broker registers anew
            look.cancel()
        self._looks = [
            hub.call_repeatedly(_LOOK_SECONDS, parent.pool.maintain_pool),
            hub.call_repeatedly(_LOOK_SECONDS, check_hearing, parent.consumer),
        ]

    def stop(self, parent: Any) -> None:  # noqa: ARG002  # the bootstep's signature
        self.durable.worker_stopped()

    terminate = stop


def check_pool(pool: Any) -> None:
    """Raise for pools on which leases, timers and commits are not tested to hold."""
    module = getattr(pool, "__module__", str(pool)).rpartition(".")[2]
    if module not in _SUPPORTED_POOLS:
        raise ImproperlyConfigured(
            f"celery_durable does not run on the {module!r} pool: its cooperative threads starve the lease keeper. "
            "Run this queue on a worker with -P prefork, threads or solo."
        )
