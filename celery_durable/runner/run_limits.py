"""How long a run may take, and how long it may wait at one place: what its workflow says of both."""

from __future__ import annotations

from datetime import datetime

from celery_durable.definitions import Definition
from celery_durable.model import Claim, StepRow, StepStatus, StepType, format_duration
from celery_durable.store import items, step_rows
from celery_durable.store.claims import OpenWait
from celery_durable.store.engine import Tx
from celery_durable.store.step_rows import RunState


class RunLimits:
    """The limits of one run, seen from one pass. Whoever sleeps is woken when one is reached."""

    def __init__(self, definition: Definition, claim: Claim, run_state: RunState) -> None:
        self._definition, self._claim = definition, claim
        self._open = [row for row in run_state.steps if row.status is StepStatus.WAITING]
        started_at, limit = run_state.started_at or claim.claimed_at, definition.max_run_duration
        self.ends_at = None if limit is None else started_at + limit
        """When the run has taken too long; None: never."""
        self._suspended_since = max((waiting_since(row) for row in self._open), default=None)

    def reset_suspension(self) -> None:
        """Something was recorded: what it waits for from now on is another suspension."""
        self._suspended_since = None

    def deadlines(self, now: datetime) -> list[OpenWait]:
        """When a run that falls asleep now has to be looked at, whatever it waits for."""
        limit = self._definition.max_suspend_duration
        ends = [self.ends_at, None if limit is None else (self._suspended_since or now) + limit]
        return [OpenWait(end) for end in ends if end is not None]

    def is_exceeded(self, now: datetime) -> bool:
        """Whether the run has taken too long."""
        return self.ends_at is not None and now >= self.ends_at

    def termination_reason(self, tx: Tx) -> str | None:
        """Why the run that was just claimed has to be ended; None: it may go on.

        One that waited too long goes on nevertheless where what it waited for is there.
        """
        now, limit = self._claim.claimed_at, self._definition.max_suspend_duration
        if self.ends_at is not None and now >= self.ends_at:
            assert self._definition.max_run_duration is not None
            return (
                f"The run took longer than its max_run_duration of {format_duration(self._definition.max_run_duration)}"
            )
        if limit is None or self._suspended_since is None or now < self._suspended_since + limit:
            return None
        if any(self._is_satisfied(tx, row) for row in self._open):
            return None
        names = ", ".join(repr(row.name) for row in self._open)
        return f"Waiting at {names} took longer than the max_suspend_duration of {format_duration(limit)}"

    def _is_satisfied(self, tx: Tx, row: StepRow) -> bool:
        due_at = row.next_retry_at or row.wake_at
        if due_at is not None and due_at <= self._claim.claimed_at:
            return True
        if row.wait_event_type is None or row.wake_at is None:
            return False
        if row.type is StepType.MAP:
            return items.all_finished(tx, self._claim.pk, self._claim.ref.run_number, row.step_key)
        return step_rows.oldest_event(tx, self._claim, row.wait_event_type, deadline=row.wake_at) is not None


def waiting_since(row: StepRow) -> datetime:
    """Since when an open step waits: for another attempt since the last one ended, else since it was recorded."""
    since = row.finished_at or row.created_at
    assert since is not None
    return since
