"""`Workflow`, the handle by which applications start and find instances, and `WorkflowInstance`, the handle of one."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, Unpack, overload

from celery_durable.definitions import Definition, WorkflowDefinition
from celery_durable.errors import AsyncNotSupported, DefinitionInvalid
from celery_durable.handles import signatures
from celery_durable.handles.host import Host, HostInternals, call_with
from celery_durable.handles.instance_handle import InstanceHandle
from celery_durable.handles.results import await_result, wait_for_result
from celery_durable.handles.signatures import StartSignatures
from celery_durable.model import (
    TERMINAL,
    CreateOptions,
    EventWait,
    IfExists,
    IfRunning,
    InstanceStatus,
    InstanceSummary,
    Page,
    RestartOrCreateResult,
    Status,
    WaitFilter,
    WorkflowEvent,
)
from celery_durable.step import Step
from celery_durable.values import Duration

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class Workflow(StartSignatures[P_contra], Generic[P_contra, R]):
    """A workflow, made by `durable_workflow`, `Durable.workflow` or `LinearWorkflow`.

    Create, find and list its instances here. In a test, call it to run its function directly.
    """

    def __init__(self, definition: Definition, host: Callable[[], Host]) -> None:
        super().__init__(definition, host)
        if isinstance(definition, WorkflowDefinition):
            functools.update_wrapper(self, definition.fn)

    def __call__(self, event: WorkflowEvent[P_contra], step: Step) -> R:
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

    def _call(self, call: Callable[[], T]) -> Awaitable[T]:
        return self.host.internals.call_async(call)

    def _check_using(self, using: str | None) -> None:
        if using is not None:
            self.host.internals.check_using(using)

    @overload
    def create(
        self: Workflow[None, R], params: None = None, **options: Unpack[signatures.CreateKeywords]
    ) -> WorkflowInstance[R]: ...
    @overload
    def create(self, params: P_contra, **options: Unpack[signatures.CreateKeywords]) -> WorkflowInstance[R]: ...
    def create(
        self,
        params: P_contra | None = None,
        *,
        id: str | None = None,  # the public name
        if_exists: IfExists = "error",
        if_running: IfRunning | None = None,
        run_at: datetime | Duration | None = None,
        at_latest: Duration | None = None,
        max_run: Duration | None = None,
        labels: Mapping[str, str] | None = None,
        session: Session | None = None,
        using: str | None = None,
    ) -> WorkflowInstance[R]:
        """Create an instance and have a worker start it. If this raises, nothing is written.

        Args:
            params: What the workflow's function gets as ``event.payload``; up to 1 MiB as JSON.
            id: Unique within this workflow; 1 to 100 of the characters ``a-z A-Z 0-9 _ -``. None: a random one.
            if_exists: What happens if an instance has this id: "error" raises InstanceAlreadyExists, "return" returns
                that instance unchanged. "postpone" gives it the new parameters and the later ``run_at`` if its run has
                not begun. If it has, another run with the newest parameters follows it, and an instance that has ended
                runs again.
            if_running: What happens if an instance has this id and its run has not ended: "skip" does nothing, "queue"
                runs it once more when it ends, with the newest parameters. One that has ended runs again.
            run_at: The earliest start, up to ``durable_max_sleep_seconds`` (a year) ahead: an aware datetime, or a
                duration from now, such as "30 seconds". None: it starts now.
            at_latest: For ``if_exists="postpone"``: how long after the creation of a run its start can be postponed at
                most. None: for ever.
            max_run: How long each run of the instance may take: a timedelta, seconds or text such as "2 hours". A run
                that takes longer is terminated. It replaces the ``max_run_duration`` of the workflow. Restarts,
                retries and forks keep it. None: as long as the workflow says.
            labels: Up to 16 names and values by which `list` finds it.
            session: Create it in the transaction of this SQLAlchemy session, which must be bound to the store's
                database. You commit; workers are notified after that.
            using: The alias of the database in a Django project, to make sure that it is the one of the ``atomic()``
                block around the call. None: that of the workflows.

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
            DurationInvalid: ``max_run`` is no duration between a second and 36,500 days, or ``run_at`` or ``at_latest``
                is none.
            StoreMismatch: ``session`` is bound to another database.
            ValueRefused: ``session`` is not bound to one engine, or is no session; or an option contradicts another.
            AliasMismatch: ``using`` names another database.
            StoreUnavailable: The database cannot do this now.
        """
        self._check_using(using)
        made = self.host.internals.operations.create.instance(
            self.name,
            params,
            id=id,
            if_exists=if_exists,
            if_running=if_running,
            run_at=run_at,
            at_latest=at_latest,
            max_run=max_run,
            labels=labels,
            session=session,
        )
        return WorkflowInstance(self, made)

    @overload
    def restart_or_create(
        self: Workflow[None, R], params: None = None, **options: Unpack[signatures.RestartKeywords]
    ) -> RestartOrCreateResult: ...
    @overload
    def restart_or_create(
        self, params: P_contra, **options: Unpack[signatures.RestartKeywords]
    ) -> RestartOrCreateResult: ...
    def restart_or_create(
        self,
        params: P_contra | None = None,
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
            StoreUnavailable: The database cannot do this now.
        """
        return self.host.internals.operations.create.restart_or_create(
            self.name, params, id=id, if_status=if_status, if_version=if_version, reason=reason, labels=labels
        )

    @overload
    def delay(self: Workflow[None, R], params: None = None) -> WorkflowInstance[R]: ...
    @overload
    def delay(self, params: P_contra) -> WorkflowInstance[R]: ...
    def delay(self, params: Any = None) -> WorkflowInstance[R]:
        """Create an instance with a random id, as `create` does. Named as in Celery.

        Args:
            params: As in `create`.

        Returns:
            The handle of the instance.
        """
        return self.create(params)

    def create_batch(
        self, batch: Sequence[CreateOptions[P_contra]], *, session: Session | None = None, using: str | None = None
    ) -> list[WorkflowInstance[R]]:
        """Create up to ``durable_max_batch`` (1000) instances in one transaction.

        An id that exists, or that comes twice in the batch, is skipped. If one item is invalid, nothing is written.

        Args:
            batch: The id, the parameters and the labels of each instance.
            session: As in `create`.
            using: As in `create`.

        Returns:
            The handles of the new instances. Skipped ids are left out.

        Raises:
            ValueRefused: The batch has no length, or an item is no `CreateOptions`.
            BatchTooLarge: The batch has too many items.
            WorkflowParamsInvalid: The parameters of an item do not fit; ``item`` is its id.
            InvalidInstanceId: An id breaks the rules.
            StoreMismatch: As in `create`.
            AliasMismatch: As in `create`.
            StoreUnavailable: As in `create`.
        """
        self._check_using(using)
        made = self.host.internals.operations.create.batch(self.name, batch, session=session)
        return [WorkflowInstance(self, each) for each in made]

    async def acreate_batch(
        self, batch: Sequence[CreateOptions[P_contra]], *, session: AsyncSession | None = None, using: str | None = None
    ) -> list[WorkflowInstance[R]]:
        """`create_batch` for async code, in the transaction of ``session`` or on a thread."""
        return await call_with(
            session, self.host.internals, lambda joined: self.create_batch(batch, session=joined, using=using)
        )

    def get(self, id: str) -> WorkflowInstance[R]:
        """Return the handle of an existing instance.

        Args:
            id: The instance's id.

        Raises:
            InstanceNotFound: No instance of this workflow has this id.
            StoreUnavailable: The database cannot do this now.
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
            ValueRefused: ``limit`` is not between 1 and 1000, or the status does not exist.
            StoreUnavailable: The database cannot do this now.
        """
        return self.host.internals.operations.queries.list(
            self.name, status=status, cursor=cursor, limit=limit, labels=labels
        )

    def waits(
        self,
        *,
        event_type: str | None = None,
        to: str | None = None,
        is_asking: bool = False,
        cursor: str | None = None,
        limit: int = 25,
    ) -> Page[EventWait]:
        """List the steps of this workflow that wait for an event, as `Durable.waits` does for all workflows."""
        chosen = WaitFilter(workflow=self.name, event_type=event_type, to=to, is_asking=is_asking)
        return self.host.internals.operations.stats.waits(chosen, cursor=cursor, limit=limit)

    # --- the same for async code: each call runs on a thread ------------------------------------

    @overload
    async def acreate(
        self: Workflow[None, R], params: None = None, **options: Unpack[signatures.AsyncCreateKeywords]
    ) -> WorkflowInstance[R]: ...
    @overload
    async def acreate(
        self, params: P_contra, **options: Unpack[signatures.AsyncCreateKeywords]
    ) -> WorkflowInstance[R]: ...
    async def acreate(
        self,
        params: Any = None,
        *,
        id: str | None = None,
        if_exists: IfExists = "error",
        if_running: IfRunning | None = None,
        run_at: datetime | Duration | None = None,
        at_latest: Duration | None = None,
        max_run: Duration | None = None,
        labels: Mapping[str, str] | None = None,
        session: AsyncSession | None = None,
        using: str | None = None,
    ) -> WorkflowInstance[R]:
        """`create` for async code, in the transaction of ``session`` or on a thread."""
        create = functools.partial(
            self.create,
            params,
            id=id,
            if_exists=if_exists,
            if_running=if_running,
            run_at=run_at,
            at_latest=at_latest,
            max_run=max_run,
            labels=labels,
            using=using,
        )
        return await call_with(session, self.host.internals, lambda joined: create(session=joined))

    @overload
    async def arestart_or_create(
        self: Workflow[None, R], params: None = None, **options: Unpack[signatures.RestartKeywords]
    ) -> RestartOrCreateResult: ...
    @overload
    async def arestart_or_create(
        self, params: P_contra, **options: Unpack[signatures.RestartKeywords]
    ) -> RestartOrCreateResult: ...
    async def arestart_or_create(
        self,
        params: Any = None,
        *,
        id: str,
        if_status: Collection[Status | str] = TERMINAL,
        if_version: Collection[str] | None = None,
        reason: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> RestartOrCreateResult:
        """`restart_or_create` for async code, on a thread."""
        return await self._call(
            lambda: self.restart_or_create(
                params, id=id, if_status=if_status, if_version=if_version, reason=reason, labels=labels
            )
        )

    @overload
    async def adelay(self: Workflow[None, R], params: None = None) -> WorkflowInstance[R]: ...
    @overload
    async def adelay(self, params: P_contra) -> WorkflowInstance[R]: ...
    async def adelay(self, params: Any = None) -> WorkflowInstance[R]:
        """`delay` for async code, on a thread."""
        return await self._call(lambda: self.delay(params))

    async def aget(self, id: str) -> WorkflowInstance[R]:
        """`get` for async code, on a thread."""
        return await self._call(lambda: self.get(id))

    async def alist(
        self,
        *,
        status: Status | str | None = None,
        cursor: str | None = None,
        limit: int = 25,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """`list` for async code, on a thread."""
        return await self._call(lambda: self.list(status=status, cursor=cursor, limit=limit, labels=labels))

    async def awaits(
        self,
        *,
        event_type: str | None = None,
        to: str | None = None,
        is_asking: bool = False,
        cursor: str | None = None,
        limit: int = 25,
    ) -> Page[EventWait]:
        """`waits` for async code, on a thread."""
        return await self._call(
            lambda: self.waits(event_type=event_type, to=to, is_asking=is_asking, cursor=cursor, limit=limit)
        )


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

    def result(self, timeout: Duration | None = None) -> R_co:
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

    async def aresult(self, timeout: Duration | None = None) -> R_co:  # noqa: ASYNC109  # as result()
        """`result` for async code. Between two looks at the database it occupies no thread."""
        output: R_co = await await_result(self._internals, self.workflow.definition, self.id, timeout)
        return output

    async def afork(self, step: str, *, id: str | None = None) -> Self:
        """`fork` for async code, on a thread."""
        return await self._call(lambda: self.fork(step, id=id))


# `WorkflowDecorator`: what the decorators are if they are called with options, for type checkers.


P = TypeVar("P")

AsyncFunction = Callable[[WorkflowEvent[P], Step], Coroutine[Any, Any, Any]]
"""A function that is refused. Type checkers see that its decorator returns no workflow."""


class WorkflowDecorator(Protocol):
    """What `durable_workflow` and `Durable.workflow` return if they are called with options."""

    @overload
    def __call__(self, fn: AsyncFunction[P], /) -> AsyncNotSupported: ...  # type: ignore[overload-overlap]  # on purpose
    @overload
    def __call__(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
    def __call__(self, fn: Callable[..., Any], /) -> Any:
        """Make the function a workflow."""
