"""Attempts: running the bodies of steps, alone or concurrently, and recording the outcome of each."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, assert_never

from celery_durable import notify, values
from celery_durable.ancestry import Ancestry
from celery_durable.errors import DurableError, StepCommitConflict, StepResultInvalid, ValueRefused
from celery_durable.model import LogLevel, StepRow, StepStatus
from celery_durable.replay_state import AttemptsExhausted, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.execution import ExecutionContext
from celery_durable.runner.step_attempt import AttemptOutcome, Interrupted, Raised, Returned, StepAttempt, TimedOut
from celery_durable.runner.step_commit import BodyRerunRequired, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runner.step_execution import ProcessStopping, SessionLock, StepExecution, decode_result
from celery_durable.runtime import ConcurrentBody
from celery_durable.step import BodyCall, StepTx, TxBuffer, allow_to_end
from celery_durable.store.claims import OpenWait

_NAMESPACE = uuid.UUID("6f0f4b0a-6a65-5b5c-9d0e-3f3b6f6f2c11")
MAX_BODY_RERUNS = 3


def idempotency_key(ancestry: Ancestry, step: str, suffix: str = "") -> str:
    """The key by which external systems recognise a step: the same for all its attempts.

    ``suffix``: a suffix for a linear step whose handler is called several times.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{ancestry.identity(step)}/{step}{suffix}"))


