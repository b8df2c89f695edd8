"""Which rows a run begins with, and what its code sees: pure, from rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.ancestry import (
    AncestorRun,
    Ancestry,
    RunFailure,
    find_closest_names,
    find_last_seq,
    select_rows_before,
    select_rows_for_retry,
)
from celery_durable.model import RunRef, StepRow, StepStatus, StepType

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
DO, COMPLETED, CANCELLED = StepType.DO, StepStatus.COMPLETED, StepStatus.CANCELLED


def row(key: str, seq: int, status: StepStatus = COMPLETED, commit_id: str = "") -> StepRow:
    return StepRow(key, seq, key, DO, status, commit_id=commit_id or f"commit of {key}")


def keys(rows: list[StepRow]) -> list[str]:
    return [row.step_key for row in rows]


RACE = [
    row("a", 1),
    row("loser", 2, CANCELLED, "race"),
    row("winner", 3, COMPLETED, "race"),
    row("other", 4, CANCELLED, "race"),
    row("race", 5, COMPLETED, "race"),
    row("b", 6),
]


def test_a_race_is_kept_or_dropped_as_a_whole() -> None:
    assert keys(select_rows_before(RACE, RACE[5])) == ["a", "loser", "winner", "other", "race"]
    for target in RACE[1:5]:
        assert keys(select_rows_before(RACE, target)) == ["a"]
    assert keys(select_rows_before(RACE, RACE[0])) == []


def test_a_race_that_failed_is_dropped_with_its_losers() -> None:
    rows = [*RACE[:2], row("winner", 3, StepStatus.ERRORED, "race"), *RACE[3:]]
    assert keys(select_rows_for_retry(rows, RunFailure(("winner", "race"), 5))) == ["a"]


def test_what_terminate_cancelled_lost_no_race() -> None:
    rows = [row("a", 1), row("open", 2, CANCELLED), row("b", 3)]
    assert keys(select_rows_before(rows, rows[2])) == ["a"]
    assert keys(select_rows_for_retry(rows, None)) == ["a", "b"]


def test_the_nearest_names_come_first() -> None:
    keys = ["charge card", "ship", "charge cart", "tell"]
    assert find_closest_names("chargecard", keys) == ["charge card", "charge cart"]
    assert find_closest_names("xyz", keys) == ["charge card", "ship", "charge cart"]
    assert find_closest_names("xyz", []) == []


rows = st.lists(st.sampled_from(list(StepStatus)), min_size=1, max_size=12).map(
    lambda statuses: [row(f"s{seq}", seq, status) for seq, status in enumerate(statuses, 1)]
)


@settings(deadline=None)
@given(rows=rows, data=st.data())
def test_nothing_open_and_nothing_from_the_target_on_is_kept(rows: list[StepRow], data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(rows))
    kept = select_rows_before(rows, target)
    assert all(row.is_finished and row.seq < target.seq for row in kept)
    assert {row.step_key for row in rows if row.status is COMPLETED and row.seq < target.seq} <= set(keys(kept))


@settings(deadline=None)
@given(rows=rows, data=st.data())
def test_a_retry_keeps_every_success_up_to_the_failure(rows: list[StepRow], data: st.DataObject) -> None:
    failed = data.draw(st.sampled_from(rows))
    kept = keys(select_rows_for_retry(rows, RunFailure((failed.step_key,), failed.seq)))
    assert failed.step_key not in kept
    assert {row.step_key for row in rows if row.status is COMPLETED and row.seq < failed.seq} <= set(kept)


# --- what the code sees -------------------------------------------------------------------------


def started(number: int, text: str | None = None) -> Ancestry:
    return Ancestry.parse(text, ref=RunRef("order", "o-1", number), created_at=BEGAN + timedelta(days=number))


def test_a_run_from_nothing_sees_itself() -> None:
    ancestry = started(1)
    assert ancestry.ancestors == (AncestorRun("order/o-1/1", BEGAN + timedelta(days=1)),)
    assert ancestry.ancestor_at(0) is ancestry.ancestor_at(99)
    assert ancestry.origin_run("charge") == "order/o-1/1"


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 9), max_size=6))
def test_up_to_the_last_kept_call_the_code_sees_what_it_saw_there(cuts: list[int]) -> None:
    seen = {seq: started(1).ancestor_at(seq).run for seq in range(12)}
    ancestry = started(1)
    for number, seq in enumerate(cuts, 2):
        ancestry = started(number, ancestry.for_continuation(seq).text)
        own = f"order/o-1/{number}"
        seen = {at: run if at < seq else own for at, run in seen.items()}
        assert {at: ancestry.ancestor_at(at).run for at in seen} == seen


def test_a_retried_step_keeps_its_identity_until_it_is_retried_no_more() -> None:
    first = started(1)
    second = started(2, first.for_continuation(3, retried=["charge"]).text)
    third = started(3, second.for_continuation(3, retried=["charge"]).text)
    assert [run.origin_run("charge") for run in (second, third)] == ["order/o-1/1"] * 2
    assert third.origin_run("ship") == "order/o-1/3"
    assert started(4, third.for_continuation(2).text).origin_run("charge") == "order/o-1/4"


def test_a_failure_is_stored_as_it_is() -> None:
    failure = RunFailure(("größe", "b"), 7)
    assert RunFailure.parse(failure.text) == failure
    assert RunFailure.parse(None) is None


def test_the_last_place_of_nothing_is_the_beginning() -> None:
    assert (find_last_seq([]), find_last_seq(RACE)) == (0, 6)
