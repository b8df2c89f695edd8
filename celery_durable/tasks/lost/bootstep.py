"""A worker's bootstep: it answers inventories from the start of its pool to the end of it."""

from __future__ import annotations

from typing import Any

from celery import bootsteps


class LostTasksStep(bootsteps.StartStopStep):
    """Begins with the pool. It ends when Celery says that the worker has shut down: until then the pool holds tasks."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._durable: Any = parent.app.durable
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        self._durable.start_inventories(lambda: _receiver(parent))

    def stop(self, parent: Any) -> None:
        """Go on: this stops before the pool, which works on what it has."""

    def terminate(self, parent: Any) -> None:  # noqa: ARG002  # the bootstep's signature
        """The pool is killed next, and Celery tells nobody when the worker has ended."""
        self._durable.stop_inventories()


def _receiver(worker: Any) -> Any:
    """The worker's consumer as long as it receives messages, or is about to, else None."""
    states: Any = bootsteps
    return None if worker.blueprint.state in (states.CLOSE, states.TERMINATE) else worker.consumer
