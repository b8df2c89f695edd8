"""The result of an instance: waiting for it, and its type."""

from __future__ import annotations

import json
import math
from typing import Any

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import ResultTimeout, WorkflowFailed
from celery_durable.handles.host import HostInternals
from celery_durable.model import InstanceStatus, Status


def wait_for_result(
    internals: HostInternals, definition: Definition, instance_id: str, timeout: values.Duration | None
) -> Any:
    """Poll the database, at first often, then twice a second, until the instance ends; return its output.

    Raises WorkflowFailed and ResultTimeout.
    """
    polling = _Polling(internals, definition, instance_id, timeout)
    while not (status := polling.read()).status.is_terminal:
        internals.runtime.wait_for_progress(*polling.next_pause(status))
    return decode_output(definition, instance_id, status)


async def await_result(
    internals: HostInternals,
    definition: Definition,
    instance_id: str,
    timeout: values.Duration | None,  # noqa: ASYNC109  # as wait_for_result
) -> Any:
    """Do what `wait_for_result` does, for async code."""
    polling = _Polling(internals, definition, instance_id, timeout)
    while not (status := await internals.call_async(polling.read)).status.is_terminal:
        await internals.runtime.wait_for_progress_async(*polling.next_pause(status), internals.call_async)
    return decode_output(definition, instance_id, status)


class _Polling:
    """Looks at an instance, at first often, then twice a second."""

    def __init__(
        self, internals: HostInternals, definition: Definition, instance_id: str, timeout: values.Duration | None
    ) -> None:
        self._internals, self._workflow, self._instance_id = internals, definition.name, instance_id
        self._limit = math.inf if timeout is None else values.parse_duration(timeout).total_seconds()
        self._deadline = internals.runtime.monotonic() + self._limit
        self._pause = 0.01

    def read(self) -> InstanceStatus:
        """Return the status as it is now."""
        return self._internals.operations.queries.get(self._workflow, self._instance_id).status

    def next_pause(self, status: InstanceStatus) -> tuple[float, float]:
        """Return the seconds until the next look, and until the last; raises ResultTimeout if there is none."""
        left = self._deadline - self._internals.runtime.monotonic()
        if left <= 0:
            raise ResultTimeout(self._workflow, self._instance_id, status.status, self._limit)
        pause, self._pause = min(self._pause, left), min(self._pause * 1.5, 0.5)
        return pause, left


def decode_output(definition: Definition, instance_id: str, status: InstanceStatus) -> Any:
    """Return the typed output of an instance that has ended; raises WorkflowFailed."""
    if status.status is not Status.COMPLETE:
        error = status.error
        raise WorkflowFailed(
            definition.name,
            instance_id,
            status.status,
            None if error is None else error.name,
            None if error is None else error.message,
        )
    return definition.output.decode(json.dumps(status.output))
