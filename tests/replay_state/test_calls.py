"""Which step a call is: names, kinds, order, limits, and whether the pass still repeats an earlier one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.errors import StepLimitExceeded, StepNameReused
from celery_durable.model import StepRow, StepStatus, StepType
from celery_durable.replay_state import ReplayState, StepEntry

DO, SLEEP, WAIT = StepType.DO, StepType.SLEEP, StepType.WAIT


def row(
    key: str, seq: int, type_: StepType = DO, status: StepStatus = StepStatus.COMPLETED, result: str | None = None
) -> StepRow:
    return StepRow(key, seq, key, type_, status, result=result)


def replay_state(*rows: StepRow, max_steps: int = 1000) -> ReplayState:
    return ReplayState(rows, workflow="order", crash_count=0, max_steps=max_steps)


def recorded(call: StepEntry, type_: StepType = DO, status: StepStatus = StepStatus.COMPLETED) -> StepRow:
    return StepRow(call.key, call.seq, call.name, type_, status)


# --- names --------------------------------------------------------------------------------------


def test_a_call_finds_the_row_of_its_name() -> None:
    charge = row("charge", 1)
    book = replay_state(charge)
    assert book.call("charge", DO, 0) == StepEntry("charge", "charge", 1, charge, is_repeated=False)
    assert book.call("ship", DO, 0) == StepEntry("ship", "ship", 2, None, is_repeated=False)


def test_the_same_work_under_the_same_name_is_the_same_step_again() -> None:
    book = replay_state()
    first = book.call("charge", DO, ("fn", 1))
    again = book.call("charge", DO, ("fn", 1))
    assert not first.is_repeated
    assert again == replace(first, is_repeated=True)


def test_other_work_under_a_recorded_name_is_no_matter_on_its_first_call() -> None:
    """Code changes between passes; only within one pass is the same name for other work a mistake."""
    book = replay_state(row("charge", 1))
    assert book.call("charge", DO, "new code").row is not None


@pytest.mark.parametrize("falsy", [None, 0, ""])
def test_falsy_identities_and_results_are_as_good_as_any(falsy: Any) -> None:
    empty = row("charge", 1, result="null")
    book = replay_state(empty)
    assert book.call("charge", DO, falsy).row is empty
    assert book.call("charge", DO, falsy).is_repeated
    with pytest.raises(StepNameReused):
        book.call("charge", DO, "something")


# --- repetition ---------------------------------------------------------------------------------


def test_repetition_counts_on_from_a_plain_call() -> None:
    book = replay_state()
    plain = book.call("poll", DO, 0)
    counted = [book.call("poll", DO, 0, repeat=True) for _ in range(2)]
    assert len({plain.key, *(call.key for call in counted)}) == 3
    assert book.call("poll", DO, 0).is_repeated


def test_no_name_that_is_allowed_meets_the_key_of_a_repetition() -> None:
    book = replay_state()
    repetition = [book.call("poll", DO, 0, repeat=True).key for _ in range(2)][1]
    assert any(ord(character) < 32 for character in repetition)


# --- limits -------------------------------------------------------------------------------------


def test_recorded_steps_count_even_where_the_code_no_longer_calls_them() -> None:
    book = replay_state(row("old", 1), row("nap", 2, SLEEP), row("charge", 3), max_steps=3)
    book.call("charge", DO, 0)
    book.call("third", WAIT, 0)
    with pytest.raises(StepLimitExceeded):
        book.call("fourth", DO, 0)


def test_a_limit_lowered_by_a_deploy_still_lets_a_run_replay() -> None:
    book = replay_state(row("a", 1), row("b", 2), max_steps=1)
    assert book.call("a", DO, 0).row is not None
    assert book.call("b", DO, 0).row is not None
    with pytest.raises(StepLimitExceeded):
        book.call("c", DO, 0)


def test_a_cancelled_sleep_gives_back_nothing_since_it_cost_nothing() -> None:
    book = replay_state(max_steps=1)
    nap = book.call("nap", SLEEP, 0)
    book.record(recorded(nap, SLEEP, StepStatus.CANCELLED))
    book.call("charge", DO, 0)
    with pytest.raises(StepLimitExceeded):
        book.call("ship", DO, 0)


# --- order --------------------------------------------------------------------------------------

names = st.lists(st.integers(0, 12).map(lambda n: f"step {n}"), min_size=1, max_size=8, unique=True)


@settings(deadline=None, max_examples=100)
@given(names, st.data())
def test_steps_keep_the_order_of_their_calls_however_many_passes_record_them(called: list[str], data: Any) -> None:
    """A pass may die with some of its branches recorded and others not, in any mixture."""
    rows: dict[str, StepRow] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        book = replay_state(*rows.values())
        reached = data.draw(st.integers(0, len(called)))
        for name in called[:reached]:
            call = book.call(name, DO, 0)
            if call.row is None and data.draw(st.booleans()):
                rows[name] = recorded(call)
                book.record(rows[name])
    in_order = [rows[name].seq for name in called if name in rows]
    assert in_order == sorted(set(in_order))


@settings(deadline=None, max_examples=100)
@given(st.lists(names, min_size=1, max_size=5), st.data())
def test_no_two_steps_share_a_place_however_the_code_changes(deploys: list[list[str]], data: Any) -> None:
    rows: dict[str, StepRow] = {}
    for called in deploys:
        book = replay_state(*rows.values())
        in_this_pass: dict[str, int] = {}
        for name in called:
            call = book.call(name, DO, 0)
            assert book.call(name, DO, 0).seq == call.seq
            assert call.seq not in in_this_pass.values()
            in_this_pass[name] = call.seq
            if call.row is None and data.draw(st.booleans()):
                rows[name] = recorded(call)
                book.record(rows[name])
        places = [each.seq for each in rows.values()]
        assert len(places) == len(set(places))


def test_a_branch_whose_sibling_was_recorded_before_it_keeps_its_place_before_it() -> None:
    first_pass = replay_state()
    first_pass.call("charge", DO, 0)
    nap = first_pass.call("nap", SLEEP, 0)
    second_pass = replay_state(recorded(nap, SLEEP))  # the worker died while it charged
    assert second_pass.call("charge", DO, 0).seq < second_pass.call("nap", SLEEP, 0).seq


def test_what_is_recorded_in_a_pass_is_found_in_it() -> None:
    book = replay_state()
    call = book.call("charge", DO, 0)
    assert book.rows.get("charge") is None
    done = recorded(call)
    book.record(done)
    assert book.rows.get("charge") is done
    assert book.call("charge", DO, 0) == StepEntry("charge", "charge", 1, done, is_repeated=True)


# --- replaying ----------------------------------------------------------------------------------


def test_a_new_step_in_between_does_not_end_the_replay() -> None:
    book = replay_state(row("a", 1), row("b", 2))
    book.call("a", DO, 0)
    new = book.call("new", DO, 0)
    book.record(recorded(new))
    book.call("new", DO, 0)
    assert book.is_replaying
    book.call("b", DO, 0)
    assert not book.is_replaying
