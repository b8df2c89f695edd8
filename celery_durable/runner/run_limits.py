"""The time limits of a run, on the whole run and on a single suspension, and when its conditions are checked."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from celery_durable.definitions import Definition
from celery_durable.errors.base import format_limit
from celery_durable.model import Claim, OpenWait, StepRow, StepStatus
from celery_durable.store.engine import Tx
from celery_durable.store.runs import holds
from celery_durable.store.runs.step_rows import RunState

_MIN_CHECK_DELAY = timedelta(minutes=1)


class RunLimits:
    """The time limits of one run, for one pass. A worker claims a suspended run when it reaches a limit."""

    def __init__(
        self,
        definition: Definition,
        claim: Claim,
        run_state: RunState,
        is_satisfied: Callable[[Tx, Claim, StepRow], bool],
    ) -> None:
        self._definition, self._claim, self._is_satisfied = definition, claim, is_satisfied
        self._open = [row for row in run_state.steps if row.status is StepStatus.WAITING]
        self._max_run = definition.max_run_duration if claim.max_run is None else claim.max_run
        started_at = run_state.started_at or claim.claimed_at
        self.ends_at = None if self._max_run is None else started_at + self._max_run
        """When the run reaches the limit of its instance, or else its workflow's; None if it has no limit."""
        self._suspended_since = max((find_waiting_start(row) for row in self._open), default=None)

    @property
    def is_limited(self) -> bool:
        """Whether a run that was just claimed may have to be terminated."""
        return self.ends_at is not None or self._definition.is_limited

    def is_over(self, now: datetime) -> bool:
        return self.ends_at is not None and now >= self.ends_at

    def reset_suspension(self) -> None:
        """Forget when the last suspension began. Called when the pass records something: the next wait is a new one."""
        self._suspended_since = None

    def deadlines(self, now: datetime) -> list[OpenWait]:
        """The times at which a run that is suspended now reaches its limits, in addition to its own waits."""
        limit = self._definition.max_suspend_duration
        ends = [self.ends_at, None if limit is None else (self._suspended_since or now) + limit]
        return [OpenWait(end) for end in ends if end is not None]

    def next_check(self, now: datetime) -> OpenWait:
        """When a run that is suspended now checks the conditions of its waits although nothing has woken it.

        A process may die before it wakes the run. The longer the run has waited, the later: a day takes about ten
        checks.
        """
        waited = now - (self._suspended_since or now)
        return OpenWait(now + max(_MIN_CHECK_DELAY, waited))

    def termination_reason(self, tx: Tx) -> str | None:
        """Return why the claimed run must end. After too long a suspension, a satisfied wait saves it."""
        now, limit = self._claim.claimed_at, self._definition.max_suspend_duration
        if self.is_over(now):
            assert self._max_run is not None
            name = "max_run_duration" if self._claim.max_run is None else "max_run"
            return f"The run took longer than its {name} of {format_limit(self._max_run)}"
        if limit is None or self._suspended_since is None or now < self._suspended_since + limit:
            return None
        due = [due_at <= now for row in self._open if (due_at := row.next_retry_at or row.wake_at) is not None]
        awaiting = [row for row in self._open if row.wait_event_type is not None and row.wake_at is not None]
        limited = [row.step_key for row in self._open if row.waits_for_limits]
        if any(due) or holds.is_granted(tx, self._claim.pk, self._claim.ref.run_number, limited):
            return None
        if any(self._is_satisfied(tx, self._claim, row) for row in awaiting):
            return None
        names = ", ".join(repr(row.name) for row in self._open)
        return f"Waiting at {names} took longer than the max_suspend_duration of {format_limit(limit)}"


def find_waiting_start(row: StepRow) -> datetime:
    """Return when an open step started to wait: its recording or last start, as the end of an attempt is not stored."""
    times = [at for at in (row.created_at, row.started_at) if at is not None]
    return max(times)
