"""The steps of a workflow function that have a body: `step.do`, and branches that were submitted with `step.submit`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import describe_step
from celery_durable.errors import Cancelled, DefinitionInvalid, StepResultInvalid, ValueRefused
from celery_durable.model import OpenWait, StepRow, StepStatus, StepType, StepWrite, hot_dataclass
from celery_durable.replay_state import AttemptLost, AttemptsExhausted, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.attempts import commit_terminal_failure, idempotency_key
from celery_durable.runner.commit_parts import FailedAttempts
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import (
    AttemptFailed,
    AttemptFailure,
    describe_unknown_end,
    plan_retry,
    record_failure,
)
from celery_durable.runner.limits import LimitedCall, commit_limited
from celery_durable.runner.session_lock import SessionLock
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import StepCommit, build_attempt_commit, build_suspension
from celery_durable.runner.step_execution import OtherSteps, StepExecution, decode_result
from celery_durable.runner.step_kinds import CallIdentity, StepKind, compare_timeout
from celery_durable.step import BodyCall, StepTx
from celery_durable.values import StepPolicy, ValidationFailed

logger = logging.getLogger("celery_durable.runner")


class BodyKind(StepKind[BodyCall]):
    type, call_type, has_attempts, has_bodies = StepType.DO, BodyCall, True, True

    def identify(self, call: BodyCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        del settings
        fn = describe_step(call.fn)
        for config in (fn.config, call.config):
            policy = policy if config is None else policy.override_with(config)
        name = fn.name if call.name is None else call.name
        if name is None:
            raise DefinitionInvalid("A lambda has no name of its own: step.do('name', lambda: ...).")
        return CallIdentity(name, CallFingerprint.of(call), policy, fn)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> Any:
        del context
        if execution.decoded:
            (result,), execution.decoded = execution.decoded, ()
            return result
        assert execution.fn is not None
        return decode_result(execution.name, execution.fn.result, row.result or "null")

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        del settings
        return compare_timeout(execution, row)

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        due: list[FunctionStep] = []
        counted: list[FunctionStep] = []
        limited: list[FunctionStep] = []
        for execution in executions:
            decision = context.replay_state.decide_do(
                context.replay_state.rows.get(execution.key),
                max_attempts=execution.policy.max_attempts,
                # The attempts of a limited step are counted when it takes its limits, before its body runs.
                is_only_open=other_steps is not OtherSteps.OPEN and not execution.policy.limits,
                now=context.now,
                may_repeat=execution.policy.may_repeat,
            )
            match decision:
                case RunAttempt(number, count_in_advance):
                    step = FunctionStep(context, execution, number, other_steps)
                    if execution.policy.limits:
                        limited.append(step)
                        continue
                    due.append(step)
                    if count_in_advance:
                        counted.append(step)
                case ReplayStep(row):
                    execution.finished_row = row
                case WaitUntil(until):
                    execution.wait = OpenWait(until)
                case AttemptsExhausted(attempts):
                    _fail_without_attempt(
                        context, execution, attempts, _build_exhausted_error(context, execution, attempts)
                    )
                case AttemptLost(attempt):
                    error = describe_unknown_end(f"the worker of attempt {attempt} died or lost its lease")
                    _fail_without_attempt(context, execution, attempt, error)
                case _:
                    assert_never(decision)
        if limited:
            due += _take_limits(context, limited, counted)
        elif counted:
            _count_in_advance(context, counted)
        if due:
            context.attempts.run(due)


@hot_dataclass(eq=False)
class CallFingerprint:
    """The work of a `step.do` call. Two calls with one name in one pass must have equal fingerprints."""

    code: Any
    captured_values: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, call: BodyCall) -> CallFingerprint:
        fn: Any = call.fn
        args, kwargs = call.args, call.kwargs
        while isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        cells = tuple(map(_read_cell, getattr(fn, "__closure__", None) or ()))
        # `lambda n=n: ...` in a loop, and a method of several objects, have the same code but do different work.
        bound_values = (
            getattr(fn, "__self__", None),
            getattr(fn, "__defaults__", None),
            getattr(fn, "__kwdefaults__", None),
        )
        return cls(getattr(fn, "__code__", fn), (cells, *bound_values), args, kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallFingerprint):
            return NotImplemented
        try:
            return bool(
                self.code == other.code
                and self.captured_values == other.captured_values
                and self.args == other.args
                and self.kwargs == other.kwargs
            )
        except Exception:  # noqa: BLE001  # arrays and similar types cannot be compared as a whole
            logger.warning("Arguments of a step cannot be compared with those of an earlier call: they count as others")
            return False  # one refused repetition is better than work that is silently left out

    __hash__ = None  # type: ignore[assignment]  # a fingerprint is compared, and never used as a key


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _take_limits(
    context: ExecutionContext, limited: Sequence[FunctionStep], counted: Sequence[FunctionStep]
) -> list[FunctionStep]:
    """Commit that limited steps take their limits or wait, and return those that run. ``counted``: as below."""
    commit_id = next(context.lease.commit_ids)
    calls = [step.build_limited_call(commit_id) for step in limited]
    rows_before = [(step.execution, context.replay_state.rows.get(step.key)) for step in (*limited, *counted)]
    writes = [step.build_count(commit_id) for step in counted]
    waits = commit_limited(context, calls, commit_id, writes=writes, shows_progress=False)
    context.counted_in_advance += rows_before
    for step, wait in zip(limited, waits, strict=True):
        step.execution.wait = wait
    return [step for step in limited if step.execution.wait is None]


def _count_in_advance(context: ExecutionContext, steps: Sequence[FunctionStep]) -> None:
    """Commit an attempt of each of these steps before the bodies run: a crash cannot be attributed to one of them."""
    commit_id = next(context.lease.commit_ids)
    writes = [step.build_count(commit_id) for step in steps]
    rows_before = [(step.execution, context.replay_state.rows.get(step.key)) for step in steps]
    context.commit(StepCommit(commit_id, writes))
    context.counted_in_advance += rows_before


def _fail_without_attempt(
    context: ExecutionContext, execution: StepExecution, attempts: int, error: tuple[str, str]
) -> None:
    write = context.build_write(execution, StepStatus.ERRORED, error=error, attempts=attempts)
    context.commit_step(execution, write)


def _build_exhausted_error(context: ExecutionContext, execution: StepExecution, attempts: int) -> tuple[str, str]:
    """The error of a step with no attempts left.

    If it is recorded, that attempt did not fail the step: a deploy has lowered the limit since. Otherwise the worker
    died.
    """
    row = context.replay_state.rows.get(execution.key)
    if row is not None and row.error_name is not None and row.attempts == attempts:
        return row.error_name, row.error_message or ""
    max_attempts = execution.policy.max_attempts
    text = f"{attempts} of {max_attempts} attempts are used up, and the worker of the last one died"
    return "StepMaxAttemptsExceeded", text


class FunctionStep:
    """A step of a workflow function whose body is due (`AttemptedStep`)."""

    type = StepType.DO

    def __init__(
        self, context: ExecutionContext, execution: StepExecution, number: int, other_steps: OtherSteps
    ) -> None:
        self._context, self.execution, self.number, self._other_steps = context, execution, number, other_steps
        self.name, self.key, self.timeout = execution.name, execution.key, execution.policy.timeout
        self.may_repeat = execution.policy.may_repeat
        self.ends_with_cancel = execution.policy.on_cancel == "abandon"
        self.is_async = execution.fn is not None and execution.fn.is_async

    def build_count(self, commit_id: str) -> StepWrite:
        """Build the row that counts the attempt before its body runs."""
        return self._context.build_write(
            self.execution, StepStatus.PENDING, attempts=self.number, commit_id=commit_id, keeps_limits=True
        )

    def build_limited_call(self, commit_id: str) -> LimitedCall:
        token = self._context.claim.token
        return LimitedCall.of_step(self._context, self.execution, self.build_count(commit_id), token=token)

    def build_attempt(self, session_lock: SessionLock | None) -> StepAttempt:
        context, execution = self._context, self.execution
        call, fn = execution.call, execution.fn
        assert isinstance(call, BodyCall)
        assert fn is not None
        attempt = StepAttempt(context.env, context.lease, execution.key, self.number, session_lock, step=self.name)
        body: Callable[[], Any] = functools.partial(call.fn, *call.args, **call.kwargs)
        if fn.wants_tx:
            tx = StepTx(
                name=self.name,
                attempt=self.number,
                idempotency_key=idempotency_key(context.ancestry, execution.key),
                buffer=attempt.buffer,
                open_transaction=attempt.open_transaction,
                limits=context.limits,
            )
            body = functools.partial(call.fn, tx, *call.args, **call.kwargs)
            if fn.orm and not fn.is_async:  # the thread of the event loop is in no transaction
                body = attempt.run_in_transaction(self.name, body)
        attempt.set_body(body, is_async=fn.is_async)
        return attempt

    def succeed(self, attempt: StepAttempt, value: Any) -> None:
        context, execution = self._context, self.execution
        assert execution.fn is not None
        codec = execution.fn.result
        try:
            result, decoded = codec.convert(value, what=f"Result of step {self.name!r}", limits=context.limits)
        except ValueRefused as exc:
            raise AttemptFailed(AttemptFailure.of(exc, is_final=True)) from exc
        except ValidationFailed as exc:
            invalid = StepResultInvalid(self.name, exc.problems)
            raise AttemptFailed(AttemptFailure.of(invalid, is_final=True)) from exc
        write = context.build_write(
            execution, StepStatus.COMPLETED, result=result, attempts=self.number, ran_for=attempt.duration
        )
        writes = [write] if context.race is None else [write, *context.build_race_writes(execution, write)]
        execution.decoded = (decoded,)
        context.commit(build_attempt_commit(write.commit_id, writes, attempt), execution, attempt)

    def fail(self, attempt: StepAttempt, failure: AttemptFailure) -> None:
        context, execution = self._context, self.execution
        max_attempts = execution.policy.max_attempts
        with context.lease.user_code():
            failure, retry_in = plan_retry(
                context.env,
                execution.policy,
                failure,
                attempt,
                is_last=max_attempts is not None and self.number >= max_attempts,
            )
        execution.cause, is_final = failure.error, retry_in is None
        write = context.build_write(
            execution,
            StepStatus.ERRORED if is_final else StepStatus.WAITING,
            attempts=self.number,
            error=values.sanitize_error(failure.name, failure.message),
            retry_in=retry_in,
            ran_for=attempt.duration,
        )
        writes = [write, *context.build_race_writes(execution, write)]
        failed = record_failure(context.env, context.run, failure, attempt)
        step_commit = StepCommit(write.commit_id, writes, list(attempt.logs), parts=[FailedAttempts([failed])])
        if is_final:
            commit = functools.partial(context.commit, execution=execution)
            commit_terminal_failure(context.env, self.name, attempt, step_commit, commit)
        elif self._other_steps is OtherSteps.NONE:
            step_commit.ending = build_suspension
            context.suspend_with(step_commit)
        else:
            context.commit(step_commit, execution)

    def cancel(self, attempt: StepAttempt, cancelled: Cancelled) -> None:
        logs, ran_for = list(attempt.logs), attempt.duration
        self._context.cancel([self.execution], cancelled, logs=logs, attempts=self.number, ran_for=ran_for)
