"""What to do about one step, from its row and the time: `decide_do` against a model, `decide_timer` by cases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from celery_durable.model import StepRow, StepStatus, StepType
from celery_durable.replay_state import (
    AttemptLost,
    AttemptsExhausted,
    FinishTimer,
    RecordNew,
    ReplayState,
    ReplayStep,
    RunAttempt,
    WaitUntil,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
SETTLED = (StepStatus.COMPLETED, StepStatus.ERRORED, StepStatus.CANCELLED)


def replay_state(crash_count: int = 0, *rows: StepRow) -> ReplayState:
    return ReplayState(rows, workflow="order", crash_count=crash_count, max_steps=10)


def body(
    status: StepStatus, attempts: int = 0, next_retry_at: datetime | None = None, error_name: str | None = None
) -> StepRow:
    retry: Any = {"next_retry_at": next_retry_at, "error_name": error_name}
    return StepRow("charge", 1, "charge", StepType.DO, status, attempts, **retry)


def sleep(status: StepStatus, wake_at: datetime) -> StepRow:
    return StepRow("nap", 1, "nap", StepType.SLEEP, status, wake_at=wake_at)


def expected(
    row: StepRow | None, *, crashes: int, max_attempts: int | None, is_only_open: bool, may_repeat: bool
) -> ReplayStep | RunAttempt | AttemptsExhausted | AttemptLost | WaitUntil:
    """The rules, said once more and differently: who has used up how many attempts, and who may blame whom."""
    if row is not None and row.status in SETTLED:
        return ReplayStep(row)
    if row is not None and row.next_retry_at in (NOW + MICROSECOND, NOW + SECOND):
        assert row.next_retry_at is not None
        return WaitUntil(row.next_retry_at)
    pending = row is not None and row.status is StepStatus.PENDING
    recorded = row.attempts if row is not None else 0
    mine = crashes if is_only_open and not pending else 0
    used = recorded + mine
    has_begun = mine > 0 or (pending and recorded > 0 and row is not None and row.error_name is None)
    if has_begun and (max_attempts == 1 or not may_repeat):
        return AttemptLost(recorded if pending else recorded + 1)
    if max_attempts is not None and not used < max_attempts:
        return AttemptsExhausted(max(max_attempts, recorded))
    return RunAttempt(used + 1, count_in_advance=pending or not is_only_open)


def test_every_combination_is_decided_as_the_rules_say() -> None:
    retries = [None, NOW - SECOND, NOW - MICROSECOND, NOW, NOW + MICROSECOND, NOW + SECOND]
    statuses = (StepStatus.PENDING, StepStatus.WAITING, *SETTLED)
    rows = [body(*row) for row in product(statuses, range(6), retries, [None, "OSError"])]
    booleans = product([True, False], repeat=2)
    cases = product([None, *rows], range(4), [None, *range(1, 5)], booleans)
    for row, crashes, limit, (is_only_open, may_repeat) in cases:
        case: Any = {"max_attempts": limit, "is_only_open": is_only_open, "may_repeat": may_repeat}
        verdict = replay_state(crashes).decide_do(row, now=NOW, **case)
        assert verdict == expected(row, crashes=crashes, **case)


def test_no_history_of_failures_and_dead_workers_runs_a_step_too_often() -> None:
    """One step through passes that each end in a recorded failure or with their worker."""
    histories = product(range(1, 7), [True, False], product(["fails", "dies"], repeat=7))
    for max_attempts, is_only_open, fates in histories:
        row: StepRow | None = None
        crashes, ran = 0, []
        for fate in fates:
            state = replay_state(crashes)
            verdict = state.decide_do(row, max_attempts=max_attempts, is_only_open=is_only_open, now=NOW)
            if not isinstance(verdict, RunAttempt):
                is_lost = max_attempts == 1 and fates[0] == "dies"
                assert isinstance(verdict, AttemptLost if is_lost else AttemptsExhausted)
                break
            ran.append(verdict.attempt)
            if verdict.count_in_advance:
                row = body(StepStatus.PENDING, verdict.attempt)
            if fate == "fails":
                row, crashes = body(StepStatus.WAITING, verdict.attempt, NOW), 0
            else:
                crashes += 1
        assert ran == list(range(1, max_attempts + 1)), fates


def test_a_body_that_may_not_be_repeated_is_called_once_for_each_failure_and_once_more_at_most() -> None:
    """``stops``: the worker stops before the body begins, and takes back what it has counted.

    ``alone_from``: from this pass on, the steps beside it have finished.
    """
    for alone_from, fates in product(range(6), product(["fails", "dies", "stops"], repeat=6)):
        row: StepRow | None = None
        crashes, begun, failed = 0, 0, 0
        for number, fate in enumerate(fates):
            verdict = replay_state(crashes).decide_do(
                row, max_attempts=None, is_only_open=number >= alone_from, now=NOW, may_repeat=False
            )
            if not isinstance(verdict, RunAttempt):
                assert verdict == AttemptLost(failed + 1)
                break
            before = row
            if verdict.count_in_advance:
                row = body(StepStatus.PENDING, verdict.attempt)
            if fate == "stops":
                if verdict.count_in_advance:
                    error = None if before is None else before.error_name
                    row = body(StepStatus.PENDING, verdict.attempt - 1, error_name=error)
                continue
            begun += 1
            if fate == "fails":
                failed, crashes = failed + 1, 0
                row = body(StepStatus.WAITING, verdict.attempt, NOW, "OSError")
            else:
                crashes += 1
        assert begun <= failed + 1, fates
        assert begun == failed or isinstance(verdict, AttemptLost) or fate == "dies", fates


def test_dead_workers_count_as_attempts_of_the_only_step_that_was_open() -> None:
    assert replay_state(2).decide_do(None, max_attempts=6, is_only_open=True, now=NOW) == RunAttempt(
        3, count_in_advance=False
    )
    failed_once = body(StepStatus.WAITING, 1, NOW)
    assert replay_state(2).decide_do(failed_once, max_attempts=6, is_only_open=True, now=NOW) == RunAttempt(
        4, count_in_advance=False
    )


def test_attempts_used_up_by_dead_workers_end_the_step_without_running_it() -> None:
    assert replay_state(3).decide_do(None, max_attempts=3, is_only_open=True, now=NOW) == AttemptsExhausted(3)
    assert replay_state(4).decide_do(None, max_attempts=3, is_only_open=True, now=NOW) == AttemptsExhausted(3)
    assert replay_state(0).decide_do(
        body(StepStatus.WAITING, 4), max_attempts=3, is_only_open=True, now=NOW
    ) == AttemptsExhausted(4)
    assert replay_state(0).decide_do(
        body(StepStatus.PENDING, 3), max_attempts=3, is_only_open=False, now=NOW
    ) == AttemptsExhausted(3)
    assert replay_state(99).decide_do(None, max_attempts=None, is_only_open=True, now=NOW) == RunAttempt(
        100, count_in_advance=False
    )


def test_a_boundary_takes_the_blame_for_crashes_off_what_comes_after_it() -> None:
    book = replay_state(2)
    book.record(StepRow("other", 1, "other", StepType.DO, StepStatus.COMPLETED))
    assert book.decide_do(None, max_attempts=2, is_only_open=True, now=NOW) == RunAttempt(1, count_in_advance=False)


def test_announcing_an_attempt_takes_the_blame_for_crashes_off_nobody() -> None:
    book = replay_state(2)
    book.record(StepRow("other", 1, "other", StepType.DO, StepStatus.PENDING, attempts=1))
    assert book.decide_do(None, max_attempts=2, is_only_open=True, now=NOW) == AttemptsExhausted(2)


# --- timers -------------------------------------------------------------------------------------


def test_a_sleep_that_was_never_reached_is_recorded_first() -> None:
    assert ReplayState.decide_timer(None, now=NOW) == RecordNew()


@pytest.mark.parametrize("status", [StepStatus.WAITING, StepStatus.PENDING])
def test_a_sleep_ends_at_its_wake_time_and_not_before(status: StepStatus) -> None:
    row = sleep(status, NOW)
    assert ReplayState.decide_timer(row, now=NOW - MICROSECOND) == WaitUntil(NOW)
    assert ReplayState.decide_timer(row, now=NOW) == FinishTimer(row)
    assert ReplayState.decide_timer(row, now=NOW + SECOND) == FinishTimer(row)


@pytest.mark.parametrize("status", SETTLED)
def test_a_sleep_that_has_ended_is_replayed_whatever_the_time(status: StepStatus) -> None:
    row = sleep(status, NOW + SECOND)
    assert ReplayState.decide_timer(row, now=NOW) == ReplayStep(row)
