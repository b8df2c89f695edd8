"""The bootstep that reports the tasks of a worker, from the start of its pool to its end (see `reporter`)."""

from __future__ import annotations

from typing import Any

from celery import bootsteps


class HeldTasksStep(bootsteps.StartStopStep):
    """Starts with the pool and runs until Celery reports the shutdown: until then the pool holds tasks."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._internals: Any = parent.app.durable.internals
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        self._internals.processes.start_reports(lambda: _find_consumer(parent))

    def stop(self, parent: Any) -> None:
        """Do nothing: this bootstep stops before the pool, which still works on the tasks that it holds."""

    def terminate(self, parent: Any) -> None:  # noqa: ARG002  # the bootstep's signature
        """Stop reporting: Celery kills the pool next, and sends no signal when the worker has ended."""
        self._internals.processes.stop_reports()


def _find_consumer(worker: Any) -> Any:
    """The worker's consumer while it receives messages or is about to; None when the worker shuts down."""
    states: Any = bootsteps
    return None if worker.blueprint.state in (states.CLOSE, states.TERMINATE) else worker.consumer
