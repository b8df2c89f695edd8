"""Failed attempts: what the commit that ends an attempt records about it, and the exception, for logs and signals."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from celery_durable import values
from celery_durable.model import NO_TRACE, AttemptOutcome, AttemptWrite, ErrorTrace
from celery_durable.runner.environment import ClaimedRun, Environment


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt failed, as it is recorded.

    ``error``: the exception, if there was one. ``is_final``: a retry would fail again. ``retry_in``: the delay before
    the retry; None for that of the step's policy. ``interruption``: the exception by which a timeout interrupted the
    body, which shows where the body was.
    """

    name: str
    message: str
    error: BaseException | None = None
    is_final: bool = False
    retry_in: timedelta | None = None
    outcome: AttemptOutcome = AttemptOutcome.FAILED
    interruption: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException, *, is_final: bool = False) -> AttemptFailure:
        """The failure of an attempt whose body raised ``error``."""
        return cls(*values.describe_error(error), error, is_final or values.forbids_retry(error))


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


def record_failure(
    env: Environment,
    run: ClaimedRun,
    failure: AttemptFailure,
    *,
    step: str,
    step_key: str,
    number: int,
    ran_for: timedelta,
) -> FailedAttempt:
    """Build the record of a failed attempt of a body."""
    write = AttemptWrite(
        step_key,
        number,
        failure.outcome,
        *_describe(env, run, failure.name, failure.message, step),
        trace=_trace(env, run, failure.error or failure.interruption, step),
        ran_for=ran_for,
        worker=run.worker,
    )
    return FailedAttempt(write, step, failure.error)


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
