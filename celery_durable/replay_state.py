"""The pure brain of a pass: recorded steps and a step call -> replay, run, wait or give up.

No clock, no SQL, no threads: ``now`` comes in, verdicts go out, so that the rules of replay can be
read and tested by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_durable.errors import StepLimitExceeded, StepNameReused, StepTypeMismatch
from celery_durable.model import StepRow, StepStatus, StepType

# Outside what a step name may contain, so that "x" called twice never meets a step named "x 2".
_REPEAT_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """The step has ended before: hand out what is recorded, result or failure."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Run the body as this attempt. ``announce``: write the pending row first."""

    attempt: int
    precount: bool


@dataclass(frozen=True, slots=True)
class AttemptsExhausted:
    """Dead workers used up all attempts: end the step without running it."""

    attempts: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Not before ``until``."""

    until: datetime


@dataclass(frozen=True, slots=True)
class FinishTimer:
    """The recorded time has come: end the sleep, or settle the wait."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class AwaitAnswer:
    """Somebody else is at it, or has answered by now."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class RecordNew:
    """Never seen: record it."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One call of a step method in this pass."""

    key: str
    name: str
    seq: int
    row: StepRow | None
    is_repeated: bool


class ReplayState:
    """The steps of one run, as recorded, and as called in this pass."""

    def __init__(self, rows: Iterable[StepRow], *, workflow: str, crash_count: int, max_steps: int) -> None:
        self._rows = {row.step_key: row for row in rows}
        self._workflow, self._crash_count, self._max_steps = workflow, crash_count, max_steps
        self._recorded_seqs = {row.seq for row in self._rows.values()}
        self._last_recorded = max(self._recorded_seqs, default=0)
        self._last_seq = self._last_replayed = 0
        self._called: dict[str, tuple[StepType, Any, int]] = {}
        self._occurrences: dict[str, int] = {}
        self._reserved: set[str] = set()
        self._counted = sum(_counts_toward_limit(row) for row in self._rows.values())

    @property
    def is_replaying(self) -> bool:
        """Whether the code still stands before the last step that an earlier pass recorded."""
        return self._last_replayed < self._last_recorded

    @property
    def last_seq(self) -> int:
        """How far the code has come: the number of its last call, 0 before the first."""
        return self._last_seq

    @property
    def uncalled(self) -> list[StepRow]:
        """What is recorded, and has not been called in this pass; in call order."""
        return sorted(
            (row for key, row in self._rows.items() if key not in self._called), key=lambda row: (row.seq, row.step_key)
        )

    def call(self, name: str, type_: StepType, identity: Any, *, repeat: bool = False) -> StepEntry:
        """Identify a step call. ``identity`` compares equal for the same work (function and arguments).

        Raises StepNameReused, StepTypeMismatch, StepLimitExceeded.
        """
        key = self._key(name, repeat=repeat)
        if key in self._reserved:
            raise StepNameReused(name, concurrently=True)
        row = self._rows.get(key)
        before = self._called.get(key)
        recorded_type = row.type if row is not None else before[0] if before is not None else type_
        if recorded_type is not type_:
            raise StepTypeMismatch(name, recorded_type.value, type_.value)
        if before is not None and before[1] != identity:
            raise StepNameReused(name)
        if before is None and row is None and type_ is not StepType.SLEEP:
            if self._counted >= self._max_steps:
                raise StepLimitExceeded(self._workflow, self._max_steps)
            self._counted += 1
        if row is not None and row.seq in self._recorded_seqs:
            self._last_replayed = max(self._last_replayed, row.seq)
        seq = row.seq if row is not None else before[2] if before is not None else self._next_seq()
        self._last_seq = max(self._last_seq, seq)
        self._called[key] = (type_, identity, seq)
        return StepEntry(key=key, name=name, seq=seq, row=row, is_repeated=before is not None)

    def reserve_name(self, key: str) -> None:
        """A branch of this key is submitted: until `let_go`, the name cannot be called again."""
        self._reserved.add(key)

    def release_name(self, key: str) -> None:
        """The branch is taken up: its name is free."""
        self._reserved.discard(key)

    def record(self, row: StepRow) -> None:
        """A boundary committed this row. Crashes are counted since the last step that got further."""
        if row.status is StepStatus.CANCELLED and not row.is_timer_step:
            self._counted -= 1
        self._rows[row.step_key] = row
        if row.status is not StepStatus.PENDING:
            self._crash_count = 0

    def row(self, key: str) -> StepRow | None:
        """What is recorded under a key by now."""
        return self._rows.get(key)

    def decide_do(
        self, row: StepRow | None, *, max_attempts: int | None, alone: bool, now: datetime
    ) -> ReplayStep | RunAttempt | AttemptsExhausted | WaitUntil:
        """What to do about a `do` call. ``alone``: nothing else is open, so crashes since the boundary are its own."""
        if row is not None and row.is_finished:
            return ReplayStep(row)
        if row is not None and row.next_retry_at is not None and row.next_retry_at > now:
            return WaitUntil(row.next_retry_at)
        attempts = 0 if row is None else row.attempts
        is_precounted = row is not None and row.status is StepStatus.PENDING
        if alone and not is_precounted:  # an announced attempt is counted in its row already
            attempts += self._crash_count
        if max_attempts is not None and attempts >= max_attempts:
            # Workers that died before the body began are no attempts beyond the last.
            return AttemptsExhausted(max(0 if row is None else row.attempts, max_attempts))
        return RunAttempt(attempts + 1, precount=is_precounted or not alone)

    @staticmethod
    def decide_timer(row: StepRow | None, *, now: datetime) -> ReplayStep | FinishTimer | WaitUntil | RecordNew:
        """What to do about a sleep: its wake time was fixed when it was first reached."""
        if row is None:
            return RecordNew()
        if row.is_finished:
            return ReplayStep(row)
        assert row.wake_at is not None
        return FinishTimer(row) if row.wake_at <= now else WaitUntil(row.wake_at)

    @staticmethod
    def decide_remote(row: StepRow | None, *, now: datetime) -> ReplayStep | RunAttempt | WaitUntil | AwaitAnswer:
        """What to do about a step that others do: a row with a time to wait for names no attempt that is out."""
        if row is None:
            return RunAttempt(1, precount=False)
        if row.is_finished:
            return ReplayStep(row)
        if row.next_retry_at is None:
            return AwaitAnswer(row)
        return WaitUntil(row.next_retry_at) if row.next_retry_at > now else RunAttempt(row.attempts + 1, precount=False)

    def _next_seq(self) -> int:
        """The next number that no row has; not above them all, for a later sibling may have been recorded before us."""
        seq = self._last_seq + 1
        while seq in self._recorded_seqs:
            seq += 1
        return seq

    def _key(self, name: str, *, repeat: bool) -> str:
        if not repeat:
            self._occurrences.setdefault(name, 1)
            return name
        nth = self._occurrences[name] = self._occurrences.get(name, 0) + 1
        return name if nth == 1 else f"{name}{_REPEAT_SEPARATOR}{nth}"


def _counts_toward_limit(row: StepRow) -> bool:
    """Whether a step counts against the limit: sleeps are free, and so is a branch that lost its race."""
    return not row.is_timer_step and row.status is not StepStatus.CANCELLED
