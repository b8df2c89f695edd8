"""Running the bodies of steps, one or several concurrently, and committing the outcome of each attempt."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, assert_never

from celery_durable import notify, values
from celery_durable.ancestry import Ancestry
from celery_durable.errors import DurableError, StepCommitConflict, StepResultInvalid, ValueRefused
from celery_durable.model import LogLevel, OpenWait, StepRow, StepStatus
from celery_durable.replay_state import AttemptsExhausted, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.step_attempt import AttemptOutcome, PassOver, Raised, Returned, StepAttempt, TimedOut
from celery_durable.runner.step_commit import BodyRerunRequired, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runner.step_execution import PassInterrupted, SessionLock, StepExecution, decode_result
from celery_durable.runtime import ConcurrentBody
from celery_durable.step import BodyCall, StepTx, TxBuffer, restore_transaction_control

_NAMESPACE = uuid.UUID("6f0f4b0a-6a65-5b5c-9d0e-3f3b6f6f2c11")
MAX_BODY_RERUNS = 3
"""How often a body runs again within one attempt, after the database lost its transaction."""


def idempotency_key(ancestry: Ancestry, step: str, suffix: str = "") -> str:
    """Build the key by which external systems recognise a step: the same for all its attempts.

    ``suffix``: distinguishes the commits of a linear step whose handler is called several times.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{ancestry.origin_run(step)}/{step}{suffix}"))


