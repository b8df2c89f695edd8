"""`Workflow` and `WorkflowInstance`, the handles by which applications start and control workflows."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol, Self, TypeVar

from sqlalchemy.orm import Session

from celery_durable import values
from celery_durable.definitions import Definition, WorkflowDefinition
from celery_durable.errors import DefinitionInvalid, ResultTimeout, WorkflowFailed
from celery_durable.explain import Diagnosis
from celery_durable.model import (
    TERMINAL,
    CreateOptions,
    History,
    IfExists,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Published,
    RestartOrCreateResult,
    Status,
    WorkflowEvent,
)
from celery_durable.operations import Operations
from celery_durable.runtime import Runtime
from celery_durable.step import Step

P = TypeVar("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class HostInternals(Protocol):
    """The parts of a `Durable` that handles use."""

    @property
    def operations(self) -> Operations:
        """Creates, reads and changes instances."""

    @property
    def runtime(self) -> Runtime:
        """The clock."""


class Host(Protocol):
    """The `Durable` through which a handle acts."""

    @property
    def internals(self) -> HostInternals:
        """Its parts."""


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


class WorkflowInstance(Generic[R_co]):
    """The handle of an instance. It holds no state: every call reads or changes the database.

    Every method raises InstanceNotFound if the instance does not exist, or was deleted.

    Attributes:
        workflow: The `Workflow`.
        id: The instance's id.
    """

    def __init__(self, workflow: Workflow[Any, R_co], id: str) -> None:
        self.workflow, self.id = workflow, id

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

    def pause(self) -> None:
        """Pause the instance at the next step boundary. Timers and deadlines keep running.

        Raises:
            InstanceTerminal: It has ended.
        """
        self._operations.lifecycle.pause(self.workflow.name, self.id)

    def resume(self) -> None:
        """Resume a paused instance, or withdraw a pause that has not taken effect. Otherwise nothing happens."""
        self._operations.lifecycle.resume(self.workflow.name, self.id)

    def terminate(self, reason: str | None = None) -> None:
        """End the instance now, without a result. Nothing more of it is recorded.

        Args:
            reason: Why, for the history; cut to 2048 characters.

        Raises:
            InstanceTerminal: It has ended already.
        """
        self._operations.lifecycle.terminate(self.workflow.name, self.id, reason=reason)

    def restart(self, *, from_step: str | None = None, reason: str | None = None) -> int:
        """Start a new run with the same parameters, from any status. Earlier runs stay readable.

        Args:
            from_step: Keep the results of the steps that ended before this step was called, and all events. The key
                of a step is its name, unless it is repeated. None: run every step again.
            reason: Why, for the history; cut to 2048 characters.

        Returns:
            The number of the new run.

        Raises:
            StepNotFound: The current run has no step with this name.
            WorkflowNotFound: A linear workflow is not registered in this process.
            ValueRefused: ``from_step`` is a step that a linear run has not reached.
        """
        return self._operations.rewind.restart(self.workflow.name, self.id, from_step=from_step, reason=reason)

    def retry(self, *, reason: str | None = None) -> int:
        """Retry the failed step, in a new run that keeps all earlier results. The step gets new attempts.

        Args:
            reason: Why, for the history; cut to 2048 characters.

        Returns:
            The number of the new run.

        Raises:
            InstanceNotErrored: The instance has not failed.
        """
        return self._operations.rewind.retry(self.workflow.name, self.id, reason=reason)

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

    def set_result(self, step: str, value: Any, *, by: str, reason: str | None = None) -> int:
        """Complete a step by hand.

        An open step is completed in the current run. A step that failed the instance is completed in a new run, as
        in `retry`.

        Args:
            step: The step, as in `restart`.
            value: The step's result, JSON data. For a wait, the payload of its event.
            by: Your name, for `History.audit`.
            reason: Why, for `History.audit`; cut to 2048 characters.

        Returns:
            The number of the run that continues.

        Raises:
            StepNotFound: The current run has no step with this name.
            StepNotOpen: The step has ended without failing the instance.
            InstanceTerminal: The instance is complete or terminated.
            NotSerializable: ``value`` has no JSON form.
            PayloadTooLarge: ``value`` is larger than ``durable_max_payload_bytes``.
            ValueRefused: The step is a sleep; `skip` ends it.
        """
        return self._operations.interventions.set_result(self.workflow.name, self.id, step, value, by=by, reason=reason)

    def skip(self, step: str, *, by: str, reason: str | None = None) -> int:
        """Complete a step by hand with the result None. A sleep ends at once.

        Args:
            step: The step, as in `restart`.
            by: Your name, for `History.audit`.
            reason: Why, for `History.audit`; cut to 2048 characters.

        Returns:
            The number of the run that continues.

        Raises:
            StepNotFound: The current run has no step with this name.
            StepNotOpen: The step has ended without failing the instance.
            InstanceTerminal: The instance is complete or terminated.
        """
        return self._operations.interventions.skip(self.workflow.name, self.id, step, by=by, reason=reason)

    def send_event(
        self,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: Session | None = None,
    ) -> bool:
        """Send an event to this instance.

        The event is stored until a wait for its type consumes it, so it may be sent early.

        Args:
            event_type: 1 to 100 of the characters ``a-z A-Z 0-9 _ -``, as in `Step.wait_for_event`.
            payload: JSON data of up to 1 MiB.
            id: Makes sending idempotent: a second event with this id is ignored in the same run.
            session: Send it in the transaction of this SQLAlchemy session. You commit.

        Returns:
            False if an event with this id had been accepted before.

        Raises:
            InstanceNotFound: The instance does not exist.
            InstanceTerminal: The instance has ended, and this event is new.
            InvalidEventType: The type breaks the rules.
            NotSerializable: ``payload`` has no JSON form.
            PayloadTooLarge: ``payload`` is larger than ``durable_max_payload_bytes``.
            StoreMismatch: ``session`` belongs to another database.
        """
        return self._operations.events.send(self.workflow.name, self.id, event_type, payload, id=id, session=session)

    def explain(self) -> Diagnosis:
        """Explain why the instance is where it is, and what you can do about it.

        Returns:
            A code, a sentence for people, the facts behind it, and commands to run.
        """
        return self._operations.queries.explain(self.workflow.name, self.id)

    def history(self, run: int | None = None) -> History:
        """Return the steps and the events of a run.

        Args:
            run: The number of the run, from 1. None: the current one.

        Raises:
            RunNotFound: There is no such run.
        """
        return self._operations.history.read(self.workflow.name, self.id, run=run)

    def logs(
        self,
        *,
        run: int | None = None,
        after_id: int = 0,
        limit: int = 1000,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> list[LogRecord]:
        """Return log lines of a run, in order.

        Args:
            run: The number of the run, from 1. None: the current one.
            after_id: Return lines after the one with this ``id``. 0: from the first line.
            limit: The maximum number of lines.
            levels: Only lines with one of these levels. None: all.
            category: Only lines of this category. None: all.
        """
        return self._operations.history.logs(
            self.workflow.name, self.id, run=run, after_id=after_id, limit=limit, levels=levels, category=category
        )

    def published(self) -> dict[str, Published]:
        """Return what the current run has published with `Step.publish`, by key, also after its end."""
        return self._operations.history.published(self.workflow.name, self.id)

    # --- the same for async code: each call runs on a thread of the event loop's executor -------

    async def astatus(self) -> InstanceStatus:
        """`status` for async code, on a thread."""
        return await asyncio.to_thread(self.status)

    async def aresult(self, timeout: values.Duration | None = None) -> R_co:  # noqa: ASYNC109  # as result()
        """`result` for async code. It occupies a thread of the event loop's executor while it waits."""
        return await asyncio.to_thread(self.result, timeout)

    async def apause(self) -> None:
        """`pause` for async code, on a thread."""
        await asyncio.to_thread(self.pause)

    async def aresume(self) -> None:
        """`resume` for async code, on a thread."""
        await asyncio.to_thread(self.resume)

    async def aterminate(self, reason: str | None = None) -> None:
        """`terminate` for async code, on a thread."""
        await asyncio.to_thread(self.terminate, reason)

    async def arestart(self, *, from_step: str | None = None, reason: str | None = None) -> int:
        """`restart` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.restart(from_step=from_step, reason=reason))

    async def aretry(self, *, reason: str | None = None) -> int:
        """`retry` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.retry(reason=reason))

    async def afork(self, step: str, *, id: str | None = None) -> Self:
        """`fork` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.fork(step, id=id))

    async def aset_result(self, step: str, value: Any, *, by: str, reason: str | None = None) -> int:
        """`set_result` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.set_result(step, value, by=by, reason=reason))

    async def askip(self, step: str, *, by: str, reason: str | None = None) -> int:
        """`skip` for async code, on a thread."""
        return await asyncio.to_thread(lambda: self.skip(step, by=by, reason=reason))

    async def asend_event(self, event_type: str, payload: Any = None, *, id: str | None = None) -> bool:
        """`send_event` for async code, on a thread; without ``session``."""
        return await asyncio.to_thread(lambda: self.send_event(event_type, payload, id=id))

    async def aexplain(self) -> Diagnosis:
        """`explain` for async code, on a thread."""
        return await asyncio.to_thread(self.explain)

    async def ahistory(self, run: int | None = None) -> History:
        """`history` for async code, on a thread."""
        return await asyncio.to_thread(self.history, run)

    async def alogs(
        self,
        *,
        run: int | None = None,
        after_id: int = 0,
        limit: int = 1000,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> list[LogRecord]:
        """`logs` for async code, on a thread."""
        return await asyncio.to_thread(
            lambda: self.logs(run=run, after_id=after_id, limit=limit, levels=levels, category=category)
        )

    async def apublished(self) -> dict[str, Published]:
        """`published` for async code, on a thread."""
        return await asyncio.to_thread(self.published)


class WorkflowDecorator(Protocol):
    """What `durable_workflow` and `Durable.workflow` return if they are called with options."""

    def __call__(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]:
        """Make the function a workflow."""
