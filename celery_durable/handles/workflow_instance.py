"""`WorkflowInstance`, the handle of an instance of a known workflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from celery_durable import values
from celery_durable.handles.host import HostInternals
from celery_durable.handles.instance_handle import InstanceHandle
from celery_durable.handles.results import await_result, wait_for_result
from celery_durable.model import InstanceStatus

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
