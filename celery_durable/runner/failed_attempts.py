"""Failed attempts of steps: what is recorded and logged about them, and how long a step waits before the next one.

Log records have the exception, and `extra` with workflow, instance_id, run_number, step and attempt. They are written
after the commit, so superseded and rolled-back work logs nothing. The attempts of a failed step have printed the
traceback: the end of the run prints only the lines of the workflow that called the step.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_durable import values
from celery_durable.errors import RetryDelayInvalid, StepFailed
from celery_durable.errors.base import name_error
from celery_durable.model import (
    NO_TRACE,
    OUTCOME_UNKNOWN,
    AttemptOutcome,
    AttemptWrite,
    ErrorTrace,
    RunOutcome,
    RunRef,
    build_log_fields,
)
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.values import StepPolicy, hide_engine_frames

logger = logging.getLogger("celery_durable.runner")


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt failed, as it is recorded. ``is_final``: a retry would fail again.

    ``retry_in``: the delay before the retry; None for that of the step's policy. ``interruption``: the exception by
    which a timeout interrupted the body, which shows where the body was.
    """

    name: str
    message: str
    error: BaseException | None = None
    is_final: bool = False
    retry_in: timedelta | None = None
    outcome: AttemptOutcome = AttemptOutcome.FAILED
    interruption: BaseException | None = None

    @classmethod
    def unknown(cls, what: str, outcome: AttemptOutcome = AttemptOutcome.FAILED) -> AttemptFailure:
        """The failure of an attempt whose end is unknown, because of ``what``: its body may not be called again."""
        return cls(*describe_unknown_end(what), is_final=True, outcome=outcome)

    @classmethod
    def of(cls, error: BaseException, *, is_final: bool = False) -> AttemptFailure:
        """The failure of an attempt whose body raised ``error``."""
        return cls(*values.describe_error(error), error, is_final or values.forbids_retry(error))


def describe_unknown_end(what: str) -> tuple[str, str]:
    """Return the name and the message of the error of an attempt whose end is unknown, because of ``what``."""
    return OUTCOME_UNKNOWN, f"{what}, so it is unknown whether its function did its work; it is not called again"


class AttemptFailed(Exception):
    """The attempt has failed: by what its body raised, or by what it returned."""

    def __init__(self, failure: AttemptFailure) -> None:
        self.failure = failure
        super().__init__(failure.name)


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt of a step, or an error of the code between steps, for which ``step`` is None."""

    write: AttemptWrite
    step: str | None
    error: BaseException | None = None


def record_failure(env: Environment, run: ClaimedRun, failure: AttemptFailure, attempt: StepAttempt) -> FailedAttempt:
    """Build the record of a failed attempt of a body."""
    write = AttemptWrite(
        attempt.step_key,
        attempt.number,
        failure.outcome,
        *_describe(env, run, failure.name, failure.message, attempt.name),
        trace=_trace(env, run, failure.error or failure.interruption, attempt.name),
        ran_for=attempt.duration,
        worker=run.worker,
    )
    return FailedAttempt(write, attempt.name, failure.error)


def record_run_error(env: Environment, run: ClaimedRun, error: BaseException) -> FailedAttempt:
    """Build the record of an exception that the workflow function raised between steps."""
    name, message = _describe(env, run, *values.describe_error(error), None)
    trace = _trace(env, run, error, None)
    write = AttemptWrite(None, None, AttemptOutcome.FAILED, name, message, trace, worker=run.worker)
    return FailedAttempt(write, None, error)


def record_task_timeout(
    env: Environment,
    run: ClaimedRun,
    error: tuple[str, str],
    *,
    step: str,
    step_key: str,
    number: int,
    task_id: str,
    item: int | None = None,
) -> FailedAttempt:
    """Build the record of a step's Celery task that did not answer in time; ``error``: name and message."""
    name, message = _describe(env, run, *error, step)
    write = AttemptWrite(step_key, number, AttemptOutcome.TIMED_OUT, name, message, item=item, task_id=task_id)
    return FailedAttempt(write, step)


