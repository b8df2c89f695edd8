"""How a pass leaves its run: released, to continue later, or ended; and what follows a crash."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from celery_durable.model.public import OnLost
from celery_durable.model.rows import RunRef
from celery_durable.model.states import Status
from celery_durable.model.steps import StepRow

# What a suspended run waits for, and the steps that wait for Celery tasks.


@dataclass(frozen=True, slots=True)
class TaskSendingStep:
    """A step that sends Celery tasks: a map or a task step. ``timeout`` applies to each attempt."""

    workflow: str
    instance_id: str
    pk: int
    run_number: int
    step_key: str
    timeout: timedelta
    max_concurrency: int | None = None
    on_lost: OnLost = "resend"

    @property
    def ref(self) -> RunRef:
        """The run."""
        return RunRef(self.workflow, self.instance_id, self.run_number)


class WaitCondition(Protocol):
    """What ends a wait besides an event: something that the database knows."""

    def is_met(self, tx: Any, now: datetime) -> bool:
        """Read it in the transaction that suspends the run, under its lock."""


@dataclass(frozen=True, slots=True)
class OpenWait:
    """One wait of a run that suspends: to ``due_at``, an event of ``event_type``, or until its ``condition`` is met.

    ``is_checked_again``: whether the run checks the condition from time to time, as nothing is sure to wake it.
    """

    due_at: datetime
    event_type: str | None = None
    condition: WaitCondition | None = None
    is_checked_again: bool = True

    @classmethod
    def of(cls, row: StepRow) -> OpenWait | None:
        """The wait of an open step: until its retry, its event or its deadline. None if it waits for nothing."""
        if row.next_retry_at is not None:
            return cls(row.next_retry_at)
        return None if row.wake_at is None else cls(row.wake_at, row.wait_event_type)


class ReleaseOutcome(enum.Enum):
    """The state of an instance after its worker has released it."""

    WAITING = enum.auto()
    DUE = enum.auto()
    PAUSED = enum.auto()

    @property
    def status(self) -> Status:
        """The status of the instance from then on."""
        return _STATUS_AFTER_RELEASE[self]


_STATUS_AFTER_RELEASE = {
    ReleaseOutcome.WAITING: Status.WAITING,
    ReleaseOutcome.DUE: Status.ACTIVE,
    ReleaseOutcome.PAUSED: Status.PAUSED,
}


def decide_release(*, is_due: bool, pause_requested: bool) -> ReleaseOutcome:
    """Return how a release leaves an instance. A requested pause takes effect, whether or not the run is due."""
    if pause_requested:
        return ReleaseOutcome.PAUSED
    return ReleaseOutcome.DUE if is_due else ReleaseOutcome.WAITING


_MAX_CRASH_DELAY = timedelta(minutes=1)


def crash_delay(crash_count: int) -> timedelta:
    """Return the delay after the ``crash_count``-th crash in a row: 0, 1, 2, 4 .. 60 s."""
    if crash_count <= 1:
        return timedelta(0)
    return min(timedelta(seconds=2 ** min(crash_count - 2, 6)), _MAX_CRASH_DELAY)


@dataclass(frozen=True, slots=True)
class Release:
    """The pass releases the run. It is suspended until the earliest of ``waits``, or due at once if there are none."""

    waits: Sequence[OpenWait] = ()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: ``output`` as JSON text, an error, or the ``reason`` for which it was terminated."""

    status: Status
    output: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    failed_steps: str | None = None
    """The steps that caused the failure, as JSON text (`ancestry.RunFailure.text`)."""
    reason: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception that ended it, if this process has it. It is not stored."""

    @property
    def summary(self) -> str:
        """A short sentence for the log."""
        detail = self.reason or self.error_name
        return str(self.status) if detail is None else f"{self.status}: {detail}"


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did. ``was_executed``: False if it has left the run to another process, or to a later time."""

    summary: str
    run_outcome: RunOutcome | None = None
    was_executed: bool = True

    def __str__(self) -> str:
        return self.summary

    @property
    def failure(self) -> RunOutcome | None:
        """How the run failed in this pass. None if it did not fail."""
        has_failed = self.run_outcome is not None and self.run_outcome.status is Status.ERRORED
        return self.run_outcome if has_failed else None


Ending = Release | RunOutcome
