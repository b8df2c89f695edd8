"""`InstanceHandle`: what a caller can do to an instance without knowing the types of its workflow."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery_durable import values
from celery_durable.all_operations import Operations
from celery_durable.handles.host import HostInternals, call_with
from celery_durable.insight.explain import Diagnosis
from celery_durable.model import History, LogLevel, LogRecord, Published

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

T = TypeVar("T")


class InstanceHandle(abc.ABC):
    """An instance by workflow name and id. It holds no state: every call reads or changes the database.

    Every method raises InstanceNotFound if the instance does not exist, or was deleted.

    Attributes:
        id: The instance's id.
    """

    def __init__(self, workflow_name: str, id: str) -> None:
        self._workflow_name, self.id = workflow_name, id

    @property
    @abc.abstractmethod
    def _internals(self) -> HostInternals:
        """The parts of the `Durable` through which it acts."""

    @property
    def _operations(self) -> Operations:
        return self._internals.operations

    def _call(self, call: Callable[[], T]) -> Awaitable[T]:
        """Call a function for async code, on a thread."""
        return self._internals.call_async(call)

    def pause(self) -> None:
        """Pause the instance at the next step boundary. Timers and deadlines keep running.

        Raises:
            InstanceTerminal: It has ended.
            StoreUnavailable: The database cannot do this now.
        """
        self._operations.lifecycle.pause(self._workflow_name, self.id)

    def resume(self) -> None:
        """Resume a paused instance, or withdraw a pause that has not taken effect. Otherwise nothing happens.

        Raises:
            StoreUnavailable: The database cannot do this now.
        """
        self._operations.lifecycle.resume(self._workflow_name, self.id)

    def cancel(self, reason: str | None = None, *, by: str | None = None) -> None:
        """Ask the instance to stop, so that its workflow can clean up.

        Its next step call raises `Cancelled`. A function that runs now ends first, unless it asks `current_step`. A run
        that has done nothing yet ends at once. So does an instance that is cancelled for the second time.

        Args:
            reason: Why, for the workflow and the history; cut to 2048 characters.
            by: Your name, for `History.audit`.

        Raises:
            InstanceTerminal: It has ended already.
            StoreUnavailable: The database cannot do this now.
        """
        self._operations.lifecycle.cancel(self._workflow_name, self.id, reason=reason, by=by)

    def terminate(self, reason: str | None = None, *, by: str | None = None, children: bool = True) -> None:
        """End the instance now, without a result. Nothing more of it is recorded.

        Args:
            reason: Why, for the history; cut to 2048 characters.
            by: Your name, for `History.audit`.
            children: Also end the open children of the current run, and theirs. A worker does so soon after the call.
                Children with ``on_parent_end="continue"`` continue.

        Raises:
            InstanceTerminal: It has ended already.
            StoreUnavailable: The database cannot do this now.
        """
        self._operations.lifecycle.terminate(self._workflow_name, self.id, reason=reason, by=by, children=children)

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
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.rewind.restart(self._workflow_name, self.id, from_step=from_step, reason=reason)

    def retry(self, *, delay: values.Duration | None = None, reason: str | None = None, family: bool = False) -> int:
        """Retry the failed step, in a new run that keeps all earlier results. The step gets new attempts.

        Args:
            delay: How long the new run waits before it starts: a timedelta, seconds, or text such as "10 minutes".
                None: it starts now. ``wake`` starts it early.
            reason: Why, for the history; cut to 2048 characters.
            family: If a failed child ended the instance, retry that child, and theirs, first; then the step waits for
                the same child again. Parents that failed because of this instance are retried too. By default the step
                creates another child.

        Returns:
            The number of the new run.

        Raises:
            InstanceNotErrored: The instance has not failed.
            DurationInvalid: ``delay`` cannot be read, or is longer than ``durable_max_sleep_seconds``.
            StoreUnavailable: The database cannot do this now.
        """
        retry = self._operations.families.retry if family else self._operations.rewind.retry
        return retry(self._workflow_name, self.id, delay=delay, reason=reason)

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
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.interventions.set_result(
            self._workflow_name, self.id, step, value, by=by, reason=reason
        )

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
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.interventions.skip(self._workflow_name, self.id, step, by=by, reason=reason)

    def send_event(
        self,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: Session | None = None,
        using: str | None = None,
    ) -> bool:
        """Send an event to this instance.

        The event is stored until a wait for its type consumes it, so it may be sent early.

        Args:
            event_type: 1 to 100 of the characters ``a-z A-Z 0-9 _ -``, as in `Step.wait_for_event`.
            payload: JSON data of up to 1 MiB.
            id: Makes sending idempotent: a second event with this id is ignored in the same run.
            session: Send it in the transaction of this SQLAlchemy session. You commit.
            using: The alias of the database in a Django project, as in `Workflow.create`.

        Returns:
            False if an event with this id had been accepted before.

        Raises:
            InstanceNotFound: The instance does not exist.
            InstanceTerminal: The instance has ended, and this event is new.
            InvalidEventType: The type breaks the rules.
            NotSerializable: ``payload`` has no JSON form.
            PayloadTooLarge: ``payload`` is larger than ``durable_max_payload_bytes``.
            StoreMismatch: ``session`` is bound to another database.
            AliasMismatch: ``using`` names another database.
            StoreUnavailable: The database cannot do this now.
        """
        if using is not None:
            self._internals.check_using(using)
        return self._operations.events.send(self._workflow_name, self.id, event_type, payload, id=id, session=session)

    def answer(self, step: str, payload: Any = None, *, by: str, run: int | None = None) -> bool:
        """Answer a wait of this instance that asks a person. The first answer counts.

        The payload is checked before it is stored. Then it is an event of the type of the wait.

        Args:
            step: The key of the wait: its name, unless it is repeated.
            payload: The answer, as the schema of the wait demands.
            by: The name of the person, for the workflow and the history.
            run: The run that has asked. None: the current run.

        Returns:
            False if this person had given this answer before.

        Raises:
            AnswerTooLate: Another answer was first, or the wait has ended, or another run is current.
            EventRefused: The payload does not fit the schema. The wait goes on.
            AnswerUnchecked: This process can check no answer to this wait.
            StepNotFound: The current run has no step with this key.
            ValueRefused: The step asks nobody.
            NameInvalid: ``by`` is empty, too long, or has control characters.
            NotSerializable: ``payload`` has no JSON form.
            PayloadTooLarge: ``payload`` is larger than ``durable_max_payload_bytes``.
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.asks.answer(self._workflow_name, self.id, step, payload, by=by, run=run)

    def explain(self) -> Diagnosis:
        """Explain why the instance is where it is, and what you can do about it.

        Returns:
            A code, a sentence for people, the facts behind it, and commands to run.

        Raises:
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.queries.explain(self._workflow_name, self.id)

    def history(self, run: int | None = None) -> History:
        """Return the steps and the events of a run.

        Args:
            run: The number of the run, from 1. None: the current one.

        Raises:
            RunNotFound: There is no such run.
            ValueRefused: ``run`` is no number.
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.history.read(self._workflow_name, self.id, run=run)

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

        Raises:
            ValueRefused: An argument has the wrong type, a number is negative, or a level does not exist.
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.history.logs(
            self._workflow_name, self.id, run=run, after_id=after_id, limit=limit, levels=levels, category=category
        )

    def published(self) -> dict[str, Published]:
        """Return what the current run has published with `Step.publish`, by key, also after its end.

        Raises:
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations.history.published(self._workflow_name, self.id)

    # --- the same for async code: each call runs on a thread ------------------------------------

    async def apause(self) -> None:
        """`pause` for async code, on a thread."""
        await self._call(self.pause)

    async def aresume(self) -> None:
        """`resume` for async code, on a thread."""
        await self._call(self.resume)

    async def acancel(self, reason: str | None = None, *, by: str | None = None) -> None:
        """`cancel` for async code, on a thread."""
        await self._call(lambda: self.cancel(reason, by=by))

    async def aterminate(self, reason: str | None = None, *, by: str | None = None, children: bool = True) -> None:
        """`terminate` for async code, on a thread."""
        await self._call(lambda: self.terminate(reason, by=by, children=children))

    async def arestart(self, *, from_step: str | None = None, reason: str | None = None) -> int:
        """`restart` for async code, on a thread."""
        return await self._call(lambda: self.restart(from_step=from_step, reason=reason))

    async def aretry(
        self, *, delay: values.Duration | None = None, reason: str | None = None, family: bool = False
    ) -> int:
        """`retry` for async code, on a thread."""
        return await self._call(lambda: self.retry(delay=delay, reason=reason, family=family))

    async def aset_result(self, step: str, value: Any, *, by: str, reason: str | None = None) -> int:
        """`set_result` for async code, on a thread."""
        return await self._call(lambda: self.set_result(step, value, by=by, reason=reason))

    async def askip(self, step: str, *, by: str, reason: str | None = None) -> int:
        """`skip` for async code, on a thread."""
        return await self._call(lambda: self.skip(step, by=by, reason=reason))

    async def asend_event(
        self,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: AsyncSession | None = None,
        using: str | None = None,
    ) -> bool:
        """`send_event` for async code, in the transaction of ``session`` or on a thread."""
        return await call_with(
            session,
            self._internals,
            lambda joined: self.send_event(event_type, payload, id=id, session=joined, using=using),
        )

    async def aanswer(self, step: str, payload: Any = None, *, by: str, run: int | None = None) -> bool:
        """`answer` for async code, on a thread."""
        return await self._call(lambda: self.answer(step, payload, by=by, run=run))

    async def aexplain(self) -> Diagnosis:
        """`explain` for async code, on a thread."""
        return await self._call(self.explain)

    async def ahistory(self, run: int | None = None) -> History:
        """`history` for async code, on a thread."""
        return await self._call(lambda: self.history(run))

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
        return await self._call(
            lambda: self.logs(run=run, after_id=after_id, limit=limit, levels=levels, category=category)
        )

    async def apublished(self) -> dict[str, Published]:
        """`published` for async code, on a thread."""
        return await self._call(self.published)
