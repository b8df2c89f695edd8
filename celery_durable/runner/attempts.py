"""The executor of attempts: it runs bodies and has their outcomes recorded. It alone decides how an attempt ends."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from celery_durable import notify, values
from celery_durable.ancestry import Ancestry
from celery_durable.concurrency import ConcurrentBody
from celery_durable.errors import Cancelled, DurableError, Interruption, StepCommitConflict
from celery_durable.errors.base import format_limit
from celery_durable.model import AttemptOutcome, LogLevel, LogLine, StepRow, StepType
from celery_durable.runner.commit_parts import RunUserWrites, StepEffectFailed
from celery_durable.runner.environment import Environment
from celery_durable.runner.failed_attempts import AttemptFailed, AttemptFailure
from celery_durable.runner.lease import Lease
from celery_durable.runner.session_lock import SessionLock
from celery_durable.runner.step_attempt import (
    BodyOutcome,
    PassOver,
    Raised,
    Returned,
    StepAttempt,
    TimedOut,
)
from celery_durable.runner.step_commit import BodyRerunRequired, StepCommit
from celery_durable.runner.step_execution import PassInterrupted
from celery_durable.store.runs import runs

_NAMESPACE = uuid.UUID("6f0f4b0a-6a65-5b5c-9d0e-3f3b6f6f2c11")
MAX_BODY_RERUNS = 3
"""How often a body runs again within one attempt, after a database that works lost its transaction."""
MAX_OUTAGES = 20
"""How often a body runs again within one attempt, after the database was away. The body may crash the server."""


def idempotency_key(ancestry: Ancestry, step: str, suffix: str = "") -> str:
    """Build the key by which external systems recognise a step: the same for all its attempts.

    ``suffix``: distinguishes the commits of a linear step whose handler is called several times.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{ancestry.origin_run(step)}/{step}{suffix}"))


class AttemptedStep(Protocol):
    name: str
    key: str
    type: StepType
    number: int
    timeout: timedelta | None
    may_repeat: bool
    """Whether the body may be called again after an attempt whose end is unknown."""
    ends_with_cancel: bool
    """Whether the body is interrupted if the run is cancelled."""
    is_async: bool
    """Whether the body is an async function."""

    def build_attempt(self, session_lock: SessionLock | None) -> StepAttempt: ...

    def succeed(self, attempt: StepAttempt, value: Any) -> None:
        """Commit what the body returned; raises AttemptFailed, StepEffectFailed and BodyRerunRequired."""
        ...

    def fail(self, attempt: StepAttempt, failure: AttemptFailure) -> None:
        """Commit a failed attempt: the time of its retry, or the failure of the step."""
        ...

    def cancel(self, attempt: StepAttempt, cancelled: Cancelled) -> None:
        """Commit the end of an attempt of a cancelled run."""
        ...


class AttemptingPass(Protocol):
    env: Environment
    lease: Lease
    logs: list[LogLine]

    def run_or_interrupt(self, operation: Callable[[], Any]) -> Any:
        """Call a database operation. If it fails, the pass is over."""
        ...

    def interrupt(self, reason: Interruption) -> Interruption: ...


