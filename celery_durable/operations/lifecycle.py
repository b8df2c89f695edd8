"""The life cycle of existing instances: pause, resume, wake, cancel and terminate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from celery_durable import notify, values
from celery_durable.errors import Cancelled, InstanceNotFound, InstanceTerminal
from celery_durable.model import DueRun, InstanceRow, OutboxMessage, Parent, Status, WakeReason
from celery_durable.operations.context import OperationContext, Versions, require_possible_id
from celery_durable.store.engine import Tx
from celery_durable.store.events import answers
from celery_durable.store.instances import families, instances, interventions, lifecycle
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
        self,
        workflow: str,
        instance_id: str,
        *,
        reason: str | None = None,
        by: str | None = None,
        if_version: Versions = None,
    ) -> None:
        """Ask the instance to stop: its next step call raises Cancelled, so that the workflow can clean up.

        A run that has done nothing yet, or that was asked before, ends at once. The person ``by`` is recorded.
        """
        self._stop(_Stop(self._context, workflow, instance_id, reason, by, is_cancel=True), if_version)

    def cancel_once(self, workflow: str, instance_id: str, *, reason: str) -> None:
        """Cancel an instance unless it was cancelled before, for a caller that may repeat itself."""
        self._stop(_Stop(self._context, workflow, instance_id, reason, is_cancel=True, is_repeatable=True))

    def terminate(
        self,
        workflow: str,
        instance_id: str,
        *,
        reason: str | None = None,
        by: str | None = None,
        children: bool = True,
        if_version: Versions = None,
    ) -> None:
        """End the instance permanently. A step function that still runs records nothing more.

        If a step of another instance created it, that step gets an error as its answer. With ``children``, the
        open children of its run end soon after it. The person ``by`` is recorded.
        """
        self._stop(_Stop(self._context, workflow, instance_id, reason, by, ends_children=children), if_version)

    def end_children(self, payload: Mapping[str, Any]) -> None:
        """End children of a run that was ended, as the event `END_CHILDREN` demands. Repeating it is harmless."""
        ended = families.ChildrenToEnd(**payload)
        end: Callable[..., None] = {"terminate": self.terminate, "cancel": self.cancel_once}[ended.action]
        for workflow, instance_id in self._context.store.read(functools.partial(families.find_open, ended=ended)):
            with suppress(InstanceNotFound, InstanceTerminal):  # it has ended meanwhile
                end(workflow, instance_id, reason=ended.reason)

    def _stop(self, stop: _Stop, if_version: Versions = None) -> None:
        if stop.by is not None:
            stop.by = self._context.check_actor(stop.by)
        stop.reason = self._context.clean_reason(stop.reason)
        work = functools.partial(stop.write, if_version=if_version)
        due_runs = self._context.store.transact(work, find_committed=stop.find_committed)
        self._context.after_commit(lambda: stop.announce(due_runs))


@dataclass(eq=False, repr=False)  # the name of a hostile request must not get into the log by an error that shows it
class _Stop:
    """A cancel or a termination of an instance.

    A run that is cancelled may clean up, unless it has done nothing, or was cancelled before. If the cancel
    ``is_repeatable``, a second one changes nothing.
    """

    context: OperationContext
    workflow: str
    instance_id: str
    reason: str | None
    by: str | None = None
    is_cancel: bool = False
    is_repeatable: bool = False
    ends_children: bool = True
    run_number: int = 0
    ended: InstanceRow | None = None
    """The row of the instance that this call has ended."""
    messages: Sequence[OutboxMessage] = ()

    @property
    def why(self) -> str | None:
        """The reason of a run that ends now."""
        return str(Cancelled(self.reason)) if self.is_cancel else self.reason

    def write(self, tx: Tx, *, if_version: Versions) -> list[DueRun]:
        self.ended, self.messages = None, ()
        parent = instances.find_parent(tx, self.workflow, require_possible_id(self.workflow, self.instance_id))
        # The parent first: row locks are taken in ascending key order, and the parent has the lower key.
        answers.lock_parent(tx, parent, (self.workflow, self.instance_id))
        action = "cancel" if self.is_cancel else "terminate"
        row = self.context.lock_unfinished(tx, self.workflow, self.instance_id, action, if_version)
        self.run_number = row.run_number
        if self.by is not None:
            commit_id = self.context.runtime.new_token()
            interventions.insert_audit_record(
                tx, row, None, action=action, actor=self.by, reason=self.reason, commit_id=commit_id
            )
        if self.is_cancel:
            was_cancelled = runs.is_cancel_requested(tx, row.pk, row.run_number)
            if was_cancelled and self.is_repeatable:
                return []
            if not was_cancelled and (lifecycle.has_started(row) or runs.has_steps(tx, row)):
                due = lifecycle.request_cancel(tx, row, reason=self.reason, grace=self.context.grace)
                return [] if due is None else [due]
        return self._end(tx, row, parent)

    def _end(self, tx: Tx, row: InstanceRow, parent: Parent | None) -> list[DueRun]:
        why, grace, new_id = self.why, self.context.grace, self.context.runtime.new_id
        self.ended = row
        lifecycle.terminate(tx, row, reason=why, is_cancel=self.is_cancel)
        if self.ends_children:
            self.messages = families.end_children(
                tx, row.pk, row.ref, "terminate", reason=why, new_id=new_id, grace=grace
            )
        if parent is None:
            return []
        payload = values.encode_termination_answer(self.workflow, self.instance_id, why)
        answer = answers.answer_parent(tx, parent, row.ref, payload=payload, event_id=new_id(), grace=grace)
        return list(answer.due_runs)

    def find_committed(self, tx: Tx) -> list[DueRun] | None:
        row = self.context.lock_row(tx, self.workflow, self.instance_id)
        if row.run_number != self.run_number:
            self.ended = None  # a restart has started the next run meanwhile, which must not end
            return []
        if self.ended is None:
            return [] if runs.is_cancel_requested(tx, row.pk, row.run_number) else None
        return [] if row.status is Status.TERMINATED else None  # a sweep finds the parent, which is due

    def announce(self, due_runs: Sequence[DueRun]) -> None:
        if self.ended is not None:
            notify.send_workflow_terminated(self.ended.ref, reason=self.why)
        self.context.publish_runs(due_runs)
        self.context.send_messages(self.messages)
