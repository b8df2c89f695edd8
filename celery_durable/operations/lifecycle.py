"""The life cycle of existing instances: pause, resume, wake, terminate, answers and events."""

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
    WakeReason,
    is_task_event_type,
)
from celery_durable.operations.base import OperationsBase, Versions, require_possible_id
from celery_durable.store import answers, instances, lifecycle, run_events, task_answers
from celery_durable.store.database_identity import read_database_id
from celery_durable.store.engine import Tx
from celery_durable.store.task_answers import AnswerOutcome
from celery_durable.store.watchdog import DIRECT


class LifecycleOperations(OperationsBase):
    """The operations that change existing instances."""

    def pause(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> None:
        """Pause an instance: at once if no worker holds it, else when the running step ends.

        Timers keep running while the instance is paused.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            if_version: The version tags at which the change applies; None means any.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended.
            VersionMismatch: The version tag is not in ``if_version``.
        """

        def work(tx: Tx) -> RunRef | None:
            row = self._lock_unfinished(tx, workflow, instance_id, "pause", if_version)
            return row.ref if lifecycle.pause(tx, row) else None

        ref = self._store.transact(work)
        if ref is not None:
            notify.send_workflow_paused(ref)

    def resume(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> None:
        """End a pause, or cancel a requested pause. Does nothing if there is neither.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            if_version: The version tags at which the change applies; None means any.

        Raises:
            InstanceNotFound: No instance has this id.
            VersionMismatch: The version tag is not in ``if_version``.
        """

        def work(tx: Tx) -> list[DueRun]:
            row = self._lock_row(tx, workflow, instance_id, if_version)
            if row.status is Status.PAUSED:
                due = lifecycle.resume(tx, row, grace=self._grace)
                return [] if due is None else [due]
            if row.pause_requested:
                lifecycle.cancel_pause_request(tx, row)
            return []

        self._publish_runs(self._store.transact(work))

    def wake(self, workflow: str, instance_id: str) -> bool:
        """Make a worker check the instance now.

        A sleep or a wait does not end early, because only time and rows end it (LAW 5). A start that was scheduled for
        later happens now.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.

        Returns:
            False if the instance is paused or a worker holds it.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended.
        """

        def work(tx: Tx) -> list[DueRun]:
            row = self._lock_unfinished(tx, workflow, instance_id, "wake", None)
            if row.status is Status.PAUSED or row.claim_token is not None:
                return []
            return [lifecycle.make_due(tx, row, wake_reason=WakeReason.WAKE, grace=self._grace)]

        due_runs = self._store.transact(work)
        self._publish_runs(due_runs)
        return bool(due_runs)

    def terminate(
        self, workflow: str, instance_id: str, *, reason: str | None = None, if_version: Versions = None
    ) -> None:
        """End the instance permanently. A step function that still runs records nothing more.

        If a step of another instance created it, that step gets an error as its answer.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            reason: Recorded with the run.
            if_version: The version tags at which the change applies; None means any.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended.
            VersionMismatch: The version tag is not in ``if_version``.
        """
        reason = None if reason is None else values.sanitize_text(reason, self._settings.max_log_message)

        target_run: list[int] = []

        def work(tx: Tx) -> tuple[bool, list[DueRun]]:
            parent = instances.find_parent(tx, workflow, require_possible_id(workflow, instance_id))
            # The parent first: row locks are taken in ascending key order, and the parent has the lower key.
            answers.lock_parent(tx, parent)
            row = self._lock_unfinished(tx, workflow, instance_id, "terminate", if_version)
            target_run[:] = [row.run_number]
            lifecycle.terminate(tx, row, reason=reason)
            if parent is None:
                return True, []
            payload = values.encode_termination_answer(workflow, instance_id, reason)
            event_id = self._runtime.new_id()
            return True, answers.answer_parent(tx, parent, payload=payload, event_id=event_id, grace=self._grace)

        def was_applied(tx: Tx) -> tuple[bool, list[DueRun]] | None:
            row = self._lock_row(tx, workflow, instance_id)
            if row.run_number not in target_run:
                return False, []  # a concurrent restart has ended the intended run and started another
            return (True, []) if row.status is Status.TERMINATED else None

        is_done, due_runs = self._store.transact(work, find_committed=was_applied)
        if is_done:
            notify.send_workflow_terminated(RunRef(workflow, instance_id, target_run[0]), reason=reason)
        self._publish_runs(due_runs)

    def read_database_id(self) -> str:
        """Return the random id of the database, which references in task messages contain."""
        return self._store.database_id or self._store.transact_once(read_database_id, timeouts=DIRECT)

    def answer(self, reference: TaskReference, payload: str, *, may_retry: bool = True) -> AnswerResult:
        """Accept the answer of a Celery task for the step or map item that waits for it, once.

        Args:
            reference: The reference that the task's message carried.
            payload: The answer, as `values.encode_answer` returns it.
            may_retry: If False, there is one try of up to 2 s, and any error is raised.

        Returns:
            TAKEN; NOT_AWAITED if the step, its run or its instance is gone or already has an answer; FORGED if the step
            has no answer, but ``reference`` does not belong to its current attempt.
        """
        event_id, ref, event_type = self._runtime.new_id(), reference.ref, reference.event_type
        if ItemRef.read(event_type) is None and not is_task_event_type(event_type):
            return AnswerResult.NOT_AWAITED

        def work(tx: Tx) -> AnswerOutcome:
            try:
                row = self._lock_row(tx, ref.workflow, ref.instance_id)
            except InstanceNotFound:
                return AnswerOutcome(AnswerResult.NOT_AWAITED)
            if row.run_number != ref.run_number:
                return AnswerOutcome(AnswerResult.NOT_AWAITED)
            return task_answers.accept_answer(tx, row, reference, payload=payload, event_id=event_id, grace=self._grace)

        accepted = self._store.transact(work) if may_retry else self._store.transact_once(work, timeouts=DIRECT)
        self._publish_runs(accepted.due_runs)
        if accepted.messages:
            self._send_messages(accepted.messages)
        if accepted.result is AnswerResult.FORGED:
            notify.send_answer_refused(ref)
        return accepted.result

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
        """Store an event for the current run. The first wait for its type consumes it.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            type_: The event's type.
            payload: JSON data.
            id: The event's id, which is accepted once for each run; None means a random id.
            session: A session whose transaction writes the event. Workers are woken after its commit.
            if_version: The version tags at which the change applies; None means any.

        Returns:
            False if this id was accepted before, even if the instance has ended since.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended, and the event is new.
            InvalidEventType: The type breaks the rules for event types.
            NotSerializable: ``payload`` has no JSON form.
            PayloadTooLarge: ``payload`` is larger than ``durable_max_payload_bytes``.
            StoreMismatch: ``session`` is bound to another database.
            VersionMismatch: The version tag is not in ``if_version``.
        """
        values.check_event_type(type_, self._settings.max_event_type)
        event_id = (
            self._runtime.new_id() if id is None else values.check_text_name("Event id", id, values.MAX_ID_LENGTH)
        )
        text = values.encode(payload, what=f"Payload of event {type_!r}", limits=self._settings.limits)

        sent: list[run_events.InsertedEvent | None] = []

        def work(tx: Tx) -> tuple[bool, list[DueRun]]:
            row = self._lock_row(tx, workflow, instance_id, if_version)
            if row.status.is_terminal:
                sent[:] = [None]
                if id is not None and run_events.has_event(tx, row, event_id=event_id):
                    return False, []  # a client that missed the first response repeats its request
                raise InstanceTerminal(workflow, instance_id, row.status, "send an event to")
            sent[:] = [run_events.insert_event(tx, row, type_=type_, payload=text, event_id=event_id)]
            if sent[0] is not None and run_events.is_awaited(tx, row, type_):
                return True, [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=self._grace)]
            return sent[0] is not None, []

        def was_applied(tx: Tx) -> tuple[bool, list[DueRun]] | None:
            row = self._lock_row(tx, workflow, instance_id)
            inserted = sent[0]
            if inserted is None:
                return False, []  # accepted before, so nothing was to be written
            is_committed = run_events.is_event_committed(tx, row, inserted, event_id=event_id)
            return (True, [DueRun(row.ref, row.queue)]) if is_committed else None

        def notify_and_wake(due_runs: list[DueRun]) -> None:
            if sent[0] is not None:
                notify.send_event_received(
                    notify.AcceptedEvent(RunRef(workflow, instance_id, sent[0].run_number), type_, event_id)
                )
            self._publish_runs(due_runs)

        if session is not None:
            is_new, due_runs = work(self._store.join(session))
            self._store.after_commit(session, lambda: notify_and_wake(due_runs))
        else:
            is_new, due_runs = self._store.transact(work, find_committed=was_applied)
            notify_and_wake(due_runs)
        return is_new

    def _lock_unfinished(
        self, tx: Tx, workflow: str, instance_id: str, operation: str, if_version: Versions
    ) -> InstanceRow:
        row = self._lock_row(tx, workflow, instance_id, if_version)
        if row.status.is_terminal:
            raise InstanceTerminal(workflow, instance_id, row.status, operation)
        return row
