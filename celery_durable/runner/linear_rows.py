"""The rows of a linear run, and the writes by which its steps go from one status to the next.

``READY -> RUNNING -> DONE | WAITING | READY | DEAD``. If a new pass finds a row RUNNING, its worker has died.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from celery_durable.model import LEASE_EXPIRED, RunOutcome, Status, StepRow, StepStatus, StepWrite
from celery_durable.runner.failed_attempts import describe_unknown_end
from celery_durable.runner.step_commit import StepCommit

_AT_ONCE = timedelta(0)
"""As ``retry_in`` of a READY row: the row may run from the time of the commit on, for the first time or again."""
_NO_ERROR = {"error_name": None, "error_message": None}


class LinearRows:
    """The rows of one run as of the last commit, by position. ``now`` is never ahead of the database's time."""

    def __init__(self, rows: Sequence[StepRow], now: datetime) -> None:
        self.rows, self.now = list(rows), now

    @property
    def current(self) -> StepRow | None:
        return next((row for row in self.rows if row.status is not StepStatus.DONE), None)

    def find_next(self, row: StepRow) -> StepRow | None:
        return next((each for each in self.rows if each.seq == row.seq + 1), None)

    def apply(self, rows: Sequence[StepRow]) -> None:
        """Replace the rows that a commit has recorded, after which the pass continues."""
        by_key = {row.step_key: row for row in rows}
        self.rows = [by_key.get(row.step_key, row) for row in self.rows]
        for row in rows:
            # `next_retry_at` is when a READY row may run, also for the first time. It has no delay, which would end the
            # pass, so it is the time of this commit.
            if row.status is StepStatus.READY and row.next_retry_at is not None:
                self.now = max(self.now, row.next_retry_at)


def is_last_attempt(row: StepRow) -> bool:
    """Whether the step has no attempt left after the one that runs or has just failed."""
    return row.max_attempts is not None and row.attempts + 1 >= row.max_attempts


def build_write(row: StepRow, status: StepStatus, commit_id: str, **changes: Any) -> StepWrite:
    """Build the row with a new status and ``changes``. Everything else stays the same, except the times."""
    unchanged: dict[str, Any] = {
        "attempts": row.attempts,
        "max_attempts": row.max_attempts,
        "timeout": row.timeout,
        "wake_at": row.wake_at,
        "event_type": row.wait_event_type,
        "event_seq": row.event_seq,
        "ask": row.ask,
        "error_name": row.error_name,
        "error_message": row.error_message,
    }
    return StepWrite(
        key=row.step_key,
        seq=row.seq,
        name=row.name,
        type=row.type,
        status=status,
        replaces=row.commit_id,
        commit_id=commit_id,
        **(unchanged | changes),
    )


def build_running_write(row: StepRow, commit_id: str) -> StepWrite:
    """Build the row of a step whose handler is about to be called."""
    # The row's `started_at` is the time of the commit minus `ran_for`.
    return build_write(row, StepStatus.RUNNING, commit_id, ran_for=timedelta(0))


def build_ready_write(row: StepRow, commit_id: str) -> StepWrite:
    """Build the row of a step that may run at once."""
    return build_write(row, StepStatus.READY, commit_id, retry_in=_AT_ONCE)


def build_event_write(row: StepRow, commit_id: str, event_seq: int) -> StepWrite:
    """Build the row of a step whose event has arrived: its handler may be called with it at once."""
    cleared = {"event_type": None, "wake_at": None, **_NO_ERROR}
    return build_write(row, StepStatus.READY, commit_id, event_seq=event_seq, retry_in=_AT_ONCE, **cleared)


def build_wait_write(
    row: StepRow, commit_id: str, *, event_type: str, timeout: timedelta, ran_for: timedelta, **asked: str | None
) -> StepWrite:
    """Build the row of a step that waits for an event; ``asked``: its ``ask`` and ``payload_type``."""
    wait = {"event_type": event_type, "event_seq": None, "wake_in": timeout, "wake_at": None, **asked}
    return build_write(row, StepStatus.LINEAR_WAITING, commit_id, ran_for=ran_for, **wait, **_NO_ERROR)


def build_done_write(row: StepRow, commit_id: str, *, result: str, ran_for: timedelta) -> StepWrite:
    """Build the row of a completed step; ``result`` is JSON text."""
    cleared = {"event_type": None, "wake_at": None, **_NO_ERROR}
    return build_write(row, StepStatus.DONE, commit_id, result=result, ran_for=ran_for, **cleared)


def build_retry_write(
    row: StepRow,
    commit_id: str,
    error: tuple[str, str],
    *,
    retry_in: timedelta = _AT_ONCE,
    ran_for: timedelta | None = None,
) -> StepWrite:
    """Build the row of a step whose attempt has failed and that has attempts left; ``error``: name and message."""
    failed = {"attempts": row.attempts + 1, "error_name": error[0], "error_message": error[1]}
    return build_write(row, StepStatus.READY, commit_id, retry_in=retry_in, ran_for=ran_for, **failed)


def build_failure_commit(
    row: StepRow,
    commit_id: str,
    error: tuple[str, str],
    *,
    ran_for: timedelta | None = None,
    exception: BaseException | None = None,
) -> StepCommit:
    """Build the commit that fails the step and ends the run; ``error``: name and message, as they are stored."""
    name, message = error
    failed = {"attempts": row.attempts + 1, "error_name": name, "error_message": message}
    write = build_write(row, StepStatus.DEAD, commit_id, ran_for=ran_for, **failed)
    outcome = RunOutcome(Status.ERRORED, error_name=name, error_message=message, exception=exception)
    return StepCommit(commit_id, [write], ending=outcome)


def build_lost_worker_commit(row: StepRow, commit_id: str, *, may_repeat: bool) -> StepCommit:
    """Build the commit that records that the worker of the step's attempt died: retry the step, or fail the run."""
    if not may_repeat or row.max_attempts == 1:
        what = f"the worker of attempt {row.attempts + 1} died or lost its lease"
        return build_failure_commit(row, commit_id, describe_unknown_end(what))
    if is_last_attempt(row):
        return build_failure_commit(row, commit_id, (LEASE_EXPIRED, "the worker of the last attempt died"))
    write = build_retry_write(row, commit_id, (LEASE_EXPIRED, "the worker of the attempt died"))
    return StepCommit(commit_id, [write])