def _describe(env: Environment, run: ClaimedRun, name: str, message: str, step: str | None) -> tuple[str, str]:
    ref = run.lease.claim.ref
    return env.make_redaction(ref.workflow, ref.instance_id).clean_error(name, message, step)


def _trace(env: Environment, run: ClaimedRun, error: BaseException | None, step: str | None) -> ErrorTrace:
    if error is None:
        return NO_TRACE
    ref = run.lease.claim.ref
    return env.make_redaction(ref.workflow, ref.instance_id).clean_trace(error, env.settings.tracebacks, step)


def log_attempts(ref: RunRef, failures: Sequence[FailedAttempt]) -> None:
    """Log the failed attempts of steps. An error between steps ends the run, so `log_end` logs it."""
    for failed in failures:
        write = failed.write
        if failed.step is None:
            continue
        item = "" if write.item is None else f", item {write.item}"
        logger.warning(
            "Attempt %s of step %r%s of %s failed: %s",
            write.number,
            failed.step,
            item,
            ref,
            name_error(write.error_name, write.error_message),
            exc_info=None if failed.error is None else hide_engine_frames(failed.error),
            extra=build_log_fields(ref, failed.step, write.number),
        )


def log_end(ref: RunRef, run_outcome: RunOutcome, failures: Sequence[FailedAttempt]) -> None:
    """Log that a run ended with an error. ``failures``: the attempts that failed with the same commit."""
    step, attempt = None, None
    error = run_outcome.exception
    if isinstance(error, StepFailed):
        step, attempt = error.step, error.attempts
    elif failures:
        step, attempt = failures[-1].step, failures[-1].write.number
    if not logger.isEnabledFor(logging.ERROR):
        return
    message = "%s failed%s: %s"
    in_step = "" if step is None else f" in step {step!r}"
    args = (ref, in_step, name_error(run_outcome.error_name or "an error", run_outcome.error_message))
    exc_info = None if error is None else hide_engine_frames(error)
    fields = build_log_fields(ref, step, attempt) | {"error_name": run_outcome.error_name}
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, args, exc_info, extra=fields)
    if step is not None and exc_info is not None:
        called = traceback.format_tb(exc_info[2]) if isinstance(error, StepFailed) else []
        record.exc_text = "".join(called).rstrip() or f"  The log has its attempt {attempt} as a warning."
    logger.handle(record)


def choose_retry_delay(
    env: Environment,
    policy: StepPolicy,
    *,
    workflow: str,
    step: str,
    attempt: int,
    failure: tuple[str, str],
    error: BaseException | None = None,
) -> timedelta:
    """Return the delay after a failed attempt; raises RetryDelayInvalid if the author's function failed."""
    try:
        delay = policy.delay_after(
            attempt, error or StepFailed(step, *failure, attempt), draw=env.runtime.random_fraction
        )
    except BaseException as exc:
        if env.stops_process(exc):
            raise
        reason = ": ".join(filter(None, values.describe_error(exc)))
        raise RetryDelayInvalid(step, attempt, ": ".join(filter(None, failure)), reason) from exc
    return env.runtime.wait_duration(delay, purpose="retry", workflow=workflow, step=step)


def plan_retry(
    env: Environment, policy: StepPolicy, failure: AttemptFailure, attempt: StepAttempt, *, is_last: bool
) -> tuple[AttemptFailure, timedelta | None]:
    """Return the failure of a body to record, and how long to wait after it; None if no retry follows."""
    if is_last or failure.is_final:
        return failure, None
    of_step: Any = {"workflow": attempt.ref.workflow, "step": attempt.name}
    if failure.retry_in is not None:
        return failure, env.runtime.wait_duration(failure.retry_in, purpose="retry", **of_step)
    text = (failure.name, failure.message)
    try:
        return failure, choose_retry_delay(
            env, policy, **of_step, attempt=attempt.number, failure=text, error=failure.error
        )
    except RetryDelayInvalid as exc:
        return AttemptFailure.of(exc), None