class BodyRunner:
    """Runs the step bodies of a pass. Each outcome has its own commit."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context
        self._session_lock = SessionLock() if context.env.store.database.has_one_writer else None
        self._lost_attempts: list[tuple[StepExecution, StepAttempt, str]] = []
        """Bodies whose transaction was lost, with the reason."""

    def advance(self, executions: list[StepExecution], *, is_only_open: bool, may_suspend: bool) -> None:
        """Run the bodies that are due.

        ``is_only_open``: no other step is open. ``may_suspend``: a commit that starts a wait may suspend the instance.
        """
        runs: list[tuple[StepExecution, RunAttempt]] = []
        for execution in executions:
            decision = self._context.replay_state.decide_do(
                self._context.replay_state.row(execution.key),
                max_attempts=execution.policy.max_attempts,
                is_only_open=is_only_open,
                now=self._context.now,
            )
            match decision:
                case ReplayStep(row):
                    execution.row = row
                case WaitUntil(until):
                    execution.wait = OpenWait(until)
                case AttemptsExhausted(attempts):
                    error = self._build_exhausted_error(execution, attempts)
                    self._context.commit_step(
                        execution,
                        self._context.build_write(execution, StepStatus.ERRORED, error=error, attempts=attempts),
                    )
                case RunAttempt():
                    runs.append((execution, decision))
                case _:
                    assert_never(decision)
        if runs:
            self._run_attempts(runs, may_suspend=may_suspend)

    def _build_exhausted_error(self, execution: StepExecution, attempts: int) -> tuple[str, str]:
        """The error of a step with no attempts left: its recorded error, or that its last worker died.

        The recorded one is used if a deploy lowered the limit.
        """
        row = self._context.replay_state.row(execution.key)
        if row is not None and row.error_name is not None and row.attempts == attempts:
            return row.error_name, row.error_message or ""
        max_attempts = execution.policy.max_attempts
        text = f"{attempts} of {max_attempts} attempts are used up, and the last ended with its worker"
        return "StepMaxAttemptsExceeded", text

    def _run_attempts(self, runs: list[tuple[StepExecution, RunAttempt]], *, may_suspend: bool) -> None:
        # If several steps are open, a crash cannot be attributed to one of them. So their attempts are counted, in a
        # commit, before the bodies run.
        count_writes = [
            self._context.build_write(b, StepStatus.PENDING, attempts=run.attempt)
            for b, run in runs
            if run.count_in_advance
        ]
        if count_writes:
            committed = self._context.run_or_interrupt(
                lambda: self._context.committer.commit(StepCommit(count_writes, self._context.drain_logs()))
            )
            self._context.apply(committed)
            self._context.counted_in_advance += [execution for execution, run in runs if run.count_in_advance]
        remaining = [(execution, run.attempt) for execution, run in runs]
        for rerun in range(MAX_BODY_RERUNS + 1):
            self._lost_attempts.clear()
            self._context.run_or_interrupt(lambda: self._context.lease.ensure_held(self._context.env.store))
            if rerun == 0:
                for execution, attempt in remaining:
                    notify.attempt_started(self._context.lease.claim, execution.name, attempt)
            self._run_once(
                [(execution, self._build_attempt(execution, attempt)) for execution, attempt in remaining],
                may_suspend=may_suspend,
            )
            remaining = [(execution, body.attempt) for execution, body, _ in self._lost_attempts]
            if not remaining:
                return
        for execution, body, why in self._lost_attempts:
            text = f"the step's transaction was lost {MAX_BODY_RERUNS + 1} times, at last by: {why}"
            self._fail(execution, body, ("StepTransactionLost", text), may_suspend=may_suspend)

    def _run_once(self, attempts: list[tuple[StepExecution, StepAttempt]], *, may_suspend: bool) -> None:
        """Run these bodies concurrently. Bodies whose transaction was lost are noted, and run again."""
        self._context.env.runtime.checkpoint("before-body")
        if len(attempts) == 1 and (self._context.env.runtime.can_interrupt() or attempts[0][0].policy.timeout is None):
            execution, body = attempts[0]
            self._finish(execution, body, body.run_timed(execution.policy.timeout), may_suspend=may_suspend)
            return
        session_lock = self._session_lock
        jobs = [
            self._build_concurrent_body(execution, body, session_lock, may_suspend=may_suspend)
            for execution, body in attempts
        ]
        try:
            self._context.env.runtime.run_concurrently(jobs)
            if session_lock is not None:
                session_lock.run_deferred()
        except BaseException:
            for _, body in attempts:
                body.abandon()
            raise

    def _build_concurrent_body(
        self, execution: StepExecution, body: StepAttempt, session_lock: SessionLock | None, *, may_suspend: bool
    ) -> ConcurrentBody:
        def on_done(outcome: AttemptOutcome | None) -> None:
            def finish() -> None:
                self._finish(execution, body, outcome, may_suspend=may_suspend)

            if session_lock is None:
                finish()
            else:
                session_lock.run_or_defer(body.buffer, finish)

        timeout = execution.policy.timeout
        return ConcurrentBody(body.run, on_done, None if timeout is None else timeout.total_seconds())

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
                open_session=lambda: self._open_session(body),
                limits=self._context.env.settings.limits,
            )
        args = call.args if tx is None else (tx, *call.args)

        def run() -> Any:
            return self._context.env.runtime.attempt(
                lambda: call.fn(*args, **call.kwargs),
                workflow=ref.workflow,
                instance_id=ref.instance_id,
                step=execution.name,
                number=attempt,
            )

        body = StepAttempt(
            step_key=execution.key,
            attempt=attempt,
            call=notify.around_body(run, self._context.lease.claim, step=execution.name, attempt=attempt),
            buffer=buffer,
            close_session=self._close_session,
            abandon_session=self._abandon_session,
            stops_process=self._context.env.stops_process,
            monotonic=self._context.env.runtime.monotonic,
            lease=self._context.lease,
        )
        return body

    def _open_session(self, body: StepAttempt) -> Any:
        session_lock = self._session_lock
        if session_lock is not None:
            session_lock.acquire(body.buffer)
        try:
            body.buffer.session = self._context.env.store.open_session()
            body.check_not_abandoned()
        except BaseException:
            if session_lock is not None:
                session_lock.release(body.buffer)
            raise
        return body.buffer.session

    def _abandon_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._context.env.store.abandon_session(buffer.session)

    def _close_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._context.env.store.close_session(buffer.session)
            allow_to_end(buffer.session)  # a shared factory may hand the same one to the application
            if self._session_lock is not None:
                self._session_lock.release(buffer)

    def _finish(
        self, execution: StepExecution, body: StepAttempt, outcome: AttemptOutcome | None, *, may_suspend: bool
    ) -> None:
        """Record the outcome of an attempt. If its transaction was lost, note that it has to run again."""
        try:
            self._record(execution, body, outcome, may_suspend=may_suspend)
        except BodyRerunRequired as exc:
            self._close_session(body.buffer)
            self._context.add_log(
                LogLevel.WARNING, f"The transaction of step {execution.name!r} was lost: {exc}", "system"
            )
            self._lost_attempts.append((execution, body, str(exc)))
        except BaseException:
            body.abandon()
            raise

    def _record(
        self, execution: StepExecution, body: StepAttempt, outcome: AttemptOutcome | None, *, may_suspend: bool
    ) -> None:
        self._context.env.runtime.checkpoint("after-body")
        match outcome:
            case Interrupted(error):
                body.abandon()
                raise self._context.interrupt(ProcessStopping(error))
            case TimedOut() | None:
                body.abandon()
                text = f"attempt {body.attempt} took longer than {execution.policy.timeout}"
                self._fail(execution, body, ("StepTimeout", text), may_suspend=may_suspend)
            case Raised(error):
                if body.buffer.session is not None and self._context.env.store.is_transient(error):
                    raise BodyRerunRequired(values.get_error_text(error)) from error
                self._close_session(body.buffer)
                self._fail_with_error(
                    execution, body, self._convert_to_step_error(execution, body, error), may_suspend=may_suspend
                )
            case Returned(value):
                try:
                    self._succeed(execution, body, value)
                except StepEffectFailed as exc:
                    self._close_session(body.buffer)
                    # An internal error says that the target does not exist or has ended: a retry would fail again.
                    self._fail_with_error(
                        execution,
                        body,
                        exc.error,
                        is_non_retryable=isinstance(exc.error, DurableError),
                        may_suspend=may_suspend,
                    )

    def _convert_to_step_error(
        self, execution: StepExecution, body: StepAttempt, error: BaseException
    ) -> BaseException:
        if body.buffer.session is not None and self._context.env.store.is_unique_violation(error):
            return StepCommitConflict(execution.name, values.sanitize_text(values.get_error_text(error), 500))
        return error

    def _succeed(self, execution: StepExecution, body: StepAttempt, value: Any) -> None:
        assert execution.fn is not None
        buffer = body.buffer
        try:
            what = f"Result of step {execution.name!r}"
            result = execution.fn.result.encode(value, what=what, limits=self._context.env.settings.limits)
            decode_result(execution.name, execution.fn.result, result)
        except (ValueRefused, StepResultInvalid) as exc:
            raise StepEffectFailed(exc) from exc
        write = self._context.build_write(
            execution, StepStatus.COMPLETED, result=result, attempts=body.attempt, ran_for=body.duration
        )
        saved_logs = list(self._context.logs)
        step_commit = StepCommit(
            [write, *self._context.build_race_writes(execution, write.commit_id)],
            self._context.drain_logs(body),
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
            self._context.logs[:0] = saved_logs  # the next commit writes the function's log lines instead
            raise
        self._close_session(buffer)
        self._context.apply_to(execution, committed)

    def _fail_with_error(
        self,
        execution: StepExecution,
        body: StepAttempt,
        error: BaseException,
        *,
        is_non_retryable: bool = False,
        may_suspend: bool,
    ) -> None:
        is_non_retryable = is_non_retryable or values.forbids_retry(error)
        self._fail(
            execution,
            body,
            values.describe_error(error),
            error,
            is_non_retryable=is_non_retryable,
            may_suspend=may_suspend,
        )

    def _fail(
        self,
        execution: StepExecution,
        body: StepAttempt,
        error_text: tuple[str, str],
        error: BaseException | None = None,
        *,
        is_non_retryable: bool = False,
        may_suspend: bool,
    ) -> None:
        """Record a failed attempt: as the step's failure, or with the time of the next attempt."""
        policy = execution.policy
        is_non_retryable = is_non_retryable or (policy.max_attempts is not None and body.attempt >= policy.max_attempts)
        write = self._context.build_write(
            execution,
            StepStatus.ERRORED if is_non_retryable else StepStatus.WAITING,
            attempts=body.attempt,
            error=values.sanitize_error(*error_text),
            retry_in=None if is_non_retryable else self._get_retry_delay(execution, body.attempt),
            ran_for=body.duration,
        )
        execution.cause = error
        step_commit = StepCommit(
            [write, *(self._context.build_race_writes(execution, write.commit_id) if is_non_retryable else ())],
            self._context.drain_logs(body),
            user_writes=body.buffer.on_terminal_error if is_non_retryable else (),
            waits_after_commit=_retry_waits if may_suspend and not is_non_retryable else None,
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
