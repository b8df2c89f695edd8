"""The life cycle of existing instances: pause, resume, wake, cancel and terminate."""

from __future__ import annotations

from dataclasses import replace

from celery_durable import notify, values
from celery_durable.errors import Cancelled, InstanceTerminal
from celery_durable.model import DueRun, InstanceRow, OutboxMessage, Status, WakeReason
from celery_durable.operations.context import OperationContext, Versions, require_possible_id
from celery_durable.store.engine import Tx
from celery_durable.store.events import answers
from celery_durable.store.instances import families, instances, lifecycle
from celery_durable.store.runs import runs


class LifecycleOperations:
    """The operations that pause, continue and end instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def pause(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> InstanceRow:
        """Pause an instance: at once if no worker holds it, else when the running step ends.

        Timers keep running while the instance is paused. Returns the instance before the change.
        """

        def work(tx: Tx) -> tuple[InstanceRow, bool]:
            row = self._context.lock_unfinished(tx, workflow, instance_id, "pause", if_version)
            if runs.is_cancel_requested(tx, row.pk, row.run_number):
                raise InstanceTerminal(workflow, instance_id, "being cancelled", "pause")
            return row, lifecycle.pause(tx, row)

        row, is_paused_now = self._context.store.transact(work)
        if is_paused_now:
            self._context.after_commit(lambda: notify.send_workflow_paused(row.ref))
        return row

    def resume(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> InstanceRow:
        """End a pause, or cancel a requested pause. Returns the instance before the change.

        A run that is being cancelled has no requested pause: its worker leaves it for another reason.
        """

        def work(tx: Tx) -> tuple[InstanceRow, list[DueRun]]:
            row = self._context.lock_row(tx, workflow, instance_id, if_version)
            due = None
            if row.pause_requested and runs.is_cancel_requested(tx, row.pk, row.run_number):
                row = replace(row, pause_requested=False)
            elif row.pause_requested:
                lifecycle.cancel_pause_request(tx, row)
            elif row.status is Status.PAUSED:
                due = lifecycle.resume(tx, row, grace=self._context.grace)
            return row, [] if due is None else [due]

        row, due_runs = self._context.store.transact(work)
        self._context.after_commit(lambda: self._context.publish_runs(due_runs))
        return row

    def wake(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> bool:
        """Make a worker check the instance now.

        A sleep or a wait does not end early, because only time and rows end it (LAW 5). A start that was scheduled for
        later happens now. Returns False if the instance is paused or a worker holds it.
        """

        def work(tx: Tx) -> list[DueRun]:
            row = self._context.lock_unfinished(tx, workflow, instance_id, "wake", if_version)
            if row.status is Status.PAUSED or row.claim_token is not None:
                return []
            return [lifecycle.make_due(tx, row, wake_reason=WakeReason.WAKE, grace=self._context.grace)]

        due_runs = self._context.store.transact(work)
        self._context.after_commit(lambda: self._context.publish_runs(due_runs))
        return bool(due_runs)

    def cancel(
        self, workflow: str, instance_id: str, *, reason: str | None = None, if_version: Versions = None
    ) -> None:
        """Ask the instance to stop: its next step call raises Cancelled, so that the workflow can clean up.

        A run that has done nothing yet, or that was asked before, ends at once.
        """
        self._stop(workflow, instance_id, reason, if_version, children=True, cleans_up=True)

    def cancel_once(self, workflow: str, instance_id: str, *, reason: str) -> None:
        """Cancel an instance unless it was cancelled before, for a caller that may repeat itself."""
        self._stop(workflow, instance_id, reason, None, children=True, cleans_up=True, may_repeat=True)

    def terminate(
        self,
        workflow: str,
        instance_id: str,
        *,
        reason: str | None = None,
        children: bool = True,
        if_version: Versions = None,
    ) -> None:
        """End the instance permanently. A step function that still runs records nothing more.

        If a step of another instance created it, that step gets an error as its answer. With ``children``, the
        open children of its run end soon after it.
        """
        self._stop(workflow, instance_id, reason, if_version, children=children, cleans_up=False)

    def _stop(
        self,
        workflow: str,
        instance_id: str,
        reason: str | None,
        if_version: Versions,
        *,
        children: bool,
        cleans_up: bool,
        may_repeat: bool = False,
    ) -> None:
        reason = self._context.clean_reason(reason)
        operation, grace = "cancel" if cleans_up else "terminate", self._context.grace
        new_id = self._context.runtime.new_id
        ended: InstanceRow | None = None
        messages: list[OutboxMessage] = []

        def work(tx: Tx) -> list[DueRun]:
            nonlocal ended, messages
            ended, messages = None, []
            parent = instances.find_parent(tx, workflow, require_possible_id(workflow, instance_id))
            # The parent first: row locks are taken in ascending key order, and the parent has the lower key.
            answers.lock_parent(tx, parent)
            row = self._context.lock_unfinished(tx, workflow, instance_id, operation, if_version)
            has_begun = lifecycle.has_started(row) or runs.has_steps(tx, row)
            was_cancelled = runs.is_cancel_requested(tx, row.pk, row.run_number)
            if was_cancelled and may_repeat:
                return []
            if cleans_up and has_begun and not was_cancelled:
                due = lifecycle.request_cancel(tx, row, reason=reason, grace=grace)
                return [] if due is None else [due]
            ended, why = row, str(Cancelled(reason)) if cleans_up else reason
            lifecycle.terminate(tx, row, reason=why, is_cancel=cleans_up)
            if children:
                messages = families.end_children(
                    tx, row.pk, row.ref, "terminate", reason=why, new_id=new_id, grace=grace
                )
            if parent is None:
                return []
            payload = values.encode_termination_answer(workflow, instance_id, why)
            answer = answers.answer_parent(tx, parent, row.ref, payload=payload, event_id=new_id(), grace=grace)
            return list(answer.due_runs)

        def find_committed(tx: Tx) -> list[DueRun] | None:
            nonlocal ended
            row = self._context.lock_row(tx, workflow, instance_id)
            if ended is None:
                return [] if runs.is_cancel_requested(tx, row.pk, row.run_number) else None
            if row.run_number != ended.run_number:
                ended = None  # a restart has started the next run meanwhile, which must not end
                return []
            return [] if row.status is Status.TERMINATED else None  # a sweep finds the parent, which is due

        due_runs = self._context.store.transact(work, find_committed=find_committed)

        def notify_and_wake() -> None:
            if ended is not None:
                notify.send_workflow_terminated(ended.ref, reason=str(Cancelled(reason)) if cleans_up else reason)
            self._context.publish_runs(due_runs)
            self._context.send_messages(messages)

        self._context.after_commit(notify_and_wake)
