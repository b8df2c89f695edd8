"""Task steps and child steps: remote steps, whose work a Celery task or a child workflow does.

The answer arrives as an event that only this step waits for. So deadlines, races, gathers and rewinds work as for every
wait. The commit that records the step also writes the task's message or creates the child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import RetryDelayInvalid
from celery_durable.errors.base import format_limit
from celery_durable.model import (
    OpenWait,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
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
from celery_durable.runner.commit_parts import (
    CommitPart,
    CreateInstances,
    FailedAttempts,
    OpenCommit,
    SendMessages,
    StepEffectFailed,
)
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import record_task_timeout
from celery_durable.runner.limits import LimitedCall, commit_limited
from celery_durable.runner.step_commit import Decision, StepCommit, build_suspension
from celery_durable.runner.step_execution import OtherSteps, StepExecution, decode_result
from celery_durable.runner.step_kinds import CallIdentity, StepKind, compare_duration, compare_timeout, parse_timeout
from celery_durable.runner.waits import WaitOutcome, WaitSpec, check_wait, retry_delay, wait_duration
from celery_durable.step import ChildCall, NewInstance, TaskCall
from celery_durable.store.engine import Tx
from celery_durable.store.runs import items, outbox
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.runs.holds import CHILD_HOLDER
from celery_durable.values import AnswerError, Codec, StepPolicy, encode_step_task

TASK_POLICY = StepPolicy(max_attempts=1)
"""The default policy of task steps: the engine does not retry, because Celery does. Every call sets a timeout."""
_GENERATED_ID_PREFIX = "child:"


class TaskKind(StepKind[TaskCall]):
    """Steps whose work a Celery task does: `step.task`."""

    type, call_type, has_attempts, writes_beside = StepType.TASK, TaskCall, True, True

    def identify(self, call: TaskCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        del settings, policy
        work = call.signature, call.config
        return CallIdentity(call.name, work, TASK_POLICY.override_with(call.config))

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        for execution in executions:
            match context.replay_state.decide_remote(execution.entry.row, now=context.now):
                case ReplayStep(row):
                    execution.finished_row = row
                case WaitUntil(until):
                    execution.wait = OpenWait(until)
                case RunAttempt(attempt):
                    _send_task(context, execution, execution.call, attempt, other_steps)
                case AwaitAnswer(row):
                    check_wait(context, execution, _build_task_wait(context, execution, row), other_steps)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> Any:
        del context, execution
        return Codec().decode(row.result or "null")

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        del settings
        yield from compare_task(row, find_task_name(execution.call.signature))
        yield from compare_timeout(execution, row)

    def prepare_write(self, commit: OpenCommit, write: StepWrite) -> None:
        if write.status is StepStatus.CANCELLED:
            items.delete_task_item(commit.tx, commit.claim.pk, commit.claim.ref.run_number, write.key)


@dataclass(eq=False)
class _WithdrawTask(CommitPart):
    """Withdraws the task of a step that has timed out, if it is still in the outbox."""

    step_key: str
    message_id: str

    def write(self, commit: OpenCommit) -> None:
        outbox.delete(commit.tx, [self.message_id])
        items.delete_task_item(commit.tx, commit.claim.pk, commit.claim.ref.run_number, self.step_key)


def _send_task(
    context: ExecutionContext, execution: StepExecution, call: TaskCall, attempt: int, other_steps: OtherSteps
) -> None:
    """Record this attempt as sent, and write its message to the outbox, in one commit."""
    assert execution.policy.timeout is not None
    claim = context.claim
    event_type = task_event_type(find_task_name(call.signature), claim.pk, execution.entry.seq, attempt)
    body = encode_step_task(call.signature, limits=context.limits)
    timeout = wait_duration(context, execution, execution.policy.timeout, "event")
    write = context.build_write(
        execution, StepStatus.WAITING, attempts=attempt, wake_in=timeout, event_type=event_type, keeps_limits=True
    )
    instance_fields = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
    step = TaskSendingStep(
        *instance_fields, execution.key, timeout, on_lost=call.on_lost or context.env.settings.task_on_lost
    )

    token = context.env.runtime.new_secret()

    def send(tx: Tx, guard_result: GuardResult) -> Decision:
        message = items.mark_task_as_sent(
            tx, step, body, event_type=event_type, attempt=attempt, token=token, now=guard_result.now
        )
        return Decision([write], [SendMessages([message])])

    if execution.policy.limits:
        _commit_limited(context, execution, write, send, token=token, position=0)
        return
    step_commit = StepCommit(write.commit_id, decide=send)
    if other_steps is OtherSteps.NONE:
        step_commit.ending = build_suspension
        context.suspend_with(step_commit)
    else:
        context.commit(step_commit, execution)


def _build_task_wait(context: ExecutionContext, execution: StepExecution, row: StepRow) -> WaitSpec:
    assert row.wait_event_type is not None

    def build_failure(error: AnswerError) -> WaitOutcome:
        """Build the outcome of a failed attempt, by the step's policy: a retry, or the step's failure."""
        policy, error_text = execution.policy, (error.name, error.message)
        is_used_up = policy.max_attempts is not None and row.attempts >= policy.max_attempts
        columns: dict[str, Any] = {"attempts": row.attempts}
        if is_used_up or error.is_non_retryable:
            return WaitOutcome(StepStatus.ERRORED, columns | {"error": error_text})
        try:
            pause = retry_delay(context, execution, row.attempts, error_text)
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

    claim = context.claim
    message_id = task_id(row.wait_event_type, claim.pk, claim.ref.run_number)

    def on_timeout() -> WaitOutcome:
        name = parse_task_event_type(row.wait_event_type)
        timeout = format_limit(execution.policy.timeout or context.env.settings.max_sleep)
        error = AnswerError("StepTimeout", f"Celery task {name!r} did not answer within {timeout}")
        outcome = build_failure(error)
        failed = record_task_timeout(
            context.env,
            context.run,
            outcome.columns["error"],
            step=row.name,
            step_key=row.step_key,
            number=row.attempts,
            task_id=message_id,
        )
        return replace(outcome, parts=[FailedAttempts([failed]), _WithdrawTask(execution.key, message_id)])

    return WaitSpec(row.wait_event_type, on_event, on_timeout)


class ChildKind(StepKind[ChildCall]):
    """Steps whose work a child workflow does: `step.child`."""

    type, call_type = StepType.CHILD, ChildCall

    def identify(self, call: ChildCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        timeout = None if call.timeout is None else parse_timeout(call.timeout, settings)
        work = call.definition.name, call.params, call.instance_id, timeout, call.on_parent_end
        return CallIdentity(call.name, work, replace(policy, limits=tuple(call.limits)))

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        for execution in executions:
            match context.replay_state.decide_remote(execution.entry.row, now=context.now):
                case ReplayStep(row):
                    execution.finished_row = row
                case AwaitAnswer(row):
                    check_wait(context, execution, _build_child_wait(row), other_steps)
                case RunAttempt() | WaitUntil():
                    _create_child(context, execution, execution.call)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> Any:
        del context
        return decode_result(execution.name, execution.call.definition.output, row.result or "null")

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        call: ChildCall = execution.call
        if (child := parse_child_event_type(row.wait_event_type)) is not None:
            workflow, instance_id = call.definition.name, call.instance_id or child[1]
            if child != (workflow, instance_id):
                was, now = f"child {child[0]}/{child[1]}", f"child {workflow}/{instance_id}"
                yield was, now, "The step still waits for the existing child. No second child is created."
        timeout = settings.max_sleep if call.timeout is None else values.parse_duration(call.timeout)
        yield from compare_duration(row, "timeout", timeout)


def _create_child(context: ExecutionContext, execution: StepExecution, call: ChildCall) -> None:
    """Record the step and create the child in one commit. If the id is taken, a second commit fails the step."""
    claim, settings = context.claim, context.env.settings
    instance_id = call.instance_id
    # The generated id is unique to this run: an earlier run, or a deleted instance with the same id, may have left
    # its own child.
    if instance_id is None:
        instance_id = derive_id(f"{_GENERATED_ID_PREFIX}{execution.key}", claim.pk, claim.ref.run_number)
    timeout = settings.max_sleep if call.timeout is None else values.parse_duration(call.timeout)
    write = context.build_write(
        execution,
        StepStatus.WAITING,
        attempts=1,
        wake_in=wait_duration(context, execution, timeout, "event"),
        event_type=child_event_type(
            call.definition.name,
            instance_id,
            execution.entry.seq,
            is_independent=call.on_parent_end == "continue",
        ),
        keeps_limits=True,
    )
    child = CreateInstances([NewInstance(call.definition, instance_id, call.params, call.labels)])
    try:
        if call.limits:
            _create_with_limits(context, execution, write, child)
        else:
            context.commit(StepCommit(write.commit_id, [write], parts=[child]), execution)
    except StepEffectFailed as exc:
        error = values.sanitize_error(*values.describe_error(exc.error))
        failed = context.build_write(execution, StepStatus.ERRORED, error=error, attempts=1)
        context.commit_step(execution, failed)


def _create_with_limits(
    context: ExecutionContext, execution: StepExecution, write: StepWrite, child: CreateInstances
) -> None:
    """Create the child once the step has its limits; raises StepEffectFailed."""
    try:
        with context.lease.user_code():
            child.encode(context.env.settings)  # what is decided under the lock is not encoded any more
    except Exception as exc:
        if context.env.stops_process(exc):
            raise
        raise StepEffectFailed(exc) from exc
    send = lambda *_: Decision([write], [child])  # noqa: E731
    _commit_limited(context, execution, write, send, token=CHILD_HOLDER)


def _commit_limited(
    context: ExecutionContext,
    execution: StepExecution,
    write: StepWrite,
    send: Callable[[Tx, GuardResult], Decision],
    **hold: Any,
) -> None:
    """Commit that a step which has its limits sends its task or creates its child, or that it waits for them."""
    call = LimitedCall.of_step(context, execution, write, send, **hold)
    (wait,) = commit_limited(context, [call], write.commit_id, execution=execution)
    if wait is not None:
        execution.wait = wait


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


def compare_task(row: StepRow, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the change of the task that an open step has sent."""
    task = parse_task_event_type(row.wait_event_type)
    if task is not None and task != name:
        advice = "Tasks that were already sent still count. Tasks that are sent from now on are the new task."
        yield f"task {task!r}", f"task {name!r}", advice
