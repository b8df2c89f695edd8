"""Rewinding: restart an instance, wholly or from a step; retry what failed; fork.

Prior runs are never changed. To continue from the middle, a new run starts with copies of the steps that it keeps. A
worker that runs the prior run loses its claim. The prior run stays readable.
"""

from __future__ import annotations

from collections.abc import Callable

from celery_durable import notify, values
from celery_durable.errors import InstanceAlreadyExists, InstanceNotErrored, OutOfScope
from celery_durable.model import DueRun, InstanceRow, RunPlan, RunRef, Status, WorkflowKind
from celery_durable.operations.base import OperationsBase, Versions
from celery_durable.operations.continuations import build_continuation_before, build_continuation_from_failure
from celery_durable.store import instances, labels, runs
from celery_durable.store.engine import Tx
from celery_durable.store.runs import Continuation


class RewindOperations(OperationsBase):
    """The operations that repeat work."""

    def restart(
        self,
        workflow: str,
        instance_id: str,
        *,
        from_step: str | None = None,
        reason: str | None = None,
        if_version: Versions = None,
    ) -> int:
        """Start a new run with the same parameters, from any state. Returns its number. Prior runs are kept.

        ``from_step`` is the key of a step of the current run (its name, unless repeated). The new run keeps what had
        finished before that step was called, and all events, including those that its steps consumed. Raises
        InstanceNotFound, StepNotFound.

        Without ``from_step``, a linear run follows the plan of the code known here; raises WorkflowNotFound if there
        is none. With it, a linear run follows the rows of the run that it continues; raises ValueRefused for a step
        that this run has not reached.
        """

        def continuation(tx: Tx, row: InstanceRow) -> Continuation | None:
            if from_step is None:
                return None
            return build_continuation_before(row, runs.read_source(tx, row), from_step)

        return self._start_run(workflow, instance_id, continuation, reason=reason, if_version=if_version)

    def retry(self, workflow: str, instance_id: str, *, reason: str | None = None, if_version: Versions = None) -> int:
        """Retry what ended an errored instance, with fresh attempts. Returns the number of the new run.

        The new run keeps what finished before the failure was raised. The step of a linear run continues as last
        called: with the event that it had, or in its wait. Raises InstanceNotFound, InstanceNotErrored.
        """

        def continuation(tx: Tx, row: InstanceRow) -> Continuation:
            if row.status is not Status.ERRORED:
                raise InstanceNotErrored(workflow, instance_id, row.status)
            return build_continuation_from_failure(row, runs.read_source(tx, row))

        return self._start_run(workflow, instance_id, continuation, reason=reason, if_version=if_version)

    def fork(
        self,
        workflow: str,
        instance_id: str,
        step: str,
        *,
        id: str | None = None,  # the public name
    ) -> str:
        """Create an instance that continues before a step of another instance's current run. Returns its id.

        It has the same parameters and labels, copies of what finished before, and the events. The other instance
        stays unchanged. Raises InstanceNotFound, StepNotFound, InvalidInstanceId, InstanceAlreadyExists, and
        ValueRefused for a step that a linear run has not reached.
        """
        new_id = self.new_id() if id is None else values.check_instance_id(id, self._settings.max_instance_id)
        if self._scope is not None and not self._scope.allows_id(new_id):
            raise OutOfScope(new_id)
        commit_id = self._runtime.new_token()

        def work(tx: Tx) -> DueRun:
            row = self._lock_row(tx, workflow, instance_id)
            source = runs.read_source(tx, row)
            continuation = build_continuation_before(row, source, step)
            is_new = instances.insert(
                tx,
                workflow=workflow,
                instance_id=new_id,
                params=source.params,
                queue=row.queue,
                grace=self._grace,
                commit_id=commit_id,
                plan=continuation.plan,
                continuation=continuation,
                retention=self._retention(workflow),
                initial_labels=labels.read(tx, row.pk),
            )
            if not is_new:
                raise InstanceAlreadyExists(workflow, new_id)
            return DueRun(RunRef(workflow, new_id, 1), row.queue)

        def was_applied(tx: Tx) -> DueRun | None:
            row = self._lock_row(tx, workflow, instance_id)  # the commit in doubt held this lock, so it is decided now
            is_ours = runs.find_creator(tx, workflow, new_id) == commit_id
            return DueRun(RunRef(workflow, new_id, 1), row.queue) if is_ours else None

        due = self._store.transact(work, find_committed=was_applied)
        notify.send_workflow_created(due.ref)
        self._publish_runs([due])
        return new_id

    def _start_run(
        self,
        workflow: str,
        instance_id: str,
        continuation: Callable[[Tx, InstanceRow], Continuation | None],
        *,
        reason: str | None,
        if_version: Versions,
    ) -> int:
        """Start a run from the continuation that ``continuation`` returns under the lock."""
        commit_id = self._runtime.new_token()
        reason = None if reason is None else values.sanitize_text(reason, self._settings.max_log_message)

        def work(tx: Tx) -> DueRun:
            row = self._lock_row(tx, workflow, instance_id, if_version)
            found = continuation(tx, row)
            plan = self._plan(row) if found is None else found.plan
            return instances.restart(
                tx, row, grace=self._grace, commit_id=commit_id, reason=reason, plan=plan, continuation=found
            )

        def was_applied(tx: Tx) -> DueRun | None:
            row = self._lock_row(tx, workflow, instance_id)
            number = runs.find_by_commit(tx, row, commit_id=commit_id)
            return None if number is None else DueRun(RunRef(workflow, instance_id, number), row.queue)

        due = self._store.transact(work, find_committed=was_applied)
        notify.send_workflow_restarted(due.ref, reason=reason)
        self._publish_runs([due])
        return due.ref.run_number

    def _plan(self, row: InstanceRow) -> RunPlan:
        """Return how a new run starts. A function's run needs no plan, so its code may be unknown here."""
        known = self._registry.find(row.workflow)
        if known is None and row.kind is WorkflowKind.REPLAY:
            return RunPlan()
        return (known or self._registry.get(row.workflow)).plan(self._settings.step_policy)
