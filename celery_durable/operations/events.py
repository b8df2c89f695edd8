"""Sending events to instances, and refusing those that come after the end of the instance or do not fit the wait.

An event that comes after its wait has ended is kept, and a later wait of its type takes it. Late answers of people are
refused in `operations.asks`, late answers of tasks in `store.events.answers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from celery_durable import notify, values
from celery_durable.errors import EventRefused, InstanceTerminal
from celery_durable.model import DueRun, RunRef, WakeReason
from celery_durable.operations.context import OperationContext, Versions, is_possible_id, require_possible_id
from celery_durable.store.engine import Tx
from celery_durable.store.engine.time_limits import ORDINARY, TimeBudget
from celery_durable.store.events import run_events
from celery_durable.store.instances import lifecycle
from celery_durable.store.lanes import sent_events

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

T = TypeVar("T")


class EventOperations:
    """The operations on events."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def send(
        self,
        workflow: str,
        instance_id: str,
        type_: str,
        payload: Any = None,
        *,
        id: str | None = None,  # the public name
        session: Session | None = None,
        if_version: Versions = None,
    ) -> bool:
        """Store an event for the current run. Returns False if its id was accepted before, also by an ended run."""
        context = self._context
        values.check_event_type(type_, context.settings.max_event_type)
        sending = _Sending(
            context=context,
            workflow=workflow,
            instance_id=instance_id,
            type=type_,
            event_id=(context.runtime.new_id() if id is None else values.check_event_id(id)),
            payload=values.encode(payload, what=f"Payload of event {type_!r}", limits=context.settings.limits),
            may_be_repeated=id is not None,
            if_version=if_version,
        )
        if session is not None:
            tx = context.store.join(session)
            sending.check_payload(tx)
            is_new, due_runs = sending.insert(tx)
        else:
            is_new, due_runs = sending.commit()
        context.after_commit(lambda: sending.notify_and_wake(due_runs), session)
        return is_new


@dataclass(slots=True, kw_only=True)
class _Sending:
    """One event on its way. ``inserted`` is what the last try has written; None if the id was accepted before."""

    context: OperationContext
    workflow: str
    instance_id: str
    type: str
    event_id: str
    payload: str
    may_be_repeated: bool
    if_version: Versions
    inserted: run_events.InsertedEvent | None = None

    def commit(self) -> tuple[bool, list[DueRun]]:
        """Insert the event in its own transaction: in one statement, if that can do it.

        A statement that waits for a lock may be applied after its connection was lost, unless the lock timeout of the
        store's own connections ends it. So an application's engine gets the transaction.
        """
        store, budget = self.context.store, TimeBudget(ORDINARY)
        is_plain = not self.may_be_repeated and self.if_version is None and self.context.scope is None
        if is_plain and store.combines_writes and store.owns_engine:
            sent = store.run_statement(self.send_in_one_statement, find_committed=self.find_sent, timeouts=budget)
            if sent is not None:
                return sent
        self.check_payload()
        return store.transact(self.insert, find_committed=self.find_committed, timeouts=budget)

    def check_payload(self, tx: Tx | None = None) -> None:
        """Raise EventRefused if the run waits for a payload of another type, and has not accepted this event before.

        The type is user code, so it is called before the instance is locked. If this process has not imported it, the
        wait checks. Raises InstanceNotFound outside the caller's scope.
        """
        if not is_possible_id(self.workflow, self.instance_id):
            return
        expected = self._read(tx, self._find_payload_class)
        if expected is None:
            return
        try:
            values.Codec(expected).decode(self.payload)
        except values.ValidationFailed as exc:
            if not self._read(tx, self._was_accepted):
                raise EventRefused(self.workflow, self.instance_id, self.type, exc.problems) from None

    def _read(self, tx: Tx | None, work: Callable[[Tx], T]) -> T:
        return self.context.store.read(work) if tx is None else work(tx)

    def _find_payload_class(self, tx: Tx) -> Any:
        name = run_events.find_payload_type(tx, self.workflow, self.instance_id, self.type)
        if name is None:
            return None
        self.context.read_row(tx, self.workflow, self.instance_id)  # before user code sees anything of the instance
        return values.find_class(name)

    def _was_accepted(self, tx: Tx) -> bool:
        row = self.context.read_row(tx, self.workflow, self.instance_id)
        return run_events.has_event(tx, row, event_id=self.event_id)

    def send_in_one_statement(self, tx: Tx) -> tuple[bool, list[DueRun]] | None:
        """Do what `insert` does, in one statement. Returns None if `insert` has to decide."""
        sent = sent_events.send(
            tx,
            self.workflow,
            require_possible_id(self.workflow, self.instance_id),
            type_=self.type,
            payload=self.payload,
            event_id=self.event_id,
            grace=self.context.grace,
        )
        if sent is None:
            return None
        self.inserted = sent.inserted
        return True, [] if sent.due_run is None else [sent.due_run]

    def find_sent(self, tx: Tx) -> tuple[bool, list[DueRun]] | None:
        """Return the result of `send_in_one_statement` if it was applied although its connection was lost."""
        row = self.context.lock_row(tx, self.workflow, self.instance_id)
        self.inserted = run_events.find_event(tx, row, event_id=self.event_id)
        return None if self.inserted is None else (True, [DueRun(row.ref, row.queue)])

    def insert(self, tx: Tx) -> tuple[bool, list[DueRun]]:
        """Insert the event, and make the run due if it waits for the event."""
        row = self.context.lock_row(tx, self.workflow, self.instance_id, self.if_version)
        self.inserted = None
        if row.status.is_terminal:
            if self.may_be_repeated and run_events.has_event(tx, row, event_id=self.event_id):
                return False, []  # a client that missed the first response repeats its request
            raise InstanceTerminal(self.workflow, self.instance_id, row.status, "send an event to")
        self.inserted = run_events.insert_event(tx, row, type_=self.type, payload=self.payload, event_id=self.event_id)
        if self.inserted is None and not self.may_be_repeated:
            return self.find_sent(tx) or (False, [])  # a statement whose connection was lost has been applied since
        if self.inserted is not None and run_events.is_awaited(tx, row, self.type):
            grace = self.context.grace
            return True, [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=grace)]
        return self.inserted is not None, []

    def find_committed(self, tx: Tx) -> tuple[bool, list[DueRun]] | None:
        """Return the result of `insert` if its commit in doubt was applied."""
        row = self.context.lock_row(tx, self.workflow, self.instance_id)
        if self.inserted is None:
            return False, []  # accepted before, so nothing was to be written
        is_committed = run_events.is_event_committed(tx, row, self.inserted, event_id=self.event_id)
        return (True, [DueRun(row.ref, row.queue)]) if is_committed else None

    def notify_and_wake(self, due_runs: list[DueRun]) -> None:
        """Emit the signal of a new event, and wake the workers."""
        if self.inserted is not None:
            ref = RunRef(self.workflow, self.instance_id, self.inserted.run_number)
            notify.send_event_received(notify.AcceptedEvent(ref, self.type, self.event_id))
        self.context.publish_runs(due_runs)
