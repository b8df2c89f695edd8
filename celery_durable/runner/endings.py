"""What is told when a run has ended: to the task that its workflow names, and to the step whose child it is."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.model import Claim, Outgoing, Ref, Status
from celery_durable.store.claims import Ending
from celery_durable.values import PayloadLimits

logger = logging.getLogger("celery_durable.runner")

_NAMESPACE = uuid.UUID("0d9a0f0e-52a5-5d0b-8c36-7f0c1f2c6b1e")


class Farewell:
    """The letters of one run's end."""

    def __init__(self, definition: Definition, claim: Claim, limits: PayloadLimits) -> None:
        self._hooks, self._claim, self._limits = definition.hooks, claim, limits

    def letters(self, ending: Ending, *, reason: str | None = None) -> list[Outgoing]:
        """What is sent when the run ends like this; mostly nothing. The same id whenever it is asked for."""
        hook = self._hooks.on_complete if ending.status is Status.COMPLETE else self._hooks.on_failure
        if hook is None:
            return []
        try:
            name = hook.name
        except Exception:  # a task that its app makes only now; the run must be able to end
            logger.exception("Nothing is sent at the end of %s: its task has no name", self._claim.ref)
            return []
        return [values.outgoing_ending(name, self._told(ending, reason), id_=self._id, limits=self._limits)]

    @property
    def _id(self) -> str:
        # With the key: an instance that was deleted may be made again under its id.
        ref = self._claim.ref
        return str(uuid.uuid5(_NAMESPACE, f"{ref.workflow}/{ref.instance_id}/{ref.run_number}/{self._claim.pk}"))

    def _told(self, ending: Ending, reason: str | None) -> dict[str, Any]:
        error = None
        if ending.error_name is not None:
            error = {"name": ending.error_name, "message": ending.error_message}
        return {
            "workflow": self._claim.ref.workflow,
            "instanceId": self._claim.ref.instance_id,
            "runNumber": self._claim.ref.run_number,
            "status": ending.status.value,
            "output": None if ending.output is None else json.loads(ending.output),
            "error": error,
            "reason": reason,
        }


def answer(ref: Ref, ending: Ending, *, reason: str | None = None) -> str:
    """What the end of a child tells the step that waits for it."""
    match ending.status:
        case Status.COMPLETE:
            return values.answer_of(ending.output)
        case Status.TERMINATED:
            return values.answer_of_termination(ref.workflow, ref.instance_id, reason)
    return values.answer_of_error(ending.error_name or "Error", ending.error_message or "")
