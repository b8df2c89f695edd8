"""What waiting for a result does to the clock of a harness."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable.definitions import define
from celery_durable.errors import ResultTimeout


def test_waiting_for_a_result_runs_the_last_work_there_is(make_harness) -> None:
    harness = make_harness(define(lambda event, step: "done", name="instant"))
    start = harness.clock.now
    assert harness.workflow("instant").create().result(timeout=10) == "done"
    assert harness.clock.now == start


def rests(event, step):
    for number in range(5):
        step.sleep(f"rest {number}", "18 days")
    return "rested"


def test_waiting_for_a_result_passes_over_the_time_in_which_nothing_is_due(make_harness) -> None:
    harness = make_harness(define(rests))
    start = harness.clock.now
    assert harness.workflow("rests").create().result() == "rested"
    assert harness.clock.now == start + timedelta(days=90)


def test_waiting_for_a_result_ends_with_its_timeout(make_harness) -> None:
    harness = make_harness(define(rests))
    start = harness.clock.now
    with pytest.raises(ResultTimeout):
        harness.workflow("rests").create().result(timeout="10 days")
    assert harness.clock.now == start + timedelta(days=10)


def test_a_rest_of_time_that_is_shorter_than_a_microsecond_passes(make_harness) -> None:
    harness = make_harness(define(rests))
    harness.advance(9175.934)  # the float of this time and 22.88 s is later than the clock that is set to it
    with pytest.raises(ResultTimeout):
        harness.workflow("rests").create().result(timeout=22.88)
