"""The step whose function runs now, for a long function that asks whether it is still wanted."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from celery_durable.errors import StepMisuse

running_attempt: ContextVar[Any] = ContextVar("celery_durable_body", default=None)
"""The attempt whose function runs on this thread; None if none does."""


class CurrentStep(Protocol):
    """The step whose function runs now.

    Attributes:
        name: The step's name.
        number: The number of this attempt, from 1.
    """

    name: str
    number: int

    @property
    def is_cancelled(self) -> bool:
        """Whether the result is no longer wanted: the run was cancelled or has ended, or another worker has it now.

        The worker notices it when it renews its lease: after a third of ``durable_lease_seconds`` at most.
        """
        ...

    def check(self) -> None:
        """Raise `Cancelled` if `is_cancelled`. The step then ends, and its workflow gets the exception."""
        ...


def current_step() -> CurrentStep:
    """Return the step whose function runs on this thread.

    Raises:
        StepMisuse: No function of a step runs on this thread.
    """
    attempt: CurrentStep | None = running_attempt.get()
    if attempt is None:
        raise StepMisuse("current_step() was called outside of a step's function, or on a thread that it started.")
    return attempt
