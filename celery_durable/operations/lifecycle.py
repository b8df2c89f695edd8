"""LifecycleOperations instances that exist: pause, resume, terminate, events."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from celery_durable import notify, values
from celery_durable.errors import (
    InstanceNotFound,
    InstanceTerminal,
)
from celery_durable.model import (
    AnswerResult,
    DueRun,
    InstanceRow,
    ItemRef,
    RunRef,
    Status,
    TaskReference,
    Wake,
    is_for_a_task,
)
from celery_durable.operations.base import OperationsBase, Versions, possible
from celery_durable.store import answers, instances, task_answers
from celery_durable.store.database_identity import store_id
from celery_durable.store.engine import Tx
from celery_durable.store.task_answers import AnswerAccepted
from celery_durable.store.watchdog import DIRECT


class LifecycleOperations(OperationsBase):
    """The verbs that change instances."""

    def pause(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> None:
        """Stop at the next step boundary, at once where nobody works on it; timers go on. Raises InstanceTerminal.

        ``if_version``, here and below: raises VersionMismatch where the instance is at none of these.
        """

        def work(tx: Tx) -> RunRef | None:
            row = self._lock_live(tx, workflow, instance_id, "pause", if_version)
            return row.ref if instances.pause(tx, row) else None

        ref = self._store.transact(work)
        if ref is not None:
            notify.paused(ref)

    def resume(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> None:
        """Go on after a pause, or take back one that has not happened yet; otherwise nothing."""

        def work(tx: Tx) -> list[DueRun]:
            row = self._lock_row(tx, workflow, instance_id, if_version)
            if row.status is Status.PAUSED:
                due = instances.resume(tx, row, grace=self._grace)
                return [] if due is None else [due]
            if row.pause_requested:
                instances.withdraw_pause(tx, row)
            return []

        self._wake(self._store.transact(work))

    def wake(self, workflow: str, instance_id: str) -> bool:
        """Have it looked at now; False where it is paused, or somebody works on it. Raises InstanceTerminal.

        What decides is time and rows (LAW 5): what sleeps or waits does so again; a start that was put off begins.
        """

        def work(tx: Tx) -> list[DueRun]:
            row = self._lock_live(tx, workflow, instance_id, "wake", None)
            if row.status is Status.PAUSED or row.claim_token is not None:
                return []
            return [instances.make_due(tx, row, wake=Wake.WAKE, grace=self._grace)]

        due_runs = self._store.transact(work)
        self._wake(due_runs)
        return bool(due_runs)

    def terminate(
        self, workflow: str, instance_id: str, *, reason: str | None = None, if_version: Versions = None
    ) -> None:
        """End it for good; of a body that runs on nothing is recorded. Raises InstanceTerminal."""
        reason = None if reason is None else values.storable(reason, self._settings.max_log_message)

        meant: list[int] = []

        def work(tx: Tx) -> tuple[bool, list[DueRun]]:
            parent = instances.parent_of(tx, workflow, possible(workflow, instance_id))
            answers.lock_parent(tx, parent)
            row = self._lock_live(tx, workflow, instance_id, "terminate", if_version)
            meant[:] = [row.run_number]
            instances.terminate(tx, row, reason=reason)
            if parent is None:
                return True, []
            payload = values.answer_of_termination(workflow, instance_id, reason)
            event_id = self._runtime.new_id()
            return True, answers.answer_parent(tx, parent, payload=payload, event_id=event_id, grace=self._grace)

        def was_applied(tx: Tx) -> tuple[bool, list[DueRun]] | None:
            row = self._lock_row(tx, workflow, instance_id)
            if row.run_number not in meant:
                return False, []  # a restart meanwhile has ended the run that was meant, and begun one that was not
            return (True, []) if row.status is Status.TERMINATED else None

        is_done, due_runs = self._store.transact(work, resolve=was_applied)
        if is_done:
            notify.terminated(RunRef(workflow, instance_id, meant[0]), reason=reason)
        self._wake(due_runs)

    def store_id(self) -> str:
        """The id of the database, by which messages name it."""
        return self._store.id or self._store.attempt(store_id, bound=DIRECT)

    def answer(self, reference: TaskReference, payload: str, *, is_patient: bool = True) -> AnswerResult:
        """Take what a Celery task answers to the step, or the item of a map, that waits for it; once.

        ``payload``: as `values.answer_of` makes it. NOT_AWAITED: the step, its run or its instance is not there any
        more, or has an answer. FORGED: it has no answer, and ``reference`` is none of its attempt's. ``is_patient``
        False: it is tried once, for 2 s, and whatever hinders it is raised.
        """
        event_id, ref, event_type = self._runtime.new_id(), reference.ref, reference.event_type
        if ItemRef.read(event_type) is None and not is_for_a_task(event_type):
            return AnswerResult.NOT_AWAITED

        def work(tx: Tx) -> AnswerAccepted:
            try:
                row = self._lock_row(tx, ref.workflow, ref.instance_id)
            except InstanceNotFound:
                return AnswerAccepted(AnswerResult.NOT_AWAITED)
            if row.run_number != ref.run_number:
                return AnswerAccepted(AnswerResult.NOT_AWAITED)
            return task_answers.answer(tx, row, reference, payload=payload, event_id=event_id, grace=self._grace)

        taken = self._store.transact(work) if is_patient else self._store.attempt(work, bound=DIRECT)
        self._wake(taken.due_runs)
        if taken.messages:
            self._post(taken.messages)
        if taken.result is AnswerResult.FORGED:
            notify.answer_refused(ref)
        return taken.result

    def send_event(
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
        """Buffer an event for the current run; it is consumed once, by the first wait for its type.

        ``id``: an event of this id is accepted once per run; False tells that it had been, also after its end. Raises
        InstanceNotFound, InstanceTerminal, InvalidEventType, NotSerializable, PayloadTooLarge.
        """
        values.event_type(type_, self._settings.max_event_type)
        event_id = self._runtime.new_id() if id is None else values.label("Event id", id, values.LONGEST_ID)
        text = values.encode(payload, what=f"Payload of event {type_!r}", limits=self._settings.limits)

        sent: list[instances.Sent | None] = []

        def work(tx: Tx) -> tuple[bool, list[DueRun]]:
            row = self._lock_row(tx, workflow, instance_id, if_version)
            if row.status.is_terminal:
                sent[:] = [None]
                if id is not None and instances.has_event(tx, row, event_id=event_id):
                    return False, []  # who did not hear of our first answer asks again
                raise InstanceTerminal(workflow, instance_id, row.status, "send an event to")
            sent[:] = [instances.insert_event(tx, row, type_=type_, payload=text, event_id=event_id)]
            if sent[0] is not None and instances.is_awaited(tx, row, type_):
                return True, [instances.make_due(tx, row, wake=Wake.WAKE, grace=self._grace)]
            return sent[0] is not None, []

        def was_applied(tx: Tx) -> tuple[bool, list[DueRun]] | None:
            row = self._lock_row(tx, workflow, instance_id)
            ours = sent[0]
            if ours is None:
                return False, []  # it had been accepted before: nothing was to be written
            is_there = instances.was_sent(tx, row, ours, event_id=event_id)
            return (True, [DueRun(row.ref, row.queue)]) if is_there else None

        def tell(due_runs: list[DueRun]) -> None:
            if sent[0] is not None:
                notify.event_received(
                    notify.AcceptedEvent(RunRef(workflow, instance_id, sent[0].run_number), type_, event_id)
                )
            self._wake(due_runs)

        if session is not None:
            is_new, due_runs = work(self._store.join(session))
            self._store.after_commit(session, lambda: tell(due_runs))
        else:
            is_new, due_runs = self._store.transact(work, resolve=was_applied)
            tell(due_runs)
        return is_new

    def _lock_live(self, tx: Tx, workflow: str, instance_id: str, operation: str, if_version: Versions) -> InstanceRow:
        row = self._lock_row(tx, workflow, instance_id, if_version)
        if row.status.is_terminal:
            raise InstanceTerminal(workflow, instance_id, row.status, operation)
        return row
