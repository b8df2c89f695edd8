"""The life cycle of existing instances: pause, resume, wake and terminate."""

from __future__ import annotations

from celery_durable import notify, values
from celery_durable.model import DueRun, InstanceRow, Status, WakeReason
from celery_durable.operations.context import OperationContext, Versions, require_possible_id
from celery_durable.store import answers, instances, lifecycle
from celery_durable.store.engine import Tx

_Changed = tuple[InstanceRow, list[DueRun]]
"""An instance before a change, and the runs that became due."""


class LifecycleOperations:
    """The operations that pause, continue and end instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def pause(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> InstanceRow:
        """Pause an instance: at once if no worker holds it, else when the running step ends.

        Timers keep running while the instance is paused.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            if_version: The version tags at which the change applies; None means any.

        Returns:
            The instance before the change.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended.
            VersionMismatch: The version tag is not in ``if_version``.
        """

        def work(tx: Tx) -> tuple[InstanceRow, bool]:
            row = self._context.lock_unfinished(tx, workflow, instance_id, "pause", if_version)
            return row, lifecycle.pause(tx, row)

        def find_committed(tx: Tx, done: tuple[InstanceRow, bool]) -> tuple[InstanceRow, bool] | None:
            row = self._context.lock_row(tx, workflow, instance_id)
            # A restart or the end came after the pause, or made it ineffective.
            is_over = row.run_number != done[0].run_number or row.status.is_terminal
            return done if is_over or _is_paused_or_will_be(row) else None

        row, is_paused_now = self._context.transact(work, find_committed)
        if is_paused_now:
            self._context.after_commit(lambda: notify.send_workflow_paused(row.ref))
        return row

    def resume(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> InstanceRow:
        """End a pause, or cancel a requested pause. Does nothing if there is neither.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            if_version: The version tags at which the change applies; None means any.

        Returns:
            The instance before the change.

        Raises:
            InstanceNotFound: No instance has this id.
            VersionMismatch: The version tag is not in ``if_version``.
        """

        def work(tx: Tx) -> _Changed:
            row = self._context.lock_row(tx, workflow, instance_id, if_version)
            due = None
            if row.status is Status.PAUSED:
                due = lifecycle.resume(tx, row, grace=self._context.grace)
            elif row.pause_requested:
                lifecycle.cancel_pause_request(tx, row)
            return row, [] if due is None else [due]

        def find_committed(tx: Tx, done: _Changed) -> _Changed | None:
            return None if _is_paused_or_will_be(self._context.lock_row(tx, workflow, instance_id)) else done

        row, due_runs = self._context.transact(work, find_committed)
        self._context.after_commit(lambda: self._context.publish_runs(due_runs))
        return row

    def wake(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> bool:
        """Make a worker check the instance now.

        A sleep or a wait does not end early, because only time and rows end it (LAW 5). A start that was scheduled for
        later happens now.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            if_version: The version tags at which the change applies; None means any.

        Returns:
            False if the instance is paused or a worker holds it.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended.
            VersionMismatch: The version tag is not in ``if_version``.
        """

        def work(tx: Tx) -> _Changed:
            row = self._context.lock_unfinished(tx, workflow, instance_id, "wake", if_version)
            if row.status is Status.PAUSED or row.claim_token is not None:
                return row, []
            return row, [lifecycle.make_due(tx, row, wake_reason=WakeReason.WAKE, grace=self._context.grace)]

        def find_committed(tx: Tx, done: _Changed) -> _Changed | None:
            before, due_runs = done
            row = self._context.lock_row(tx, workflow, instance_id)
            # The reason may be that of an earlier wake, and the version may have changed by an event, for example.
            is_woken = row.wake_reason is WakeReason.WAKE and row.version != before.version
            return done if is_woken or not due_runs else None

        _, due_runs = self._context.transact(work, find_committed)
        self._context.after_commit(lambda: self._context.publish_runs(due_runs))
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
        reason = self._context.clean_reason(reason)

        def work(tx: Tx) -> tuple[bool, InstanceRow, list[DueRun]]:
            parent = instances.find_parent(tx, workflow, require_possible_id(workflow, instance_id))
            # The parent first: row locks are taken in ascending key order, and the parent has the lower key.
            answers.lock_parent(tx, parent)
            row = self._context.lock_unfinished(tx, workflow, instance_id, "terminate", if_version)
            lifecycle.terminate(tx, row, reason=reason)
            due_runs = []
            if parent is not None:
                payload = values.encode_termination_answer(workflow, instance_id, reason)
                event_id, grace = self._context.runtime.new_id(), self._context.grace
                due_runs = answers.answer_parent(tx, parent, payload=payload, event_id=event_id, grace=grace)
            return True, row, due_runs

        def find_committed(
            tx: Tx, done: tuple[bool, InstanceRow, list[DueRun]]
        ) -> tuple[bool, InstanceRow, list[DueRun]] | None:
            row = self._context.lock_row(tx, workflow, instance_id)
            if row.run_number != done[1].run_number:
                return False, row, []  # a concurrent restart has ended the intended run and started another
            return done if row.status is Status.TERMINATED else None

        is_done, ended, due_runs = self._context.transact(work, find_committed)

        def notify_and_wake() -> None:
            if is_done:
                notify.send_workflow_terminated(ended.ref, reason=reason)
            self._context.publish_runs(due_runs)

        self._context.after_commit(notify_and_wake)


def _is_paused_or_will_be(row: InstanceRow) -> bool:
    return row.status is Status.PAUSED or row.pause_requested
