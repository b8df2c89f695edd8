"""How long a step waits before its next attempt. Its policy decides, which may call a function of the author."""

from __future__ import annotations

from datetime import timedelta

from celery_durable import values
from celery_durable.errors import RetryDelayInvalid, StepFailed
from celery_durable.runner.environment import Environment
from celery_durable.runner.failed_attempts import AttemptFailure
from celery_durable.values import StepPolicy


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
    env: Environment,
    policy: StepPolicy,
    failure: AttemptFailure,
    *,
    is_last: bool,
    workflow: str,
    step: str,
    attempt: int,
) -> tuple[AttemptFailure, timedelta | None]:
    """Return the failure of a body to record, and how long to wait after it; None if no retry follows.

    ``is_last``: whether the step may have no further attempt.
    """
    if is_last or failure.is_final:
        return failure, None
    if failure.retry_in is not None:
        return failure, env.runtime.wait_duration(failure.retry_in, purpose="retry", workflow=workflow, step=step)
    try:
        return failure, choose_retry_delay(
            env,
            policy,
            workflow=workflow,
            step=step,
            attempt=attempt,
            failure=(failure.name, failure.message),
            error=failure.error,
        )
    except RetryDelayInvalid as exc:
        return AttemptFailure.of(exc), None
