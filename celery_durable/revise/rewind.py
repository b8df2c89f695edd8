"""Rewinding: restart an instance from its first step or a later one, retry what failed, fork.

Ended runs never change: a new run starts with copies of the steps that it keeps. A worker that still runs the earlier
run loses its claim.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from celery_durable import notify, values
from celery_durable.errors import InstanceAlreadyExists, InstanceNotErrored, OutOfScope
from celery_durable.model import DueRun, InstanceRow, RunPlan, RunRef, Status, WorkflowKind
from celery_durable.operations.context import OperationContext, Versions
from celery_durable.revise.continuations import (
    await_children,
    build_continuation_before,
    build_continuation_from_failure,
)
from celery_durable.store.engine import Tx
from celery_durable.store.events import answers
from celery_durable.store.instances import families, instances, lifecycle
from celery_durable.store.runs import runs
from celery_durable.store.runs.runs import Continuation


class RewindOperations:
    """The operations that start new runs of existing work."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def restart(
        self,
        workflow: str,
        instance_id: str,
        *,
        from_step: str | None = None,
        reason: str | None = None,
        if_version: Versions = None,
    ) -> int:
        """Start a new run with the same parameters, from any status.

        With ``from_step``, it keeps the steps that had finished before that step was called, and all events, also
        consumed ones; a linear run then follows the rows of the run that it continues, otherwise the plan of this
        process.
        """

        def continuation(tx: Tx, row: InstanceRow) -> Continuation | None:
            if from_step is None:
                return None
            return build_continuation_before(row, runs.read_source(tx, row), from_step)

        return self._start_run(workflow, instance_id, continuation, reason=reason, if_version=if_version)

    def preview(self, workflow: str, instance_id: str, from_step: str) -> list[str]:
        """Return the keys of the recorded steps that a run from this step calls again, in call order."""

        def work(tx: Tx) -> list[str]:
            row = self._context.read_row(tx, workflow, instance_id)
            source = runs.read_source(tx, row)
            kept = build_continuation_before(row, source, from_step).keys
            return [each.step_key for each in source.steps if each.step_key not in kept]

        return self._context.store.read(work)

    def retry(
        self,
        workflow: str,
        instance_id: str,
        *,
        delay: values.Duration | None = None,
        reason: str | None = None,
        if_version: Versions = None,
        keeps_children: bool = False,
    ) -> int:
        """Retry the steps that ended an errored instance, with fresh attempts, in a new run.

        The failed step of a linear run continues as last called: with the event that it had, or in its wait. With
        ``keeps_children``, failed child steps wait for the same children again, and take the outcome of those that have
        ended. Otherwise they create other children.
        """

        def continuation(tx: Tx, row: InstanceRow) -> Continuation:
            if row.status is not Status.ERRORED:
                raise InstanceNotErrored(workflow, instance_id, row.status)
            source = runs.read_source(tx, row)
            found = build_continuation_from_failure(row, source)
            if not keeps_children:
                return found
            children = families.lock_children(tx, row, source.find_failed_child_steps())
            return await_children(found, children, instances.read_clock(tx))

        starts_in = None if delay is None else values.parse_pause(delay, maximum=self._context.settings.max_sleep)
        return self._start_run(
            workflow, instance_id, continuation, reason=reason, if_version=if_version, delay=starts_in
        )

    def fork(
        self,
        workflow: str,
        instance_id: str,
        step: str,
        *,
        id: str | None = None,  # the public name
    ) -> str:
        """Create an instance that continues before a step of another, with its parameters, labels, steps and events."""
        context = self._context
        context.check_create_enabled()
        max_length = context.settings.max_instance_id
        new_id = context.new_id() if id is None else values.check_instance_id(id, max_length)
        if context.scope is not None and not context.scope.allows_id(new_id):
            raise OutOfScope(new_id)
        commit_id = context.runtime.new_token()

        def work(tx: Tx) -> DueRun:
            return self._insert_fork(tx, context.lock_row(tx, workflow, instance_id), step, new_id, commit_id)

        def was_applied(tx: Tx) -> DueRun | None:
            row = context.lock_row(
                tx, workflow, instance_id
            )  # the commit in doubt held this lock, so it is decided now
            is_committed = runs.find_creator(tx, workflow, new_id) == commit_id
            return DueRun(RunRef(workflow, new_id, 1), row.queue) if is_committed else None

        due = context.store.transact(work, find_committed=was_applied)

        def notify_and_wake() -> None:
            notify.send_workflow_created(due.ref)
            context.publish_runs([due])

        context.after_commit(notify_and_wake)
        return new_id

    def _insert_fork(self, tx: Tx, row: InstanceRow, step: str, new_id: str, commit_id: str) -> DueRun:
        """Insert an instance that continues before a step of this row's current run."""
        source = runs.read_source(tx, row)
        continuation = build_continuation_before(row, source, step)
        is_new = instances.insert(
            tx,
            workflow=row.workflow,
            instance_id=new_id,
            params=source.params,
            queue=row.queue,
            grace=self._context.grace,
            commit_id=commit_id,
            plan=continuation.plan,
            continuation=continuation,
            retention=self._context.retention(row.workflow),
            max_run=row.max_run,
            initial_labels=instances.read_labels(tx, row.pk),
        )
        if not is_new:
            raise InstanceAlreadyExists(row.workflow, new_id)
        return DueRun(RunRef(row.workflow, new_id, 1), row.queue)

    def _start_run(
        self,
        workflow: str,
        instance_id: str,
        continuation: Callable[[Tx, InstanceRow], Continuation | None],
        *,
        reason: str | None,
        if_version: Versions,
        delay: timedelta | None = None,
    ) -> int:
        """Start a run from the continuation that ``continuation`` returns while the instance is locked."""
        commit_id = self._context.runtime.new_token()
        reason = self._context.clean_reason(reason)

        def work(tx: Tx) -> DueRun:
            row = self._context.lock_row(tx, workflow, instance_id, if_version)
            found = continuation(tx, row)
            plan = self._plan(row) if found is None else found.plan
            due = lifecycle.restart(
                tx,
                row,
                grace=self._context.grace,
                commit_id=commit_id,
                reason=reason,
                plan=plan,
                continuation=found,
                delay=delay,
            )
            for each in () if found is None else found.awaited:
                event_id = self._context.runtime.new_id()
                answers.answer_from_child(tx, each.instance, event_id=event_id, grace=self._context.grace)
            return due

        def was_applied(tx: Tx) -> DueRun | None:
            row = self._context.lock_row(tx, workflow, instance_id)
            number = runs.find_by_commit(tx, row, commit_id=commit_id)
            return None if number is None else DueRun(RunRef(workflow, instance_id, number), row.queue)

        due = self._context.store.transact(work, find_committed=was_applied)

        def notify_and_wake() -> None:
            notify.send_workflow_restarted(due.ref, reason=reason)
            if delay is None:
                self._context.publish_runs([due])

        self._context.after_commit(notify_and_wake)
        return due.ref.run_number

    def _plan(self, row: InstanceRow) -> RunPlan:
        """Return the plan of a new run. A replay run needs none, so its workflow may be unknown in this process."""
        known = self._context.registry.find(row.workflow)
        if known is None and row.kind is WorkflowKind.REPLAY:
            return RunPlan()
        return (known or self._context.registry.get(row.workflow)).plan(self._context.settings.step_policy)
