"""What people hold: a workflow that can be started, and an instance that can be asked and steered."""

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
    Begun,
    CreateOptions,
    History,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Published,
    Status,
    WorkflowEvent,
)
from celery_durable.operations import IfExists, Operations
from celery_durable.runtime import Runtime
from celery_durable.step import Step

P = TypeVar("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Host(Protocol):
    """What a handle acts through: a Durable."""

    @property
    def operations(self) -> Operations:
        """What may be done to instances."""

    @property
    def runtime(self) -> Runtime:
        """Where time comes from."""


class Workflow(Generic[P, R]):
    """A workflow that can be started. The function it was made of is called by workers, or by hand in tests."""

    def __init__(self, definition: Definition, host: Callable[[], Host]) -> None:
        self.definition, self._host = definition, host
        if isinstance(definition, WorkflowDefinition):
            functools.update_wrapper(self, definition.fn)

    def __call__(self, event: WorkflowEvent[P], step: Step) -> R:
        """Call the author's function itself."""
        if not isinstance(self.definition, WorkflowDefinition):
            raise DefinitionInvalid(f"Workflow {self.name!r} is linear: call one of its handlers instead.")
        result: R = self.definition.fn(event, step)
        return result

    def __repr__(self) -> str:
        return f"<Workflow {self.name!r}>"

    @property
    def name(self) -> str:
        """What it is registered as."""
        return self.definition.name

    @property
    def host(self) -> Host:
        """The Durable it runs under; raises NotConfigured."""
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
        """Record a new instance and have it started; nothing is written if this raises.

        ``id``: yours, unique per workflow, or a random one. ``if_exists="return"``: the existing instance instead of
        InstanceAlreadyExists. ``run_at``: not before this time, at most
        `durable_max_sleep_seconds` ahead. ``labels``: what `list` finds it by. ``session``: in
        the transaction of your SQLAlchemy session; workers are told after its commit.
        """
        made = self.host.operations.create(
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
    ) -> Begun:
        """Restart the instance of this id if it is in one of these statuses, create it where there is none.

        The answer's ``outcome`` is "created", "restarted" or "unchanged". A restart keeps the first parameters, and the
        labels as they are. ``if_version``: raises VersionMismatch where the instance is at none of these. Safe to call
        at the same time.
        """
        return self.host.operations.restart_or_create(
            self.name, params, id=id, if_status=if_status, if_version=if_version, reason=reason, labels=labels
        )

    def delay(self, params: P | None = None) -> WorkflowInstance[R]:
        """`create`, for fingers that know Celery."""
        return self.create(params)

    def create_batch(self, batch: Sequence[CreateOptions[P]]) -> list[WorkflowInstance[R]]:
        """Record up to 100 instances at once; ids that exist are skipped and left out of the answer."""
        return [WorkflowInstance(self, made) for made in self.host.operations.create_batch(self.name, batch)]

    def get(self, id: str) -> WorkflowInstance[R]:
        """The handle of an existing instance; raises InstanceNotFound."""
        self.host.operations.get(self.name, id)
        return WorkflowInstance(self, id)

    def list(
        self,
        *,
        status: Status | str | None = None,
        cursor: str | None = None,
        limit: int = 25,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """Instances, newest first, a page at a time. ``labels``: only those that have all of these."""
        wanted = None if status is None else Status(status)
        return self.host.operations.list(self.name, status=wanted, cursor=cursor, limit=limit, labels=labels)

    async def acreate(self, params: P | None = None, **options: Any) -> WorkflowInstance[R]:
        """`create` for async code."""
        return await asyncio.to_thread(lambda: self.create(params, **options))

    async def aget(self, id: str) -> WorkflowInstance[R]:
        """`get` for async code."""
        return await asyncio.to_thread(self.get, id)


class WorkflowInstance(Generic[R_co]):
    """An instance, by workflow and id; every call reads or changes the store."""

    def __init__(self, workflow: Workflow[Any, R_co], id: str) -> None:
        self.workflow, self.id = workflow, id

    def __repr__(self) -> str:
        return f"<WorkflowInstance {self.workflow.name}/{self.id}>"

    @property
    def _operations(self) -> Operations:
        return self.workflow.host.operations

    def status(self) -> InstanceStatus:
        """Where it stands: status, and error or output once it has ended."""
        return self._operations.get(self.workflow.name, self.id).status

    def result(self, timeout: values.Duration | None = None) -> R_co:
        """Wait for the end and return the output; None waits without end.

        Raises WorkflowFailed when it ended errored or terminated, ResultTimeout. No result backend is needed:
        the database is asked, at first often, then twice a second.
        """
        runtime = self.workflow.host.runtime
        limit = None if timeout is None else values.duration(timeout)
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
        """Stop at the next step boundary. Timers and deadlines go on counting."""
        self._operations.pause(self.workflow.name, self.id)

    def resume(self) -> None:
        """Go on after a pause; otherwise nothing."""
        self._operations.resume(self.workflow.name, self.id)

    def terminate(self, reason: str | None = None) -> None:
        """End it without a result; raises InstanceTerminal where it has ended."""
        self._operations.terminate(self.workflow.name, self.id, reason=reason)

    def restart(self, *, from_step: str | None = None, reason: str | None = None) -> int:
        """Begin a new run with the same parameters; answers with its number. Prior runs stay readable.

        ``from_step``: keep what settled before this step was called, and all events. Raises StepNotFound.
        """
        return self._operations.restart(self.workflow.name, self.id, from_step=from_step, reason=reason)

    def retry(self, *, reason: str | None = None) -> int:
        """Try again what ended it, with fresh attempts, in a new run that keeps what went before; its number.

        Raises InstanceNotErrored.
        """
        return self._operations.retry(self.workflow.name, self.id, reason=reason)

    def fork(self, step: str, *, id: str | None = None) -> Self:
        """A new instance that goes on before this step of the current run; this one is left alone.

        Raises StepNotFound, InvalidInstanceId, InstanceAlreadyExists.
        """
        return type(self)(self.workflow, self._operations.fork(self.workflow.name, self.id, step, id=id))

    def set_result(self, step: str, value: Any, *, by: str, reason: str | None = None) -> int:
        """Complete an open step, or one that ended it errored, by hand; answers with the run that goes on with it.

        ``by``: who does it, for `History.audit`. Raises StepNotFound, StepNotOpen, InstanceTerminal.
        """
        return self._operations.set_result(self.workflow.name, self.id, step, value, by=by, reason=reason)

    def skip(self, step: str, *, by: str, reason: str | None = None) -> int:
        """Complete a step by hand, with None for a result; a sleep ends at once. Else as `set_result`."""
        return self._operations.skip(self.workflow.name, self.id, step, by=by, reason=reason)

    def send_event(
        self,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: Session | None = None,
    ) -> bool:
        """Send an event; it waits until the workflow asks for its type. ``id`` makes a repetition harmless: False."""
        return self._operations.send_event(self.workflow.name, self.id, event_type, payload, id=id, session=session)

    def explain(self) -> Diagnosis:
        """Why it stands where it stands, as a sentence for people, and what to do about it."""
        return self._operations.explain(self.workflow.name, self.id)

    def history(self, run: int | None = None) -> History:
        """Steps and events of a run, by default the current one."""
        return self._operations.history(self.workflow.name, self.id, run=run)

    def logs(
        self,
        *,
        run: int | None = None,
        after_id: int = 0,
        limit: int = 1000,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> list[LogRecord]:
        """Log lines of a run in order; ``after_id`` continues where an earlier call ended."""
        return self._operations.logs(
            self.workflow.name, self.id, run=run, after_id=after_id, limit=limit, levels=levels, category=category
        )

    def published(self) -> dict[str, Published]:
        """What the current run has published with `Step.publish`, by key; while it runs, and after its end."""
        return self._operations.published(self.workflow.name, self.id)

    async def astatus(self) -> InstanceStatus:
        """`status` for async code."""
        return await asyncio.to_thread(self.status)

    async def aexplain(self) -> Diagnosis:
        """`explain` for async code."""
        return await asyncio.to_thread(self.explain)

    async def aresult(self, timeout: values.Duration | None = None) -> R_co:  # noqa: ASYNC109  # as result()
        """`result` for async code; waits on a thread of the event loop's executor."""
        return await asyncio.to_thread(self.result, timeout)

    async def asend_event(self, event_type: str, payload: Any = None, *, id: str | None = None) -> bool:
        """`send_event` for async code."""
        return await asyncio.to_thread(lambda: self.send_event(event_type, payload, id=id))


class WorkflowDecorator(Protocol):
    """What the decorators answer with when they got options."""

    def __call__(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]:
        """Make the function a workflow."""
