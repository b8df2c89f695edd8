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
from celery_durable.runner.branches import ProcessStopping, SessionLock, StepExecution, decode_result
from celery_durable.runner.execution import ExecutionContext
from celery_durable.runner.step_attempt import Interrupted, Outcome, Raised, Returned, StepAttempt, TimedOut
from celery_durable.runner.step_commit import BodyRerunRequired, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runtime import ConcurrentBody
from celery_durable.step import BodyCall, StepTx, TxBuffer, allow_to_end
from celery_durable.store.claims import OpenWait

_NAMESPACE = uuid.UUID("6f0f4b0a-6a65-5b5c-9d0e-3f3b6f6f2c11")
SESSION_RERUNS = 3


def idempotency_key(ancestry: Ancestry, step: str, turn: str = "") -> str:
    """The key by which external systems recognise a step: the same for all its attempts.

    ``turn``: a suffix for a linear step whose handler is called several times.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{ancestry.identity(step)}/{step}{turn}"))


class BodyRunner:
    """Runs the step bodies of a pass. Each outcome has its own commit."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context
        self._sessions = SessionLock() if context.env.store.database.has_one_writer else None
        self._lost: list[tuple[StepExecution, StepAttempt, str]] = []
        """Bodies whose transaction was lost, with the reason."""

    def advance(self, branches: list[StepExecution], *, alone: bool, sole: bool) -> None:
        """Run the bodies that are due. ``alone``: no other step is open. ``sole``: nothing else is waited for."""
        runs: list[tuple[StepExecution, RunAttempt]] = []
        for branch in branches:
            verdict = self._context.replay_state.decide_do(
                self._context.replay_state.row(branch.key),
                max_attempts=branch.policy.max_attempts,
                alone=alone,
                now=self._context.now,
            )
            match verdict:
                case ReplayStep(row):
                    branch.row = row
                case WaitUntil(until):
                    branch.wait = OpenWait(until)
                case AttemptsExhausted(attempts):
                    error = self._exhausted(branch, attempts)
                    self._context.commit_step(
                        branch, self._context.build_write(branch, StepStatus.ERRORED, error=error, attempts=attempts)
                    )
                case RunAttempt():
                    runs.append((branch, verdict))
                case _:
                    assert_never(verdict)
        if runs:
            self._run(runs, sole=sole)

    def _exhausted(self, branch: StepExecution, attempts: int) -> tuple[str, str]:
        """The error of a step with no attempts left: its recorded error, or that its last worker died.

        The recorded one is used if a deploy lowered the limit.
        """
        row = self._context.replay_state.row(branch.key)
        if row is not None and row.error_name is not None and row.attempts == attempts:
            return row.error_name, row.error_message or ""
        most = branch.policy.max_attempts
        text = f"{attempts} of {most} attempts are used up, and the last ended with its worker"
        return "StepMaxAttemptsExceeded", text

    def _run(self, runs: list[tuple[StepExecution, RunAttempt]], *, sole: bool) -> None:
        # If several steps are open, a crash cannot be attributed to one of them. So their attempts are counted, in a
        # commit, before the bodies run.
        precounted = [
            self._context.build_write(b, StepStatus.PENDING, attempts=run.attempt) for b, run in runs if run.precount
        ]
        if precounted:
            committed = self._context.or_interrupt(
                lambda: self._context.committer.commit(StepCommit(precounted, self._context.drain_logs()))
            )
            self._context.apply(committed)
            self._context.precounted += [branch for branch, run in runs if run.precount]
        todo = [(branch, run.attempt) for branch, run in runs]
        for nth in range(SESSION_RERUNS + 1):
            self._lost.clear()
            self._context.or_interrupt(lambda: self._context.lease.check(self._context.env.store))
            if nth == 0:
                for branch, attempt in todo:
                    notify.attempt_started(self._context.lease.claim, branch.name, attempt)
            self._run_once([(branch, self._body(branch, attempt)) for branch, attempt in todo], sole=sole)
            todo = [(branch, body.attempt) for branch, body, _ in self._lost]
            if not todo:
                return
        for branch, body, why in self._lost:
            text = f"the step's transaction was lost {SESSION_RERUNS + 1} times, at last by: {why}"
            self._fail(branch, body, ("StepTransactionLost", text), sole=sole)

    def _run_once(self, made: list[tuple[StepExecution, StepAttempt]], *, sole: bool) -> None:
        """Run these bodies concurrently. Bodies whose transaction was lost are noted, and run again."""
        self._context.env.runtime.checkpoint("before-body")
        if len(made) == 1 and (self._context.env.runtime.can_interrupt() or made[0][0].policy.timeout is None):
            branch, body = made[0]
            self._finish(branch, body, body.run_timed(branch.policy.timeout), sole=sole)
            return
        session_lock = self._sessions
        jobs = [self._job(branch, body, session_lock, sole=sole) for branch, body in made]
        try:
            self._context.env.runtime.run_concurrently(jobs)
            if session_lock is not None:
                session_lock.run_deferred()
        except BaseException:
            for _, body in made:
                body.abandon()
            raise

    def _job(
        self, branch: StepExecution, body: StepAttempt, session_lock: SessionLock | None, *, sole: bool
    ) -> ConcurrentBody:
        def on_done(outcome: Outcome | None) -> None:
            def finish() -> None:
                self._finish(branch, body, outcome, sole=sole)

            if session_lock is None:
                finish()
            else:
                session_lock.run_or_defer(body.buffer, finish)

        timeout = branch.policy.timeout
        return ConcurrentBody(body.run, on_done, None if timeout is None else timeout.total_seconds())

    def _body(self, branch: StepExecution, attempt: int) -> StepAttempt:
        call, fn = branch.call, branch.fn
        assert isinstance(call, BodyCall)
        assert fn is not None
        buffer = TxBuffer()
        ref = self._context.lease.claim.ref
        tx = None
        if fn.wants_tx:
            tx = StepTx(
                name=branch.name,
                attempt=attempt,
                idempotency_key=idempotency_key(self._context.ancestry, branch.key),
                buffer=buffer,
                open_session=lambda: self._open_session(body),
                limits=self._context.env.settings.limits,
            )
        given = call.args if tx is None else (tx, *call.args)

        def run() -> Any:
            return self._context.env.runtime.attempt(
                lambda: call.fn(*given, **call.kwargs),
                workflow=ref.workflow,
                instance_id=ref.instance_id,
                step=branch.name,
                number=attempt,
            )

        body = StepAttempt(
            step_key=branch.key,
            attempt=attempt,
            call=notify.around_body(run, self._context.lease.claim, step=branch.name, attempt=attempt),
            buffer=buffer,
            close_session=self._close_session,
            abandon_session=self._abandon_session,
            is_from_outside=self._context.env.is_from_outside,
            monotonic=self._context.env.runtime.monotonic,
            lease=self._context.lease,
        )
        return body

    def _open_session(self, body: StepAttempt) -> Any:
        session_lock = self._sessions
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
            if self._sessions is not None:
                self._sessions.release(buffer)

    def _finish(self, branch: StepExecution, body: StepAttempt, outcome: Outcome | None, *, sole: bool) -> None:
        """Record the outcome of an attempt. If its transaction was lost, note that it has to run again."""
        try:
            self._record(branch, body, outcome, sole=sole)
        except BodyRerunRequired as exc:
            self._close_session(body.buffer)
            self._context.add_log(
                LogLevel.WARNING, f"The transaction of step {branch.name!r} was lost: {exc}", "system"
            )
            self._lost.append((branch, body, str(exc)))
        except BaseException:
            body.abandon()
            raise

    def _record(self, branch: StepExecution, body: StepAttempt, outcome: Outcome | None, *, sole: bool) -> None:
        self._context.env.runtime.checkpoint("after-body")
        match outcome:
            case Interrupted(error):
                body.abandon()
                raise self._context.interrupt(ProcessStopping(error))
            case TimedOut() | None:
                body.abandon()
                text = f"attempt {body.attempt} took longer than {branch.policy.timeout}"
                self._fail(branch, body, ("StepTimeout", text), sole=sole)
            case Raised(error):
                if body.buffer.session is not None and self._context.env.store.is_transient(error):
                    raise BodyRerunRequired(values.text_of(error)) from error
                self._close_session(body.buffer)
                self._fail_with(branch, body, self._as_step_error(branch, body, error), sole=sole)
            case Returned(value):
                try:
                    self._succeed(branch, body, value)
                except StepEffectFailed as exc:
                    self._close_session(body.buffer)
                    # An internal error says that the target does not exist or has ended: a retry would fail again.
                    self._fail_with(
                        branch, body, exc.error, is_non_retryable=isinstance(exc.error, DurableError), sole=sole
                    )

    def _as_step_error(self, branch: StepExecution, body: StepAttempt, error: BaseException) -> BaseException:
        if body.buffer.session is not None and self._context.env.store.is_unique_violation(error):
            return StepCommitConflict(branch.name, values.storable(values.text_of(error), 500))
        return error

    def _succeed(self, branch: StepExecution, body: StepAttempt, value: Any) -> None:
        assert branch.fn is not None
        buffer = body.buffer
        try:
            what = f"Result of step {branch.name!r}"
            result = branch.fn.result.encode(value, what=what, limits=self._context.env.settings.limits)
            decode_result(branch.name, branch.fn.result, result)
        except (ValueRefused, StepResultInvalid) as exc:
            raise StepEffectFailed(exc) from exc
        write = self._context.build_write(
            branch, StepStatus.COMPLETED, result=result, attempts=body.attempt, ran_for=body.duration
        )
        said = list(self._context.logs)
        step_commit = StepCommit(
            [write, *self._context.race_writes(branch, write.commit_id)],
            self._context.drain_logs(body),
            user_writes=buffer.user_writes,
            instances=buffer.instances,
            events=buffer.events,
            emissions=buffer.emissions,
            messages=buffer.messages,
            labels=buffer.labels,
        )
        try:
            committed = self._context.or_interrupt(
                lambda: self._context.committer.commit(step_commit, session=buffer.session)
            )
        except (StepEffectFailed, BodyRerunRequired):
            self._context.logs[:0] = said  # the next commit writes the function's log lines instead
            raise
        self._close_session(buffer)
        self._context.apply_to(branch, committed)

    def _fail_with(
        self,
        branch: StepExecution,
        body: StepAttempt,
        error: BaseException,
        *,
        is_non_retryable: bool = False,
        sole: bool,
    ) -> None:
        is_non_retryable = is_non_retryable or values.forbids_retry(error)
        self._fail(branch, body, values.described(error), error, is_non_retryable=is_non_retryable, sole=sole)

    def _fail(
        self,
        branch: StepExecution,
        body: StepAttempt,
        described: tuple[str, str],
        error: BaseException | None = None,
        *,
        is_non_retryable: bool = False,
        sole: bool,
    ) -> None:
        """Record a failed attempt: as the step's failure, or with the time of the next attempt."""
        policy = branch.policy
        is_non_retryable = is_non_retryable or (policy.max_attempts is not None and body.attempt >= policy.max_attempts)
        write = self._context.build_write(
            branch,
            StepStatus.ERRORED if is_non_retryable else StepStatus.WAITING,
            attempts=body.attempt,
            error=values.storable_error(*described),
            retry_in=None if is_non_retryable else self._pause(branch, body.attempt),
            ran_for=body.duration,
        )
        branch.cause = error
        step_commit = StepCommit(
            [write, *(self._context.race_writes(branch, write.commit_id) if is_non_retryable else ())],
            self._context.drain_logs(body),
            user_writes=body.buffer.on_terminal_error if is_non_retryable else (),
            sleep=_retry_waits if sole and not is_non_retryable else None,
        )
        if step_commit.sleep is not None:
            self._context.defer_commit(step_commit)
            return
        try:
            committed = self._context.or_interrupt(lambda: self._context.committer.commit(step_commit))
        except StepEffectFailed as exc:
            # `on_terminal_error` itself failed: record the step's failure anyway, and log this error.
            self._context.add_log(
                LogLevel.ERROR, f"on_terminal_error of step {branch.name!r} failed: {exc.error!r}", "system"
            )
            step_commit.user_writes, step_commit.logs = (), [*step_commit.logs, *self._context.drain_logs()]
            committed = self._context.or_interrupt(lambda: self._context.committer.commit(step_commit))
        self._context.apply_to(branch, committed)

    def _pause(self, branch: StepExecution, attempt: int) -> timedelta:
        """How long to wait after a failed attempt."""
        delay, workflow = branch.policy.delay_after(attempt), self._context.lease.claim.ref.workflow
        return self._context.env.runtime.wait_duration(delay, purpose="retry", workflow=workflow, step=branch.name)


def _retry_waits(rows: list[StepRow]) -> list[OpenWait]:
    return [OpenWait(row.next_retry_at) for row in rows if row.next_retry_at is not None]
