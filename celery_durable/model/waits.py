"""What a suspended run waits for, and the steps that wait for Celery tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from celery_durable.model.public import OnLost
from celery_durable.model.rows import RunRef
from celery_durable.model.steps import StepRow


@dataclass(frozen=True, slots=True)
class TaskSendingStep:
    """A map or task step of a run: a step that sends Celery tasks.

    ``timeout`` applies to each attempt. ``max_concurrency`` limits how many items may be out; None means no limit.
    """

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
    """One wait of a run that suspends.

    It ends at ``due_at``, or earlier: with an event of ``event_type``, or when its ``condition`` is met.
    """

    due_at: datetime
    event_type: str | None = None
    condition: WaitCondition | None = None

    @classmethod
    def of(cls, row: StepRow) -> OpenWait | None:
        """The wait of an open step: until its retry, its event or its deadline. None if it waits for nothing."""
        if row.next_retry_at is not None:
            return cls(row.next_retry_at)
        return None if row.wake_at is None else cls(row.wake_at, row.wait_event_type)
