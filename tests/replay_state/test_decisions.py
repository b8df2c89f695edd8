"""What to do about one step, from its row and the time: `decide_do` against a model, `decide_timer` by cases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from celery_durable.model import StepRow, StepStatus, StepType
from celery_durable.replay_state import (
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


def body(status: StepStatus, attempts: int = 0, next_retry_at: datetime | None = None) -> StepRow:
    return StepRow("charge", 1, "charge", StepType.DO, status, attempts, next_retry_at=next_retry_at)


def sleep(status: StepStatus, wake_at: datetime) -> StepRow:
    return StepRow("nap", 1, "nap", StepType.SLEEP, status, wake_at=wake_at)


def expected(
    row: StepRow | None, *, crashes: int, max_attempts: int | None, is_only_open: bool
) -> ReplayStep | RunAttempt | AttemptsExhausted | WaitUntil:
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
    if max_attempts is not None and not used < max_attempts:
        return AttemptsExhausted(max(max_attempts, recorded))
    return RunAttempt(used + 1, count_in_advance=pending or not is_only_open)


def test_every_combination_is_decided_as_the_rules_say() -> None:
    retries = [None, NOW - SECOND, NOW - MICROSECOND, NOW, NOW + MICROSECOND, NOW + SECOND]
    rows = [body(*row) for row in product((StepStatus.PENDING, StepStatus.WAITING, *SETTLED), range(10), retries)]
    for row, crashes, limit, is_only_open in product([None, *rows], range(7), [None, *range(1, 9)], [True, False]):
        verdict = replay_state(crashes).decide_do(row, max_attempts=limit, is_only_open=is_only_open, now=NOW)
        assert verdict == expected(row, crashes=crashes, max_attempts=limit, is_only_open=is_only_open)


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
                assert isinstance(verdict, AttemptsExhausted)
                break
            ran.append(verdict.attempt)
            if verdict.count_in_advance:
                row = body(StepStatus.PENDING, verdict.attempt)
            if fate == "fails":
                row, crashes = body(StepStatus.WAITING, verdict.attempt, NOW), 0
            else:
                crashes += 1
        assert ran == list(range(1, max_attempts + 1)), fates


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