class Attempts:
    """Runs the attempts of a pass. Each outcome has its own commit."""

    def __init__(self, pass_: AttemptingPass) -> None:
        self._pass, self._env, self._lease = pass_, pass_.env, pass_.lease
        self._can_interrupt = self._env.runtime.can_interrupt()
        self._session_lock = SessionLock() if pass_.env.store.database.has_one_writer else None
        self._lost: list[tuple[AttemptedStep, StepAttempt, str]] = []
        """The attempts whose transaction the database lost, each with the reason. Their bodies run again."""
        self._unrecorded: dict[str, tuple[AttemptedStep, StepAttempt]] = {}
        """The attempts that may have begun, whose end is not recorded, and whose bodies may not be called again."""

    def run(self, steps: Sequence[AttemptedStep]) -> None:
        """Run the bodies of these steps, concurrently if there are several, and commit the outcome of each."""
        if not self._lease.is_valid:
            self._pass.run_or_interrupt(lambda: self._lease.ensure_held(self._env.store))
        for step in steps:
            notify.send_attempt_started(
                self._lease.claim, step=step.name, step_key=step.key, attempt=step.number, type_=step.type
            )
        self._run_bodies(steps)
        reruns = outages = 0
        while self._lost and reruns < MAX_BODY_RERUNS and outages < MAX_OUTAGES:
            # If the database was away, as in a restart, that explains the loss. Otherwise the body may be its reason.
            if self._pass.run_or_interrupt(lambda: self._lease.wait_for_database(self._env.store)):
                outages += 1
            else:
                reruns += 1
            self._env.runtime.back_off(reruns + outages)
            self._run_bodies([step for step, _, _ in self._lost])
        for step, attempt, why in self._lost:
            text = f"the step's transaction was lost {reruns + outages + 1} times, at last by: {why}"
            step.fail(attempt, AttemptFailure("StepTransactionLost", text))

    def record_interrupted(self) -> None:
        """Record interrupted attempts that may not be repeated, before the release; if that fails, keep the claim."""
        for step, attempt in list(self._unrecorded.values()):
            step.fail(attempt, AttemptFailure.unknown(f"attempt {attempt.number} was interrupted: its worker stopped"))

    def note_recorded(self, rows: Sequence[StepRow]) -> None:
        """Note that the ends of these steps' attempts are recorded. Call it before others hear of the commit."""
        if self._unrecorded:
            recorded = {row.step_key for row in rows}
            self._set_unrecorded({key: begun for key, begun in self._unrecorded.items() if key not in recorded})

    def _set_unrecorded(self, unrecorded: dict[str, tuple[AttemptedStep, StepAttempt]]) -> None:
        self._unrecorded, self._lease.is_release_forbidden = unrecorded, bool(unrecorded)

    def _run_bodies(self, steps: Sequence[AttemptedStep]) -> None:
        self._lost.clear()
        self._env.runtime.checkpoint("before-body")
        attempts: list[StepAttempt] = []
        try:
            for step in steps:
                attempts.append(step.build_attempt(self._session_lock))  # noqa: PERF401  # an error abandons these
            begun = zip(steps, attempts, strict=True)
            if unrecorded := {step.key: (step, attempt) for step, attempt in begun if not step.may_repeat}:
                self._set_unrecorded(unrecorded)
            if len(steps) == 1 and self._runs_here(steps[0]):
                outcome = attempts[0].run_timed(steps[0].timeout, ends_with_cancel=steps[0].ends_with_cancel)
                self._finish(steps[0], attempts[0], outcome)
            else:
                self._run_concurrently(steps, attempts)
        except BaseException:
            for attempt in attempts:
                attempt.abandon()
            raise

    def _runs_here(self, step: AttemptedStep) -> bool:
        """Whether the only body runs on this thread. One that cannot be interrupted here gets a thread of its own."""
        return not step.is_async and (self._can_interrupt or not (step.timeout or step.ends_with_cancel))

    def _run_concurrently(self, steps: Sequence[AttemptedStep], attempts: Sequence[StepAttempt]) -> None:
        bodies = [
            ConcurrentBody(
                attempt.run,
                functools.partial(self._finish_in_turn, step, attempt),
                None if step.timeout is None else step.timeout.total_seconds(),
                functools.partial(self._lease.call_if_cancelled, attempt) if step.ends_with_cancel else None,
                attempt.start if step.is_async else None,
            )
            for step, attempt in zip(steps, attempts, strict=True)
        ]
        self._env.runtime.run_concurrently(bodies)
        if self._session_lock is not None:
            self._session_lock.run_deferred()

    def _finish_in_turn(self, step: AttemptedStep, attempt: StepAttempt, outcome: BodyOutcome | None) -> None:
        if self._session_lock is None:
            self._finish(step, attempt, outcome)
        else:
            self._session_lock.run_or_defer(attempt, functools.partial(self._finish, step, attempt, outcome))

    def _finish(self, step: AttemptedStep, attempt: StepAttempt, outcome: BodyOutcome | None) -> None:
        """Record the outcome of an attempt, None if it timed out. If its transaction was lost, add it to ``_lost``."""
        self._env.runtime.checkpoint("after-body")
        if self._lease.is_cancelled and self._ended_with_cancel(step, outcome):
            self._cancel(step, attempt)
            return
        try:
            match outcome:
                case Returned(value):
                    step.succeed(attempt, value)
                case Raised(error):
                    self._raise_failure(step, attempt, error)
                case PassOver(error):
                    raise self._pass.interrupt(error if isinstance(error, Interruption) else PassInterrupted(error))
                case TimedOut(interruption):
                    self._time_out(step, attempt, interruption)
                case None if not step.may_repeat:
                    attempt.abandon()
                    what = f"attempt {attempt.number} took longer than {_format_timeout(step)} and was not interrupted"
                    step.fail(attempt, AttemptFailure.unknown(what, AttemptOutcome.TIMED_OUT))
                case None:
                    self._time_out(step, attempt, None)
        except AttemptFailed as exc:
            self._fail(step, attempt, exc.failure)
        except StepEffectFailed as exc:
            # A DurableError says that the target does not exist or has ended: a retry would fail again.
            is_final = isinstance(exc.error, DurableError)
            error = explain_conflict(self._env, step.name, exc.error)
            self._fail(step, attempt, AttemptFailure.of(error, is_final=is_final))
        except BodyRerunRequired as exc:
            if not step.may_repeat:
                what = f"the database lost the transaction of attempt {attempt.number} ({exc})"
                self._fail(step, attempt, AttemptFailure.unknown(what))
                return
            attempt.close_transaction()
            text = f"The transaction of step {step.name!r} was lost: {exc}"
            self._pass.logs.append(build_log_line(self._env, attempt, LogLevel.WARNING, text))
            self._lost.append((step, attempt, str(exc)))

    @staticmethod
    def _time_out(step: AttemptedStep, attempt: StepAttempt, interruption: BaseException | None) -> None:
        attempt.abandon()
        text = f"attempt {attempt.number} took longer than {_format_timeout(step)}"
        outcome = AttemptOutcome.TIMED_OUT
        step.fail(attempt, AttemptFailure("StepTimeout", text, outcome=outcome, interruption=interruption))

    @staticmethod
    def _ended_with_cancel(step: AttemptedStep, outcome: BodyOutcome | None) -> bool:
        match outcome:
            case Raised(Cancelled()):
                return True
            case TimedOut() | None:
                return step.ends_with_cancel
        return False

    def _cancel(self, step: AttemptedStep, attempt: StepAttempt) -> None:
        attempt.abandon()
        claim, read = self._lease.claim, self._env.store.read
        cancelled: Cancelled | None = self._pass.run_or_interrupt(
            lambda: read(lambda tx: runs.find_cancellation(tx, claim.pk, claim.ref.run_number))
        )
        step.cancel(attempt, cancelled or Cancelled())  # without one, the run was restarted, and the commit fails

    def _fail(self, step: AttemptedStep, attempt: StepAttempt, failure: AttemptFailure) -> None:
        attempt.close_transaction()
        step.fail(attempt, failure)

    def _raise_failure(self, step: AttemptedStep, attempt: StepAttempt, error: BaseException) -> NoReturn:
        if attempt.buffer.transaction is None and error is not attempt.opening_error:
            raise AttemptFailed(AttemptFailure.of(error))
        if self._env.store.is_transient(error) and step.may_repeat:
            raise BodyRerunRequired(values.get_error_text(error)) from error
        raise AttemptFailed(AttemptFailure.of(explain_conflict(self._env, step.name, error)))


