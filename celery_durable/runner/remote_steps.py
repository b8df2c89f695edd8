"""Task steps and child steps: remote steps, whose work a Celery task or a child workflow does.

The answer of the task or child arrives as an event that only this step waits for. So deadlines, races, gathers and
rewinds work as for every wait. The commit that records the step also writes the task's message or creates the child.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery_durable import values
from celery_durable.errors import RetryDelayInvalid
from celery_durable.errors.base import format_limit
from celery_durable.model import (
    OpenWait,
    StepRow,
    StepStatus,
    StoredEvent,
    TaskSendingStep,
    child_event_type,
    derive_id,
    parse_child_event_type,
    parse_task_event_type,
    task_event_type,
    task_id,
)
from celery_durable.replay_state import AwaitAnswer, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import record_task_timeout
from celery_durable.runner.step_commit import Decision, StepCommit, build_suspension
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runner.step_execution import OtherSteps, StepExecution
from celery_durable.runner.waits import WaitOutcome, WaitSpec, WaitSteps
from celery_durable.step import ChildCall, NewInstance, TaskCall
from celery_durable.store.engine import Tx
from celery_durable.store.runs import items
from celery_durable.store.runs.claims import GuardResult
from celery_durable.values import AnswerError, StepPolicy, encode_step_task

TASK_POLICY = StepPolicy(limit=0)
"""The default policy of task steps: the engine does not retry, because Celery does. Every call sets a timeout."""
_GENERATED_ID_PREFIX = "child:"


class RemoteSteps:
    """Advances the task steps and child steps of a pass. `MapSteps` advances the map steps."""

    def __init__(self, context: ExecutionContext, waits: WaitSteps) -> None:
        self._context, self._waits = context, waits

    # --- Celery tasks ---------------------------------------------------------------------------

    def advance_task(self, execution: StepExecution, call: TaskCall, other_steps: OtherSteps) -> None:
        """Advance a task step: send an attempt, or check for its answer."""
        match self._context.replay_state.decide_remote(execution.entry.row, now=self._context.now):
            case ReplayStep(row):
                execution.finished_row = row
            case WaitUntil(until):
                execution.wait = OpenWait(until)
            case RunAttempt(attempt):
                self._send_task(execution, call, attempt, other_steps)
            case AwaitAnswer(row):
                self._waits.check_wait(execution, self._build_task_wait(execution, row), other_steps)

    def _send_task(self, execution: StepExecution, call: TaskCall, attempt: int, other_steps: OtherSteps) -> None:
        """Record this attempt as sent, and write its message to the outbox, in one commit."""
        assert execution.policy.timeout is not None
        claim = self._context.claim
        event_type = task_event_type(find_task_name(call.signature), claim.pk, execution.entry.seq, attempt)
        body = encode_step_task(call.signature, limits=self._context.limits)
        timeout = self._waits.wait_duration(execution, execution.policy.timeout, "event")
        write = self._context.build_write(
            execution, StepStatus.WAITING, attempts=attempt, wake_in=timeout, event_type=event_type
        )
        instance_fields = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
        step = TaskSendingStep(
            *instance_fields, execution.key, timeout, on_lost=call.on_lost or self._context.env.settings.task_on_lost
        )

        def send(tx: Tx, guard_result: GuardResult) -> Decision:
            message = items.mark_task_as_sent(
                tx, step, body, event_type=event_type, attempt=attempt, now=guard_result.now
            )
            return Decision([write], [message])

        step_commit = StepCommit(write.commit_id, decide=send)
        if other_steps is OtherSteps.NONE:
            step_commit.ending = build_suspension
            self._context.suspend_with(step_commit)
        else:
            self._context.commit(step_commit, execution)

    def _build_task_wait(self, execution: StepExecution, row: StepRow) -> WaitSpec:
        assert row.wait_event_type is not None

        def build_failure(error: AnswerError) -> WaitOutcome:
            """Build the outcome of a failed attempt.

            The step's policy decides, as for the body of `step.do`: the row records a retry or the step's failure.
            """
            policy, error_text = execution.policy, (error.name, error.message)
            is_used_up = policy.max_attempts is not None and row.attempts >= policy.max_attempts
            columns: dict[str, Any] = {"attempts": row.attempts}
            if is_used_up or error.is_non_retryable:
                return WaitOutcome(StepStatus.ERRORED, columns | {"error": error_text})
            try:
                pause = self._waits.retry_delay(execution, row.attempts, error_text)
            except RetryDelayInvalid as exc:
                invalid = values.sanitize_error(*values.describe_error(exc))
                return WaitOutcome(StepStatus.ERRORED, columns | {"error": invalid})
            # No attempt is in flight now. A late answer of this one is ignored: no wait has its event type.
            columns |= {"error": error_text, "retry_in": pause, "wake_at": None, "event_type": None}
            return WaitOutcome(StepStatus.WAITING, columns)

        def on_event(event: StoredEvent) -> WaitOutcome:
            # The process that took the answer of a failed task has recorded that attempt.
            if (error := values.read_answer_error(event.payload)) is not None:
                return build_failure(error)
            return WaitOutcome(StepStatus.COMPLETED, {"result": _encode_output(event), "attempts": row.attempts})

        claim = self._context.claim
        message_id = task_id(row.wait_event_type, claim.pk, claim.ref.run_number)

        def on_timeout() -> WaitOutcome:
            name = parse_task_event_type(row.wait_event_type)
            timeout = format_limit(execution.policy.timeout or self._context.env.settings.max_sleep)
            error = AnswerError("StepTimeout", f"Celery task {name!r} did not answer within {timeout}")
            outcome = build_failure(error)
            failed = record_task_timeout(
                self._context.env,
                self._context.run,
                outcome.columns["error"],
                step=row.name,
                step_key=row.step_key,
                number=row.attempts,
                task_id=message_id,
            )
            return replace(outcome, failures=[failed])

        return WaitSpec(row.wait_event_type, on_event, on_timeout, message_id_to_cancel=message_id)

    # --- child workflows ------------------------------------------------------------------------

    def advance_child(self, execution: StepExecution, call: ChildCall, other_steps: OtherSteps) -> None:
        """Advance a child step: create the child, or check for its answer."""
        match self._context.replay_state.decide_remote(execution.entry.row, now=self._context.now):
            case ReplayStep(row):
                execution.finished_row = row
            case AwaitAnswer(row):
                self._waits.check_wait(execution, _build_child_wait(row), other_steps)
            case RunAttempt() | WaitUntil():
                self._create_child(execution, call)

    def _create_child(self, execution: StepExecution, call: ChildCall) -> None:
        """Record the step and create the child in one commit. If the id is taken, a second commit fails the step."""
        claim, settings = self._context.claim, self._context.env.settings
        instance_id = call.instance_id
        # The generated id is unique to this run: an earlier run, or a deleted instance with the same id, may have left
        # its own child.
        if instance_id is None:
            instance_id = derive_id(f"{_GENERATED_ID_PREFIX}{execution.key}", claim.pk, claim.ref.run_number)
        timeout = settings.max_sleep if call.timeout is None else values.parse_duration(call.timeout)
        write = self._context.build_write(
            execution,
            StepStatus.WAITING,
            attempts=1,
            wake_in=self._waits.wait_duration(execution, timeout, "event"),
            event_type=child_event_type(call.definition.name, instance_id, execution.entry.seq),
        )
        new_instance = NewInstance(call.definition, instance_id, call.params, call.labels)
        try:
            self._context.commit(StepCommit(write.commit_id, [write], instances=[new_instance]), execution)
        except StepEffectFailed as exc:
            error = values.sanitize_error(*values.describe_error(exc.error))
            failed = self._context.build_write(execution, StepStatus.ERRORED, error=error, attempts=1)
            self._context.commit_step(execution, failed)


def _build_child_wait(row: StepRow) -> WaitSpec:
    assert row.wait_event_type is not None

    def on_event(event: StoredEvent) -> WaitOutcome:
        if (error := values.read_answer_error(event.payload)) is not None:
            return WaitOutcome(StepStatus.ERRORED, {"error": (error.name, error.message), "attempts": 1})
        return WaitOutcome(StepStatus.COMPLETED, {"result": _encode_output(event), "attempts": 1})

    def on_timeout() -> WaitOutcome:
        workflow, instance_id = parse_child_event_type(row.wait_event_type) or ("", "")
        text = f"Instance {instance_id!r} of workflow {workflow!r} did not end in time; it continues"
        return WaitOutcome(StepStatus.ERRORED, {"error": ("StepTimeout", text), "attempts": 1})

    return WaitSpec(row.wait_event_type, on_event, on_timeout)


def find_task_name(signature: Any) -> str:
    """Return the task's name for display. `encode_step_task` checks whether the task can be sent."""
    if isinstance(signature, Mapping):
        return str(signature.get("task"))
    return signature if isinstance(signature, str) else str(getattr(signature, "name", signature))


def _encode_output(event: StoredEvent) -> str:
    """Encode the output of an answer. It was checked when the answer was accepted, or when the child ended."""
    return values.encode(values.read_answer_output(event.payload), what="Answer", limits=values.ALREADY_CHECKED_LIMITS)
