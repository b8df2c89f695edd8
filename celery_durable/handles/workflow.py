"""`Workflow` and `WorkflowInstance`, the handles by which applications start and control workflows."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from celery_durable import values
from celery_durable.definitions import Definition, WorkflowDefinition
from celery_durable.errors import DefinitionInvalid, ResultTimeout, WorkflowFailed
from celery_durable.handles.host import Host
from celery_durable.handles.instance_handle import InstanceHandle
from celery_durable.model import (
    TERMINAL,
    CreateOptions,
    IfExists,
    InstanceStatus,
    InstanceSummary,
    Page,
    RestartOrCreateResult,
    Status,
    WorkflowEvent,
)
from celery_durable.operations import Operations
from celery_durable.step import Step

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

P = TypeVar("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Workflow(Generic[P, R]):
    """A workflow, made by `durable_workflow`, `Durable.workflow` or `LinearWorkflow`.

    Create, find and list its instances here. In a test, call it to run its function directly.
    """

    def __init__(self, definition: Definition, host: Callable[[], Host]) -> None:
        self.definition, self._host = definition, host
        if isinstance(definition, WorkflowDefinition):
            functools.update_wrapper(self, definition.fn)

    def __call__(self, event: WorkflowEvent[P], step: Step) -> R:
        """Call the workflow's function directly, without storing anything.

        Args:
            event: The first argument of the function.
            step: The second argument of the function.

        Returns:
            The function's return value.

        Raises:
            DefinitionInvalid: The workflow is linear, so it has handlers instead of a function.
        """
        if not isinstance(self.definition, WorkflowDefinition):
            raise DefinitionInvalid(f"Workflow {self.name!r} is linear: call one of its handlers instead.")
        result: R = self.definition.fn(event, step)
        return result

    def __repr__(self) -> str:
        return f"<Workflow {self.name!r}>"

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return self.definition.name

    @property
    def host(self) -> Host:
        """The `Durable` it runs under.

        Raises:
            NotConfigured: This process has none, or several and no current Celery app.
        """
        return self._host()

    def create(
        self,
        params: P | None = None,
        *,
        id: str | None = None,  # the public name
        if_exists: IfExists = "error",
        run_at: datetime | None = None,
        labels: Mapping[str, str] | None = None,
        session: Session | None = None,
    ) -> WorkflowInstance[R]:
        """Create an instance and have a worker start it. If this raises, nothing is written.

        Args:
            params: What the workflow's function gets as ``event.payload``; up to 1 MiB as JSON.
            id: Unique within this workflow; 1 to 100 of the characters ``a-z A-Z 0-9 _ -``. None: a random one.
            if_exists: What happens if an instance has this id: "error" raises InstanceAlreadyExists, "return" returns
                that instance unchanged.
            run_at: An aware datetime before which the instance does not start, up to ``durable_max_sleep_seconds`` (a
                year) ahead. None: it starts now.
            labels: Up to 16 names and values by which `list` finds it.
            session: Create it in the transaction of this SQLAlchemy session, which must be bound to the store's
                database. You commit; workers are notified after that.

        Returns:
            The handle of the instance.

        Raises:
            NotConfigured: This process has no `Durable`.
            WorkflowNotFound: The workflow is not registered with this app.
            WorkflowParamsInvalid: ``params`` does not fit the type that the workflow declares.
            InstanceAlreadyExists: The id is taken.
            InvalidInstanceId: The id breaks the rules.
            NotSerializable: ``params`` has no JSON form.
            PayloadTooLarge: ``params`` is larger than ``durable_max_payload_bytes``.
            InvalidLabel: A label breaks the rules.
            TooManyLabels: There are more than 16 labels.
            InstantInvalid: ``run_at`` has no time zone.
            StartTooFar: ``run_at`` is too far ahead.
            StoreMismatch: ``session`` belongs to another database.
        """
        made = self.host.internals.operations.create.instance(
            self.name, params, id=id, if_exists=if_exists, run_at=run_at, labels=labels, session=session
        )
        return WorkflowInstance(self, made)

    def restart_or_create(
        self,
        params: P | None = None,
        *,
        id: str,
        if_status: Collection[Status | str] = TERMINAL,
        if_version: Collection[str] | None = None,
        reason: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> RestartOrCreateResult:
        """Restart the instance with this id, or create it if there is none. Safe to call concurrently.

        A restart keeps the parameters and the labels of the instance.

        Args:
            params: For a new instance, as in `create`.
            id: The instance's id, as in `create`.
            if_status: Restart it only if it has one of these statuses; by default, if it has ended.
            if_version: Restart it only if it has one of these versions, the ETags of the HTTP API. None: any.
            reason: Why, for the history; cut to 2048 characters.
            labels: For a new instance, as in `create`.

        Returns:
            The ``outcome`` "created", "restarted" or "unchanged", with the instance's id, run and status.

        Raises:
            VersionMismatch: The instance has none of the versions in ``if_version``.
            WorkflowParamsInvalid: ``params`` does not fit, also if the instance exists.
            InvalidInstanceId: The id breaks the rules.
        """
        return self.host.internals.operations.create.restart_or_create(
            self.name, params, id=id, if_status=if_status, if_version=if_version, reason=reason, labels=labels
        )

    def delay(self, params: P | None = None) -> WorkflowInstance[R]:
        """Create an instance with a random id, as `create` does. Named as in Celery.

        Args:
            params: As in `create`.

        Returns:
            The handle of the instance.
        """
        return self.create(params)

    def create_batch(self, batch: Sequence[CreateOptions[P]]) -> list[WorkflowInstance[R]]:
        """Create up to ``durable_max_batch`` (100) instances in one transaction.

        An id that exists, or that comes twice in the batch, is skipped. If one item is invalid, nothing is written.

        Args:
            batch: The id, the parameters and the labels of each instance.

        Returns:
            The handles of the new instances. Skipped ids are left out.

        Raises:
            BatchTooLarge: The batch has too many items.
            WorkflowParamsInvalid: The parameters of an item do not fit; ``item`` is its id.
            InvalidInstanceId: An id breaks the rules.
        """
        return [WorkflowInstance(self, made) for made in self.host.internals.operations.create.batch(self.name, batch)]

    async def acreate_batch(self, batch: Sequence[CreateOptions[P]]) -> list[WorkflowInstance[R]]:
        """`create_batch` for async code, on a thread."""
        return await asyncio.to_thread(self.create_batch, batch)

    def get(self, id: str) -> WorkflowInstance[R]:
        """Return the handle of an existing instance.

        Args:
            id: The instance's id.

        Raises:
            InstanceNotFound: No instance of this workflow has this id.
        """
        self.host.internals.operations.queries.get(self.name, id)
        return WorkflowInstance(self, id)

    def list(
        self,
        *,
        status: Status | str | None = None,
        cursor: str | None = None,
        limit: int = 25,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """List instances of this workflow, newest first, one page at a time.

        Args:
            status: Only instances with this status.
            cursor: The ``cursor`` of the page before, called with the same filter. None: the first page.
            limit: The maximum number of items on a page, 1 to 1000.
            labels: Only instances that have all of these labels.

        Returns:
            A page. Its ``cursor`` is None if it is the last one.

        Raises:
            CursorInvalid: The cursor is not from this list with this filter.
            InvalidLabel: A label breaks the rules.
            ValueRefused: ``limit`` is not between 1 and 1000.
        """
        wanted = None if status is None else Status(status)
        return self.host.internals.operations.queries.list(
            self.name, status=wanted, cursor=cursor, limit=limit, labels=labels
        )

    # --- the same for async code: each call runs on a thread of the event loop's executor -------

    async def acreate(
        self,
        params: P | None = None,
        *,
        id: str | None = None,
        if_exists: IfExists = "error",
        run_at: datetime | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> WorkflowInstance[R]:
        """`create` for async code, on a thread; without ``session``."""
        return await asyncio.to_thread(
            lambda: self.create(params, id=id, if_exists=if_exists, run_at=run_at, labels=labels)
        )

    async def arestart_or_create(
        self,
        params: P | None = None,
        *,
        id: str,
        if_status: Collection[Status | str] = TERMINAL,
        if_version: Collection[str] | None = None,
        reason: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> RestartOrCreateResult:
        """`restart_or_create` for async code, on a thread."""
        return await asyncio.to_thread(
            lambda: self.restart_or_create(
                params, id=id, if_status=if_status, if_version=if_version, reason=reason, labels=labels
            )
        )

    async def adelay(self, params: P | None = None) -> WorkflowInstance[R]:
        """`delay` for async code, on a thread."""
        return await asyncio.to_thread(self.delay, params)

    async def aget(self, id: str) -> WorkflowInstance[R]:
        """`get` for async code, on a thread."""
        return await asyncio.to_thread(self.get, id)

    async def alist(
        self,
        *,
        status: Status | str | None = None,
        cursor: str | None = None,
        limit: int = 25,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """`list` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.list(status=status, cursor=cursor, limit=limit, labels=labels))


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
    def _operations(self) -> Operations:
        return self.workflow.host.internals.operations

    def status(self) -> InstanceStatus:
        """Return the current status, with the output of a complete instance or the error of a failed one."""
        return self._operations.queries.get(self.workflow.name, self.id).status

    def result(self, timeout: values.Duration | None = None) -> R_co:
        """Wait until the instance ends and return its output.

        Polls the database, at first often, then twice a second. No Celery result backend is needed.

        Args:
            timeout: How long to wait: a timedelta, seconds, or text such as "5 minutes". None: without end.

        Returns:
            The workflow's return value, converted to its return annotation.

        Raises:
            WorkflowFailed: The instance failed or was terminated.
            ResultTimeout: It did not end in time.
        """
        runtime = self.workflow.host.internals.runtime
        limit = None if timeout is None else values.parse_duration(timeout)
        deadline = None if limit is None else runtime.monotonic() + limit.total_seconds()
        pause = 0.01
        while True:
            status = self.status()
            if status.status.is_terminal:
                return self._output(status)
            if deadline is not None and limit is not None and runtime.monotonic() >= deadline:
                raise ResultTimeout(self.workflow.name, self.id, status.status, limit.total_seconds())
            runtime.sleep(pause if deadline is None else min(pause, max(0.0, deadline - runtime.monotonic())))
            pause = min(pause * 1.5, 0.5)

    def _output(self, status: InstanceStatus) -> R_co:
        if status.status is not Status.COMPLETE:
            error = status.error
            raise WorkflowFailed(
                self.workflow.name,
                self.id,
                status.status,
                None if error is None else error.name,
                None if error is None else error.message,
            )
        output: R_co = self.workflow.definition.output.decode(json.dumps(status.output))
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
        """
        return type(self)(self.workflow, self._operations.rewind.fork(self.workflow.name, self.id, step, id=id))

    # --- the same for async code: each call runs on a thread of the event loop's executor -------

    async def astatus(self) -> InstanceStatus:
        """`status` for async code, on a thread."""
        return await asyncio.to_thread(self.status)

    async def aresult(self, timeout: values.Duration | None = None) -> R_co:  # noqa: ASYNC109  # as result()
        """`result` for async code. It occupies a thread of the event loop's executor while it waits."""
        return await asyncio.to_thread(self.result, timeout)

    async def afork(self, step: str, *, id: str | None = None) -> Self:
        """`fork` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.fork(step, id=id))


class WorkflowDecorator(Protocol):
    """What `durable_workflow` and `Durable.workflow` return if they are called with options."""

    def __call__(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]:
        """Make the function a workflow."""