def _format_timeout(step: AttemptedStep) -> str:
    # A harness forces timeouts of steps that have none.
    return "its timeout" if step.timeout is None else format_limit(step.timeout)


def explain_conflict(env: Environment, step: str, error: BaseException) -> BaseException:
    """Return the error to record for one of the step's transaction: its own class if a unique key was violated."""
    if env.store.is_unique_violation(error):
        return StepCommitConflict(step, values.sanitize_text(values.get_error_text(error), 500))
    return error


def build_log_line(env: Environment, attempt: StepAttempt, level: LogLevel, text: str) -> LogLine:
    """Build a log line of the engine about an attempt."""
    message = values.sanitize_text(text, env.settings.max_log_message)
    return LogLine(level, "system", message, None, attempt.step_key, attempt.number, is_replay=False)


def commit_terminal_failure(
    env: Environment, step: str, attempt: StepAttempt, step_commit: StepCommit, commit: Callable[[StepCommit], Any]
) -> None:
    """Commit the failure of a step with its `on_terminal_error` writes, or without those that fail, and log them."""
    writes = attempt.buffer.on_terminal_error
    if writes:
        try:
            commit(replace(step_commit, parts=[*step_commit.parts, RunUserWrites(writes)]))
        except StepEffectFailed as exc:
            text = f"on_terminal_error of step {step!r} failed: {explain_conflict(env, step, exc.error)!r}"
            line = build_log_line(env, attempt, LogLevel.ERROR, text)
            step_commit = replace(step_commit, logs=[*step_commit.logs, line])
        else:
            return
    commit(step_commit)
