"""Steps that run elsewhere: as a Celery task, or as an instance of another workflow.

The task or the child sends its answer as an event that only this step waits for. So deadlines, races, gathers and
rewinds work as for every wait. The commit that records the step also writes the task's message or creates the child.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery_durable import values
from celery_durable.model import StepRow, StepStatus, child_of, child_type, task_id, task_of, task_type
from celery_durable.replay_state import AwaitAnswer, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.branches import StepExecution
from celery_durable.runner.execution import ExecutionContext
from celery_durable.runner.step_commit import StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runner.waits import BuildWrite, WaitSpec, WaitSteps, recorded_waits
from celery_durable.step import ChildCall, NewInstance, TaskCall
from celery_durable.store import items
from celery_durable.store.claims import GuardResult, OpenWait
from celery_durable.store.engine import Tx
from celery_durable.store.items import RemoteStep
from celery_durable.store.step_rows import PendingEvent, StepWrite
from celery_durable.values import AnsweredError, StepPolicy, stored_task

TASK_POLICY = StepPolicy(limit=0)
"""The default policy of task steps: no retries by the engine, since Celery has its own. Every call sets a timeout."""
_OWN_CHILD = "child:"


class RemoteSteps:
    """Sends tasks and creates children, and records their answers."""

    def __init__(self, context: ExecutionContext, waits: WaitSteps) -> None:
        self._context, self._waits = context, waits

    # --- Celery tasks ---------------------------------------------------------------------------

    def task(self, branch: StepExecution, call: TaskCall, *, sole: bool) -> None:
        """Advance a task step: send an attempt, or check for its answer."""
        match self._context.replay_state.decide_remote(branch.entry.row, now=self._context.now):
            case ReplayStep(row):
                branch.row = row
            case WaitUntil(until):
                branch.wait = OpenWait(until)
            case RunAttempt(attempt):
                self._send(branch, call, attempt, sole=sole)
            case AwaitAnswer(row):
                self._waits.check(branch, self._answer_of_task(branch, row), sole=sole)

    def _send(self, branch: StepExecution, call: TaskCall, attempt: int, *, sole: bool) -> None:
        """Record this attempt as sent, with its message in the outbox."""
        assert branch.policy.timeout is not None
        claim = self._context.lease.claim
        event_type = task_type(task_name(call.signature), claim.pk, branch.entry.seq, attempt)
        body = stored_task(call.signature, limits=self._context.env.settings.limits)
        timeout = self._waits.wait_duration(branch, branch.policy.timeout, "event")
        write = self._context.build_write(
            branch, StepStatus.WAITING, attempts=attempt, wake_in=timeout, event_type=event_type
        )
        where = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
        step = RemoteStep(*where, branch.key, timeout, on_lost=call.on_lost or self._context.env.settings.task_on_lost)

        def send(tx: Tx, guard_result: GuardResult) -> list[StepWrite]:
            message = items.send_task(tx, step, body, event_type=event_type, attempt=attempt, now=guard_result.now)
            step_commit.messages = [message]
            return [write]

        step_commit = StepCommit(
            [write], self._context.drain_logs(), decide=send, sleep=recorded_waits if sole else None
        )
        if sole:
            self._context.defer_commit(step_commit)
        else:
            self._context.apply_to(
                branch, self._context.or_interrupt(lambda: self._context.committer.commit(step_commit))
            )

    def _answer_of_task(self, branch: StepExecution, row: StepRow) -> WaitSpec:
        assert row.wait_event_type is not None

        def failed(build_write: BuildWrite, error: AnsweredError) -> StepWrite:
            """The row of a failed attempt: like a body, it is retried, or the step fails."""
            policy, told = branch.policy, (error.name, error.message)
            is_used_up = policy.max_attempts is not None and row.attempts >= policy.max_attempts
            if is_used_up or error.is_non_retryable:
                return build_write(StepStatus.ERRORED, error=told, attempts=row.attempts)
            pause = self._waits.wait_duration(branch, policy.delay_after(row.attempts), "retry")
            # No attempt is out now. A late answer of this one is ignored, since no wait has its event type.
            return build_write(
                StepStatus.WAITING, error=told, attempts=row.attempts, retry_in=pause, wake_at=None, event_type=None
            )

        def on_event(event: PendingEvent, build_write: BuildWrite) -> StepWrite:
            if (error := values.error_in(event.payload)) is not None:
                return failed(build_write, error)
            return build_write(StepStatus.COMPLETED, result=_output(event), attempts=row.attempts)

        def on_timeout(build_write: BuildWrite) -> StepWrite:
            name = task_of(row.wait_event_type)
            text = f"Celery task {name!r} did not answer within {branch.policy.timeout}"
            return failed(build_write, AnsweredError("StepTimeout", text))

        claim = self._context.lease.claim
        message_id = task_id(row.wait_event_type, claim.pk, claim.ref.run_number)
        return WaitSpec(row.wait_event_type, timedelta(0), on_event, on_timeout, message_id_to_cancel=message_id)

    # --- child workflows ------------------------------------------------------------------------

    def child(self, branch: StepExecution, call: ChildCall, *, sole: bool) -> None:
        """Advance a child step: create the child, or check for its answer."""
        match self._context.replay_state.decide_remote(branch.entry.row, now=self._context.now):
            case ReplayStep(row):
                branch.row = row
            case AwaitAnswer(row):
                self._waits.check(branch, _answer_of_child(row), sole=sole)
            case RunAttempt() | WaitUntil():
                self._create(branch, call)

    def _create(self, branch: StepExecution, call: ChildCall) -> None:
        """Record the step and create the child in a commit of its own, which fails if the id is taken.

        Then a second commit records the step as failed.
        """
        claim, settings = self._context.lease.claim, self._context.env.settings
        instance_id = call.instance_id
        # An id of this run alone: the child of an earlier run, or of a deleted instance with the same id, may exist.
        if instance_id is None:
            instance_id = task_id(f"{_OWN_CHILD}{branch.key}", claim.pk, claim.ref.run_number)
        timeout = settings.max_sleep if call.timeout is None else values.duration(call.timeout)
        write = self._context.build_write(
            branch,
            StepStatus.WAITING,
            attempts=1,
            wake_in=self._waits.wait_duration(branch, timeout, "event"),
            event_type=child_type(call.definition.name, instance_id, branch.entry.seq),
        )
        new = NewInstance(call.definition, instance_id, call.params, call.labels)
        said = list(self._context.logs)
        step_commit = StepCommit([write], self._context.drain_logs(), instances=[new])
        try:
            committed = self._context.or_interrupt(lambda: self._context.committer.commit(step_commit))
        except StepEffectFailed as exc:
            self._context.logs[:0] = said
            error = values.storable_error(type(exc.error).__name__, str(exc.error))
            self._context.commit_step(
                branch, self._context.build_write(branch, StepStatus.ERRORED, error=error, attempts=1)
            )
        else:
            self._context.apply_to(branch, committed)


def _answer_of_child(row: StepRow) -> WaitSpec:
    assert row.wait_event_type is not None

    def on_event(event: PendingEvent, build_write: BuildWrite) -> StepWrite:
        if (error := values.error_in(event.payload)) is not None:
            return build_write(StepStatus.ERRORED, error=(error.name, error.message), attempts=1)
        return build_write(StepStatus.COMPLETED, result=_output(event), attempts=1)

    def on_timeout(build_write: BuildWrite) -> StepWrite:
        workflow, instance_id = child_of(row.wait_event_type) or ("", "")
        text = f"Instance {instance_id!r} of workflow {workflow!r} did not end in time; it goes on"
        return build_write(StepStatus.ERRORED, error=("StepTimeout", text), attempts=1)

    return WaitSpec(row.wait_event_type, timedelta(0), on_event, on_timeout)


def task_name(signature: Any) -> str:
    """The task's name, for people. `stored_task` checks whether it can be sent."""
    if isinstance(signature, Mapping):
        return str(signature.get("task"))
    return signature if isinstance(signature, str) else str(getattr(signature, "name", signature))


def _output(event: PendingEvent) -> str:
    """The output in an answer. It was checked when the answer was accepted, or when the child ended."""
    return values.encode(values.output_in(event.payload), what="Answer", limits=values.CHECKED)
