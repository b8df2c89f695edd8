"""What one step commit writes to the row of a step."""

from __future__ import annotations

from datetime import datetime, timedelta

from celery_durable.model.hot_dataclass import hot_dataclass
from celery_durable.model.states import FINISHED_STEPS, LEASE_EXPIRED, StepStatus, StepType


@hot_dataclass()
class StepWrite:
    """A step row to write at a boundary.

    ``replaces`` is the commit id of the row to overwrite, or None for a new row. ``ran_for`` is the time since the
    body started, or None if no body ran. ``retry_in`` and ``wake_in`` count from the time of the boundary;
    ``wake_at`` is absolute.
    """

    key: str
    seq: int
    name: str
    type: StepType
    status: StepStatus
    replaces: str | None
    commit_id: str
    attempts: int = 0
    max_attempts: int | None = None
    timeout: timedelta | None = None
    retry_in: timedelta | None = None
    wake_in: timedelta | None = None
    wake_at: datetime | None = None
    event_type: str | None = None
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    event_seq: int | None = None
    ran_for: timedelta | None = None
    payload_type: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether this write inserts the row."""
        return self.replaces is None

    @property
    def is_finished(self) -> bool:
        """Whether this write finishes the step."""
        return self.status in FINISHED_STEPS

    @property
    def resets_crash_count(self) -> bool:
        """Whether this write advances the run, which shows that its crashes are over.

        A row that says that an attempt has started (PENDING, RUNNING) is not: the attempt may still kill its worker.
        Neither is the record of an expired lease.
        """
        return self.status not in (StepStatus.PENDING, StepStatus.RUNNING) and self.error_name != LEASE_EXPIRED
