"""`WorkflowInstance`, the handle of an instance of a known workflow."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import ResultTimeout, WorkflowFailed
from celery_durable.handles.host import HostInternals
from celery_durable.handles.instance_handle import InstanceHandle
from celery_durable.model import InstanceStatus, Status

# The result of an instance: waiting for it, and its type.


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


if TYPE_CHECKING:  # a workflow makes the handles of its instances
    from celery_durable.handles.workflow import Workflow

R_co = TypeVar("R_co", covariant=True)


class WorkflowInstance(InstanceHandle, Generic[R_co]):
    """The handle of an instance. It holds no state: every call reads or changes the database.

    Every method raises InstanceNotFound if the instance does not exist, or was deleted.

    Attributes:
        workflow: The `Workflow`.
        id: The instance's id.
    """

    def __init__(self, workflow: Workflow[Any, R_co], id: str) -> None:
        super().__init__(workflow.name, id)
        self.workflow = workflow

    def __repr__(self) -> str:
        return f"<WorkflowInstance {self.workflow.name}/{self.id}>"

    @property
    def _internals(self) -> HostInternals:
        return self.workflow.host.internals

    def status(self) -> InstanceStatus:
        """Return the current status, with the output of a complete instance or the error of a failed one.

        Raises:
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.queries.get(self.workflow.name, self.id).status

    def result(self, timeout: values.Duration | None = None) -> R_co:
        """Wait until the instance ends and return its output.

        Polls the database, at first often, then twice a second. No Celery result backend is needed.
        Inside the ``atomic()`` block of Django that creates the instance it waits in vain: call it after the commit.

        Args:
            timeout: How long to wait: a timedelta, seconds, or text such as "5 minutes". None: without end.

        Returns:
            The workflow's return value, converted to its return annotation.

        Raises:
            WorkflowFailed: The instance failed or was terminated.
            ResultTimeout: It did not end in time.
            StoreUnavailable: The database cannot do this now.
        """
        output: R_co = wait_for_result(self._internals, self.workflow.definition, self.id, timeout)
        return output

    def fork(self, step: str, *, id: str | None = None) -> Self:
        """Create another instance that continues from before a step of the current run. This instance is not changed.

        It gets the same parameters and labels, and copies of the earlier results and of the events.

        Args:
            step: The step, as in `restart`.
            id: The new instance's id, as in `Workflow.create`.

        Returns:
            The handle of the new instance.

        Raises:
            StepNotFound: The current run has no step with this name.
            InvalidInstanceId: The id breaks the rules.
            InstanceAlreadyExists: The id is taken.
            ValueRefused: A linear run has not reached the step.
            StoreUnavailable: The database cannot do this now.
        """
        return type(self)(self.workflow, self._operations.rewind.fork(self.workflow.name, self.id, step, id=id))

    # --- the same for async code: each call runs on a thread ------------------------------------

    async def astatus(self) -> InstanceStatus:
        """`status` for async code, on a thread."""
        return await self._call(self.status)

    async def aresult(self, timeout: values.Duration | None = None) -> R_co:  # noqa: ASYNC109  # as result()
        """`result` for async code. Between two looks at the database it occupies no thread."""
        output: R_co = await await_result(self._internals, self.workflow.definition, self.id, timeout)
        return output

    async def afork(self, step: str, *, id: str | None = None) -> Self:
        """`fork` for async code, on a thread."""
        return await self._call(lambda: self.fork(step, id=id))
