"""Log records of your code with the workflow, the instance, the run, the step and the attempt that logged them."""

from __future__ import annotations

import logging

from celery_durable.model import build_log_fields
from celery_durable.runner.step_attempt import current_attempt, current_run

__all__ = ["WorkflowContext"]


class WorkflowContext(logging.Filter):
    """Adds ``workflow``, ``instance_id``, ``run_number``, ``step`` and ``attempt`` to each record, for any formatter.

    Add it to a handler, so that the records of all loggers pass. Outside of a workflow the fields are None; between two
    steps ``step`` and ``attempt`` are. A field that a record has already, as `extra`, stays.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, and keep the record."""
        attempt = current_attempt.get()
        ref = current_run.get() if attempt is None else attempt.ref
        step = (None, None) if attempt is None else (attempt.name, attempt.number)
        for name, value in build_log_fields(ref, *step).items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True
