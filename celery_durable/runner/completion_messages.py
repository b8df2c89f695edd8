"""What a run sends when it ends.

It sends a message to its workflow's `on_complete` or `on_failure` task, and the answer to the parent step.
"""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.model import Claim, OutboxMessage, RunOutcome, RunRef, Status
from celery_durable.values import PayloadLimits

logger = logging.getLogger("celery_durable.runner")

_NAMESPACE = uuid.UUID("0d9a0f0e-52a5-5d0b-8c36-7f0c1f2c6b1e")


class CompletionMessages:
    """Builds the message to the `on_complete` or `on_failure` task of one run."""

    def __init__(self, definition: Definition, claim: Claim, limits: PayloadLimits) -> None:
        self._hooks, self._claim, self._limits = definition.hooks, claim, limits

    def build(self, run_outcome: RunOutcome) -> list[OutboxMessage]:
        """Build the messages for this outcome: one if the workflow has a task for it, else none.

        The message has the same id on every call.
        """
        task = self._hooks.on_complete if run_outcome.status is Status.COMPLETE else self._hooks.on_failure
        if task is None:
            return []
        try:
            name = task.name
        except Exception:  # Celery creates a lazy task here, which may fail; the run must end nevertheless
            logger.exception("Nothing is sent at the end of %s: its task has no name", self._claim.ref)
            return []
        return [values.build_completion_message(name, self._payload(run_outcome), id_=self._id, limits=self._limits)]

    @property
    def _id(self) -> str:
        # Includes the database id, since an instance may be created again under the id of a deleted one.
        ref = self._claim.ref
        return str(uuid.uuid5(_NAMESPACE, f"{ref.workflow}/{ref.instance_id}/{ref.run_number}/{self._claim.pk}"))

    def _payload(self, run_outcome: RunOutcome) -> dict[str, Any]:
        error = None
        if run_outcome.error_name is not None:
            error = {"name": run_outcome.error_name, "message": run_outcome.error_message}
        return {
            "workflow": self._claim.ref.workflow,
            "instanceId": self._claim.ref.instance_id,
            "runNumber": self._claim.ref.run_number,
            "status": run_outcome.status.value,
            "output": None if run_outcome.output is None else json.loads(run_outcome.output),
            "error": error,
            "reason": run_outcome.reason,
        }


def build_child_answer(ref: RunRef, run_outcome: RunOutcome) -> str:
    """Build the answer of an ended child to the parent step that waits for it, as JSON text."""
    match run_outcome.status:
        case Status.COMPLETE:
            return values.encode_answer(run_outcome.output)
        case Status.TERMINATED:
            return values.encode_termination_answer(ref.workflow, ref.instance_id, run_outcome.reason)
    return values.encode_error_answer(run_outcome.error_name or "Error", run_outcome.error_message or "")
