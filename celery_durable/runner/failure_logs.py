"""Log records of failures: a failed attempt at WARNING, the end of a run with an error at ERROR.

Each has the exception, and `extra` with workflow, instance_id, run_number, step and attempt. They are logged after the
commit, so superseded and rolled-back work logs nothing. If a step has failed, its attempts have printed the traceback:
the end of the run prints only the lines of the workflow that called the step.
"""

from __future__ import annotations

import logging
import traceback
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
