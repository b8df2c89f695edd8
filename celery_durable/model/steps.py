"""A step: what a commit writes to its row, and its row."""

from __future__ import annotations

from datetime import datetime, timedelta

from celery_durable.model.hot_dataclass import hot_dataclass
from celery_durable.model.states import CANCELLED, FINISHED_STEPS, LEASE_EXPIRED, LIMITED_TYPES, StepStatus, StepType


@hot_dataclass()
class StepWrite:
    """A step row to write at a boundary. ``replaces``: the commit id of the row to overwrite.

    ``ran_for``: the time since the body started, if one ran. ``retry_in`` and ``wake_in`` count from the boundary.
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
    ask: str | None = None
    releases_limits: bool = False
    """Whether the step gives back its limits, or its place in their queues."""

    @property
    def is_new(self) -> bool:
        """Whether this write inserts the row."""
        return self.replaces is None

    @property
    def is_finished(self) -> bool:
        """Whether this write finishes the step."""
        return self.status in FINISHED_STEPS

    @property
    def waits_for_limits(self) -> bool:
        """Whether the step waits until it gets its limits."""
        is_timed = not (self.retry_in is None and self.wake_in is None and self.wake_at is None)
        return self.status is StepStatus.WAITING and self.type in LIMITED_TYPES and not is_timed

    @property
    def resets_crash_count(self) -> bool:
        """Whether this write advances the run, which shows that its crashes are over.

        An attempt that has only started may still kill its worker, and an expired lease is a crash.
        """
        return self.status not in (StepStatus.PENDING, StepStatus.RUNNING) and self.error_name != LEASE_EXPIRED


@hot_dataclass()
class StepRow:
    """One recorded step of a run, with the fields in the order of `STEP_COLUMNS`. ``result`` is JSON text."""

    step_key: str
    seq: int
    name: str
    type: StepType
    status: StepStatus
    attempts: int = 0
    max_attempts: int | None = None
    timeout: timedelta | None = None
    next_retry_at: datetime | None = None
    wake_at: datetime | None = None
    wait_event_type: str | None = None
    event_seq: int | None = None
    """The ``seq`` of the event that a linear step's handler is called with."""
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    commit_id: str = ""
    """Identifies the step commit that wrote the row last."""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    payload_type: str | None = None
    """The class that the payload of the awaited event has to fit, as `values.name_class` names it."""
    ask: str | None = None
    """What a wait asks a person, as the JSON text of `values.encode_ask`."""

    @property
    def is_finished(self) -> bool:
        """Whether the step has ended."""
        return self.status in FINISHED_STEPS

    @property
    def is_end_unknown(self) -> bool:
        """Whether the last attempt was counted before its body began, and no pass has recorded its end.

        A pass that takes such an attempt back restores the error of the attempt before it.
        """
        return self.status is StepStatus.PENDING and self.attempts > 0 and self.error_name is None

    @property
    def waits_for_limits(self) -> bool:
        """Whether the step waits until it gets its limits."""
        is_timed = not (self.next_retry_at is None and self.wake_at is None)
        return self.status is StepStatus.WAITING and self.type in LIMITED_TYPES and not is_timed

    @property
    def is_cancelled(self) -> bool:
        """Whether a cancel of the run ended the step. Other cancelled steps lost a race or were terminated."""
        return self.status is StepStatus.CANCELLED and self.error_name == CANCELLED

    @property
    def is_timer_step(self) -> bool:
        """Whether the step is a sleep. Sleeps do not count toward `max_steps`."""
        return self.type is StepType.SLEEP
