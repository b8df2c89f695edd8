"""Log records of failures: a failed attempt at WARNING, the end of a run with an error at ERROR.

Each has `extra` with workflow, instance_id, run_number, step and attempt. A failed attempt has its exception, and so
has the end of a run by an error of the workflow's own code. The end of a run by a failed step only names the step. They
are logged after the commit, so superseded and rolled-back work logs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from celery_durable.errors import StepFailed
from celery_durable.errors.base import name_error
from celery_durable.model import RunOutcome, RunRef, build_log_fields
from celery_durable.runner.failed_attempts import FailedAttempt
from celery_durable.values import hide_engine_frames

logger = logging.getLogger("celery_durable.runner")


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
    in_step = "" if step is None else f" in step {step!r}"
    logger.error(
        "%s failed%s: %s",
        ref,
        in_step,
        name_error(run_outcome.error_name or "an error", run_outcome.error_message),
        exc_info=None if in_step or error is None else hide_engine_frames(error),
        extra=build_log_fields(ref, step, attempt) | {"error_name": run_outcome.error_name},
    )
