"""The replay decisions of a pass: whether a step call returns a recorded result, runs, waits or fails.

The module is pure: no clock, no SQL, no threads. ``now`` is an argument and each decision is a return value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_durable.errors import StepLimitExceeded, StepNameReused, StepTypeMismatch
from celery_durable.model import LIMITS_KEY, REPEAT_SEPARATOR, StepRow, StepStatus, StepType, hot_dataclass


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """The step has finished: return its recorded result, or raise its recorded failure."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Run the body as this attempt. ``count_in_advance``: commit a pending row that counts it before."""

    attempt: int
    count_in_advance: bool


@dataclass(frozen=True, slots=True)
class AttemptsExhausted:
    """All attempts are used up, by failures or by workers that died: fail the step without running it."""

    attempts: int


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The end of this attempt is unknown, and the body may not be called again: fail the step without running it."""

    attempt: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """The step waits for a time: do nothing before ``until``."""

    until: datetime


@dataclass(frozen=True, slots=True)
class FinishTimer:
    """The recorded wake time has passed: finish the sleep."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class AwaitAnswer:
    """A task or a child was started for this step. Check whether it has answered."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class RecordNew:
    """The step has no row yet: record it."""


@hot_dataclass()
class StepEntry:
    """The step of one call in this pass. ``seq``: its number in call order. ``is_repeated``: it was called before."""

    key: str
    name: str
    seq: int
    row: StepRow | None
    is_repeated: bool


class ReplayState:
    """The steps of one run: the recorded rows, and the calls of this pass."""

    def __init__(self, rows: Iterable[StepRow], *, workflow: str, crash_count: int, max_steps: int) -> None:
        self.rows = {row.step_key: row for row in rows}
        """The current row of each key that has one."""
        self._workflow, self._crash_count, self._max_steps = workflow, crash_count, max_steps
        self._recorded_seqs = {row.seq for row in self.rows.values()}
        self._last_recorded_seq = max(self._recorded_seqs, default=0)
        self._last_seq = self._last_replayed_seq = 0
        self._called: dict[str, tuple[StepType, Any, int]] = {}
        self._occurrences: dict[str, int] = {}
        self._reserved: set[str] = set()
        self._counted_steps = sum(_counts_toward_limit(row) for row in self.rows.values())

    @property
    def is_replaying(self) -> bool:
        """Whether the code has not yet reached the last step that an earlier pass recorded."""
        return self._last_replayed_seq < self._last_recorded_seq

    @property
    def last_seq(self) -> int:
        """The highest call number that the code has reached, 0 before the first call."""
        return self._last_seq

    @property
    def uncalled(self) -> list[StepRow]:
        """The recorded steps that this pass has not called, in call order."""
        return sorted(
            (row for key, row in self.rows.items() if key not in self._called and key != LIMITS_KEY),
            key=lambda row: (row.seq, row.step_key),
        )

    def call(self, name: str, type_: StepType, identity: Any, *, repeat: bool = False) -> StepEntry:
        """Find the step of a call. Raises StepNameReused, StepTypeMismatch and StepLimitExceeded.

        ``identity``: equal for calls that do the same work. ``repeat``: each call of the name is a step of its own.
        """
        key = self._build_key(name, repeat=repeat)
        if key in self._reserved:
            raise StepNameReused(name, concurrently=True)
        row = self.rows.get(key)
        earlier_call = self._called.get(key)
        recorded_type = row.type if row is not None else earlier_call[0] if earlier_call is not None else type_
        if recorded_type is not type_:
            raise StepTypeMismatch(name, recorded_type.value, type_.value)
        if earlier_call is not None and earlier_call[1] != identity:
            raise StepNameReused(name)
        if earlier_call is None and row is None and type_ is not StepType.SLEEP:
            if self._counted_steps >= self._max_steps:
                raise StepLimitExceeded(self._workflow, self._max_steps)
            self._counted_steps += 1
        if row is not None and row.seq in self._recorded_seqs:
            self._last_replayed_seq = max(self._last_replayed_seq, row.seq)
        seq = row.seq if row is not None else earlier_call[2] if earlier_call is not None else self._next_seq()
        self._last_seq = max(self._last_seq, seq)
        self._called[key] = (type_, identity, seq)
        return StepEntry(key=key, name=name, seq=seq, row=row, is_repeated=earlier_call is not None)

    def reserve_name(self, key: str) -> None:
        """Reserve the key of a submitted branch: the code may not use it again until `release_name`."""
        self._reserved.add(key)

    def release_name(self, key: str) -> None:
        """Release the key of a branch that was gathered or raced: the code may use it again."""
        self._reserved.discard(key)

    def record(self, row: StepRow) -> None:
        """Add a committed row. It resets the crash count, unless it only counts an attempt in advance."""
        if row.status is StepStatus.CANCELLED and not row.is_timer_step:
            self._counted_steps -= 1
        self.rows[row.step_key] = row
        if row.status is not StepStatus.PENDING:
            self._crash_count = 0

    def decide_do(
        self,
        row: StepRow | None,
        *,
        max_attempts: int | None,
        is_only_open: bool,
        now: datetime,
        may_repeat: bool = True,
    ) -> ReplayStep | RunAttempt | AttemptsExhausted | AttemptLost | WaitUntil:
        """Decide about a `do` call. ``may_repeat``: also after an attempt whose end is unknown.

        ``is_only_open``: no other step is open, so the crashes since the last commit count as attempts of this step.
        """
        if row is not None and row.is_finished:
            return ReplayStep(row)
        if row is not None and row.next_retry_at is not None and row.next_retry_at > now:
            return WaitUntil(row.next_retry_at)
        attempts = 0 if row is None else row.attempts
        is_counted = row is not None and row.status is StepStatus.PENDING
        crashes = self._crash_count if is_only_open and not is_counted else 0  # otherwise the row counts them already
        if (crashes or (row is not None and row.is_end_unknown)) and (not may_repeat or max_attempts == 1):
            return AttemptLost(attempts if is_counted else attempts + 1)
        attempts += crashes
        if max_attempts is not None and attempts >= max_attempts:
            # Crashes before the body started may exceed the limit, but the step records at most ``max_attempts``.
            return AttemptsExhausted(max(0 if row is None else row.attempts, max_attempts))
        return RunAttempt(attempts + 1, count_in_advance=is_counted or not is_only_open)

    @staticmethod
    def decide_timer(row: StepRow | None, *, now: datetime) -> ReplayStep | FinishTimer | WaitUntil | RecordNew:
        """Decide about a sleep. Its wake time was recorded at the first call."""
        if row is None:
            return RecordNew()
        if row.is_finished:
            return ReplayStep(row)
        assert row.wake_at is not None
        return FinishTimer(row) if row.wake_at <= now else WaitUntil(row.wake_at)

    @staticmethod
    def decide_remote(row: StepRow | None, *, now: datetime) -> ReplayStep | RunAttempt | WaitUntil | AwaitAnswer:
        """Decide about a remote step. A row with a retry time has no attempt in flight."""
        if row is None:
            return RunAttempt(1, count_in_advance=False)
        if row.is_finished:
            return ReplayStep(row)
        if row.waits_for_limits:
            return RunAttempt(row.attempts + 1, count_in_advance=False)
        if row.next_retry_at is None:
            return AwaitAnswer(row)
        return (
            WaitUntil(row.next_retry_at)
            if row.next_retry_at > now
            else RunAttempt(row.attempts + 1, count_in_advance=False)
        )

    def _next_seq(self) -> int:
        """The next number that no recorded row has. It may be below a recorded one, of an earlier branch."""
        seq = self._last_seq + 1
        while seq in self._recorded_seqs:
            seq += 1
        return seq

    def _build_key(self, name: str, *, repeat: bool) -> str:
        if not repeat:
            self._occurrences.setdefault(name, 1)
            return name
        occurrence = self._occurrences[name] = self._occurrences.get(name, 0) + 1
        return name if occurrence == 1 else f"{name}{REPEAT_SEPARATOR}{occurrence}"


def _counts_toward_limit(row: StepRow) -> bool:
    """Whether a step counts toward `max_steps`. Sleeps and branches that lost a race do not count."""
    return row.step_key != LIMITS_KEY and not row.is_timer_step and row.status is not StepStatus.CANCELLED