class BodyRunner:
    """Runs the step bodies of a pass. Each outcome has its own commit."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context
        self._session_lock = SessionLock() if context.env.store.database.has_one_writer else None
        self._lost_attempts: list[tuple[StepExecution, StepAttempt, str]] = []
        """The attempts whose transaction the database lost, each with the reason. Their bodies run again."""

    def advance(self, executions: list[StepExecution], *, is_only_open: bool, may_suspend: bool) -> None:
        """Run the bodies that are due.

        ``is_only_open``: no other step is open. ``may_suspend``: the pass waits for nothing else, so
        the commit of a failed attempt may also suspend the instance until the retry.
        """
        due_attempts: list[tuple[StepExecution, RunAttempt]] = []
        for execution in executions:
            decision = self._context.replay_state.decide_do(
                self._context.replay_state.row(execution.key),
                max_attempts=execution.policy.max_attempts,
                is_only_open=is_only_open,
                now=self._context.now,
            )
            match decision:
                case ReplayStep(row):
                    execution.finished_row = row
                case WaitUntil(until):
                    execution.wait = OpenWait(until)
                case AttemptsExhausted(attempts):
                    error = self._build_exhausted_error(execution, attempts)
                    self._context.commit_step(
                        execution,
                        self._context.build_write(execution, StepStatus.ERRORED, error=error, attempts=attempts),
                    )
                case RunAttempt():
                    due_attempts.append((execution, decision))
                case _:
                    assert_never(decision)
        if due_attempts:
            self._run_attempts(due_attempts, may_suspend=may_suspend)

    def _build_exhausted_error(self, execution: StepExecution, attempts: int) -> tuple[str, str]:
        """The error of a step with no attempts left.

        If the last attempt failed, this is its recorded error. That attempt did not fail the step, so a deploy has
        lowered the limit since. Otherwise the worker of the last attempt died.
        """
        row = self._context.replay_state.row(execution.key)
        if row is not None and row.error_name is not None and row.attempts == attempts:
            return row.error_name, row.error_message or ""
        max_attempts = execution.policy.max_attempts
        text = f"{attempts} of {max_attempts} attempts are used up, and the worker of the last one died"
        return "StepMaxAttemptsExceeded", text

    def _run_attempts(self, due_attempts: list[tuple[StepExecution, RunAttempt]], *, may_suspend: bool) -> None:
        # With several open steps, a crash cannot be attributed to one of them. So a commit counts an attempt of each
        # before the bodies run.
        count_writes = [
            self._context.build_write(execution, StepStatus.PENDING, attempts=decision.attempt)
            for execution, decision in due_attempts
            if decision.count_in_advance
        ]
        if count_writes:
            committed = self._context.run_or_interrupt(
                lambda: self._context.committer.commit(StepCommit(count_writes, self._context.drain_logs()))
            )
            self._context.apply(committed)
            self._context.counted_in_advance += [
                execution for execution, decision in due_attempts if decision.count_in_advance
            ]
        remaining = [(execution, decision.attempt) for execution, decision in due_attempts]
        for rerun in range(MAX_BODY_RERUNS + 1):
            self._lost_attempts.clear()
            self._context.run_or_interrupt(lambda: self._context.lease.ensure_held(self._context.env.store))
            if rerun == 0:
                for execution, attempt in remaining:
                    notify.send_attempt_started(self._context.lease.claim, execution.name, attempt)
            self._run_once(
                [(execution, self._build_attempt(execution, attempt)) for execution, attempt in remaining],
                may_suspend=may_suspend,
            )
            remaining = [(execution, step_attempt.number) for execution, step_attempt, _ in self._lost_attempts]
            if not remaining:
                return
        for execution, step_attempt, why in self._lost_attempts:
            text = f"the step's transaction was lost {MAX_BODY_RERUNS + 1} times, at last by: {why}"
            self._fail(execution, step_attempt, ("StepTransactionLost", text), may_suspend=may_suspend)

    def _run_once(self, attempts: list[tuple[StepExecution, StepAttempt]], *, may_suspend: bool) -> None:
        """Run these bodies concurrently. Those whose transaction was lost are added to ``_lost_attempts``."""
        self._context.env.runtime.checkpoint("before-body")
        if len(attempts) == 1 and (self._context.env.runtime.can_interrupt() or attempts[0][0].policy.timeout is None):
            execution, step_attempt = attempts[0]
            self._finish(
                execution, step_attempt, step_attempt.run_timed(execution.policy.timeout), may_suspend=may_suspend
            )
            return
        session_lock = self._session_lock
        jobs = [
            self._build_concurrent_body(execution, step_attempt, session_lock, may_suspend=may_suspend)
            for execution, step_attempt in attempts
        ]
        try:
            self._context.env.runtime.run_concurrently(jobs)
            if session_lock is not None:
                session_lock.run_deferred()
        except BaseException:
            for _, step_attempt in attempts:
                step_attempt.abandon()
            raise

    def _build_concurrent_body(
        self,
        execution: StepExecution,
        step_attempt: StepAttempt,
        session_lock: SessionLock | None,
        *,
        may_suspend: bool,
    ) -> ConcurrentBody:
        def on_done(outcome: AttemptOutcome | None) -> None:
            def finish() -> None:
                self._finish(execution, step_attempt, outcome, may_suspend=may_suspend)

            if session_lock is None:
                finish()
            else:
                session_lock.run_or_defer(step_attempt.buffer, finish)

        timeout = execution.policy.timeout
        return ConcurrentBody(step_attempt.run, on_done, None if timeout is None else timeout.total_seconds())

    def _build_attempt(self, execution: StepExecution, attempt: int) -> StepAttempt:
        call, fn = execution.call, execution.fn
        assert isinstance(call, BodyCall)
        assert fn is not None
        buffer = TxBuffer()
        ref = self._context.lease.claim.ref
        tx = None
        if fn.wants_tx:
            tx = StepTx(
                name=execution.name,
                attempt=attempt,
                idempotency_key=idempotency_key(self._context.ancestry, execution.key),
                buffer=buffer,
                open_session=lambda: self._open_session(step_attempt),
                limits=self._context.env.settings.limits,
            )
        args = call.args if tx is None else (tx, *call.args)

        def run() -> Any:
            return self._context.env.runtime.run_attempt(
                lambda: call.fn(*args, **call.kwargs),
                workflow=ref.workflow,
                instance_id=ref.instance_id,
                step=execution.name,
                number=attempt,
            )

        step_attempt = StepAttempt(
            step_key=execution.key,
            number=attempt,
            call=notify.wrap_body(run, self._context.lease.claim, step=execution.name, attempt=attempt),
            buffer=buffer,
            close_session=self._close_session,
            abandon_session=self._abandon_session,
            stops_process=self._context.env.stops_process,
            monotonic=self._context.env.runtime.monotonic,
            lease=self._context.lease,
        )
        return step_attempt

    def _open_session(self, step_attempt: StepAttempt) -> Any:
        session_lock = self._session_lock
        if session_lock is not None:
            session_lock.acquire(step_attempt.buffer)
        try:
            step_attempt.buffer.session = self._context.env.store.open_session()
            step_attempt.check_not_abandoned()
        except BaseException:
            if session_lock is not None:
                session_lock.release(step_attempt.buffer)
            raise
        return step_attempt.buffer.session

    def _abandon_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._context.env.store.abandon_session(buffer.session)

    def _close_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._context.env.store.close_session(buffer.session)
            restore_transaction_control(
                buffer.session
            )  # a shared session factory may return the same session to the application
            if self._session_lock is not None:
                self._session_lock.release(buffer)

    def _finish(
        self, execution: StepExecution, step_attempt: StepAttempt, outcome: AttemptOutcome | None, *, may_suspend: bool
    ) -> None:
        """Record the outcome of an attempt. If its transaction was lost, add it to ``_lost_attempts``."""
        try:
            self._record(execution, step_attempt, outcome, may_suspend=may_suspend)
        except BodyRerunRequired as exc:
            self._close_session(step_attempt.buffer)
            self._context.add_log(
                LogLevel.WARNING, f"The transaction of step {execution.name!r} was lost: {exc}", "system"
            )
            self._lost_attempts.append((execution, step_attempt, str(exc)))
        except BaseException:
            step_attempt.abandon()
            raise

    def _record(
        self, execution: StepExecution, step_attempt: StepAttempt, outcome: AttemptOutcome | None, *, may_suspend: bool
    ) -> None:
        self._context.env.runtime.checkpoint("after-body")
        match outcome:
            case PassOver(error):
                step_attempt.abandon()
                raise self._context.interrupt(PassInterrupted(error))
            case TimedOut() | None:
                step_attempt.abandon()
                text = f"attempt {step_attempt.number} took longer than {execution.policy.timeout}"
                self._fail(execution, step_attempt, ("StepTimeout", text), may_suspend=may_suspend)
            case Raised(error):
                if step_attempt.buffer.session is not None and self._context.env.store.is_transient(error):
                    raise BodyRerunRequired(values.get_error_text(error)) from error
                self._close_session(step_attempt.buffer)
                self._fail_with_error(
                    execution,
                    step_attempt,
                    self._convert_to_step_error(execution, step_attempt, error),
                    may_suspend=may_suspend,
                )
            case Returned(value):
                try:
                    self._succeed(execution, step_attempt, value)
                except StepEffectFailed as exc:
                    self._close_session(step_attempt.buffer)
                    # A DurableError says that the target does not exist or has ended: a retry would fail again.
                    self._fail_with_error(
                        execution,
                        step_attempt,
                        exc.error,
                        is_non_retryable=isinstance(exc.error, DurableError),
                        may_suspend=may_suspend,
                    )

    def _convert_to_step_error(
        self, execution: StepExecution, step_attempt: StepAttempt, error: BaseException
    ) -> BaseException:
        if step_attempt.buffer.session is not None and self._context.env.store.is_unique_violation(error):
            return StepCommitConflict(execution.name, values.sanitize_text(values.get_error_text(error), 500))
        return error

    def _succeed(self, execution: StepExecution, step_attempt: StepAttempt, value: Any) -> None:
        assert execution.fn is not None
        buffer = step_attempt.buffer
        try:
            what = f"Result of step {execution.name!r}"
            result = execution.fn.result.encode(value, what=what, limits=self._context.env.settings.limits)
            decode_result(execution.name, execution.fn.result, result)
        except (ValueRefused, StepResultInvalid) as exc:
            raise StepEffectFailed(exc) from exc
        write = self._context.build_write(
            execution, StepStatus.COMPLETED, result=result, attempts=step_attempt.number, ran_for=step_attempt.duration
        )
        saved_logs = list(self._context.logs)
        step_commit = StepCommit(
            [write, *self._context.build_race_writes(execution, write.commit_id)],
            self._context.drain_logs(step_attempt),
            user_writes=buffer.user_writes,
            instances=buffer.instances,
            events=buffer.events,
            emissions=buffer.emissions,
            messages=buffer.messages,
            labels=buffer.labels,
        )
        try:
            committed = self._context.run_or_interrupt(
                lambda: self._context.committer.commit(step_commit, session=buffer.session)
            )
        except (StepEffectFailed, BodyRerunRequired):
            self._context.logs[:0] = saved_logs  # nothing was committed: the next commit writes them
            raise
        self._close_session(buffer)
        self._context.apply_to(execution, committed)

    def _fail_with_error(
        self,
        execution: StepExecution,
        step_attempt: StepAttempt,
        error: BaseException,
        *,
        is_non_retryable: bool = False,
        may_suspend: bool,
    ) -> None:
        is_non_retryable = is_non_retryable or values.forbids_retry(error)
        self._fail(
            execution,
            step_attempt,
            values.describe_error(error),
            error,
            is_non_retryable=is_non_retryable,
            may_suspend=may_suspend,
        )

    def _fail(
        self,
        execution: StepExecution,
        step_attempt: StepAttempt,
        error_text: tuple[str, str],
        error: BaseException | None = None,
        *,
        is_non_retryable: bool = False,
        may_suspend: bool,
    ) -> None:
        """Record a failed attempt: fail the step, or record the time of its next attempt."""
        policy = execution.policy
        is_used_up = policy.max_attempts is not None and step_attempt.number >= policy.max_attempts
        is_final = is_non_retryable or is_used_up
        write = self._context.build_write(
            execution,
            StepStatus.ERRORED if is_final else StepStatus.WAITING,
            attempts=step_attempt.number,
            error=values.sanitize_error(*error_text),
            retry_in=None if is_final else self._get_retry_delay(execution, step_attempt.number),
            ran_for=step_attempt.duration,
        )
        execution.cause = error
        step_commit = StepCommit(
            [write, *(self._context.build_race_writes(execution, write.commit_id) if is_final else ())],
            self._context.drain_logs(step_attempt),
            user_writes=step_attempt.buffer.on_terminal_error if is_final else (),
            waits_after_commit=_retry_waits if may_suspend and not is_final else None,
        )
        if step_commit.waits_after_commit is not None:
            self._context.defer_suspension(step_commit)
            return
        try:
            committed = self._context.run_or_interrupt(lambda: self._context.committer.commit(step_commit))
        except StepEffectFailed as exc:
            # `on_terminal_error` itself failed: record the step's failure anyway, and log this error.
            self._context.add_log(
                LogLevel.ERROR, f"on_terminal_error of step {execution.name!r} failed: {exc.error!r}", "system"
            )
            step_commit.user_writes, step_commit.logs = (), [*step_commit.logs, *self._context.drain_logs()]
            committed = self._context.run_or_interrupt(lambda: self._context.committer.commit(step_commit))
        self._context.apply_to(execution, committed)

    def _get_retry_delay(self, execution: StepExecution, attempt: int) -> timedelta:
        """How long to wait after a failed attempt."""
        delay, workflow = execution.policy.delay_after(attempt), self._context.lease.claim.ref.workflow
        return self._context.env.runtime.wait_duration(delay, purpose="retry", workflow=workflow, step=execution.name)


def _retry_waits(rows: list[StepRow]) -> list[OpenWait]:
    return [OpenWait(row.next_retry_at) for row in rows if row.next_retry_at is not None]
