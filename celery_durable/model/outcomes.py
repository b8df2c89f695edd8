"""How a pass leaves its run: suspended, due again, paused or ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from celery_durable.model.states import Status


class ReleaseOutcome(enum.Enum):
    """The state of an instance after its worker has released it."""

    WAITING = enum.auto()
    DUE = enum.auto()
    PAUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: ``output`` as JSON text, or an error."""

    status: Status
    output: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    failed_steps: str | None = None
    """The steps that caused the failure, as JSON text (`ancestry.RunFailure.text`)."""
