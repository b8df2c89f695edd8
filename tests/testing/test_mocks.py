"""Mocks of steps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import EventTimeout, NonRetryableError, Retries, StepConfig, StepFailed, StepTimeout
from celery_durable.definitions import define
from celery_durable.testing import START, HarnessMisuse


def never(*_: object):
    raise AssertionError("the body was called")


def simple(event, step):
    return step.do("charge", StepConfig(retries=Retries(limit=3, delay="10s", backoff="constant")), never)


@pytest.mark.parametrize("value", [None, 0, "", [], False, {"paid": 5}])
def test_a_mocked_result_takes_the_bodys_place_whatever_it_is(make_harness, value) -> None:
    harness = make_harness(simple)
    charge = harness.mocks.mock_step_result("charge", value)
    handle = harness.create(simple)
    harness.run_until_idle()
    assert handle.result() == value
    assert handle.step("charge").result == value
    assert charge.calls == 1
    assert repr(charge) == "<Mock of step 'charge', used 1 times>"


def test_a_mocked_result_is_checked_as_the_bodys_would_be(make_harness) -> None:
    def price() -> int:
        return 1

    def typed(event, step):
        return step.do(price)

    harness = make_harness(typed)
    harness.mocks.mock_step_result("price", "a lot")
    handle = harness.create(typed)
    harness.run_until_idle()
    assert handle.error.name == "StepResultInvalid"


def test_errors_come_as_often_as_they_are_asked_for_and_the_retries_after_them(make_harness) -> None:
    harness = make_harness(simple)
    harness.mocks.mock_step_error("charge", ConnectionError("no bank"), times=2)
    harness.mocks.mock_step_result("charge", "paid")
    handle = harness.create(simple)
    harness.run_until_idle()
    assert handle.step("charge").next_retry_at == START + timedelta(seconds=10)
    assert handle.step("charge").error.message == "no bank"
    harness.advance(20)
    assert handle.result() == "paid"
    assert handle.step("charge").attempts == 3


def test_an_error_that_stays_fails_the_step(make_harness) -> None:
    def careful(event, step):
        try:
            return step.do("charge", never)
        except StepFailed as failure:
            return failure.error_name

    harness = make_harness(careful)
    harness.mocks.mock_step_error("charge", NonRetryableError("no money", name="Declined"))
    harness.mocks.disable_retry_delays()
    handle = harness.create(careful)
    harness.run_until_idle()
    assert handle.result() == "Declined"


def test_a_forced_timeout_is_an_attempt_that_timed_out(make_harness) -> None:
    def slow(event, step):
        try:
            return step.do("ask", StepConfig(retries=1, timeout="5 minutes"), never)
        except StepTimeout as failure:
            return failure.attempts

    harness = make_harness(slow)
    ask = harness.mocks.force_step_timeout("ask")
    handle = harness.create(slow)
    harness.advance("1 hour")
    assert handle.result() == 2
    assert ask.calls == 2
    assert handle.step("ask").error.message == "attempt 2 took longer than 5 min"


def test_a_timeout_can_be_forced_on_a_step_without_a_timeout(make_harness) -> None:
    def endless(event, step):
        step.do("ask", StepConfig(retries=0, timeout=None), never)

    harness = make_harness(endless)
    harness.mocks.force_step_timeout("ask")
    handle = harness.create(endless)
    harness.run_until_idle()
    assert handle.step("ask").error.message == "attempt 1 took longer than its timeout"


def test_a_body_that_takes_longer_than_its_timeout_on_the_clock_times_out(make_harness) -> None:
    harness: Any = None

    def slow(event, step):
        return step.do("ask", StepConfig(retries=0, timeout="5 minutes"), lambda: harness.clock.advance("6 minutes"))

    harness = make_harness(slow)
    handle = harness.create(slow)
    harness.run_until_idle()
    assert handle.error.name == "StepTimeout"


def test_sleeps_can_be_left_out_all_or_by_name(make_harness) -> None:
    def sleepy(event, step):
        step.sleep("short", "1 day")
        step.sleep_until("until", START + timedelta(days=30))
        step.sleep("long", "100 days")
        return step.now().isoformat()

    harness = make_harness(sleepy)
    harness.mocks.disable_sleeps(["long", "until"])
    handle = harness.create(sleepy)
    harness.advance("1 day")
    assert handle.result() == "2030-01-02T00:00:00+00:00"
    harness.mocks.disable_sleeps()
    other = harness.create(sleepy)
    harness.run_until_idle()
    assert other.has_ended
    with pytest.raises(HarnessMisuse, match=r"Step names come in a list: \['long'\]\."):
        harness.mocks.disable_sleeps("long")


def test_delays_of_retries_can_be_left_out_all_or_by_name(make_harness) -> None:
    harness = make_harness(simple)
    harness.mocks.mock_step_error("charge", ValueError("no"), times=3)
    harness.mocks.mock_step_result("charge", "paid")
    harness.mocks.disable_retry_delays(["charge"])
    handle = harness.create(simple)
    harness.run_until_idle()
    assert handle.result() == "paid"
    assert harness.clock.now == START
    assert handle.step("charge").attempts == 4


def waits(event, step):
    try:
        return step.wait_for_event("approval", "approved", timeout="24 hours").payload
    except EventTimeout:
        return "expired"


def test_a_mocked_event_is_sent_to_each_instance_that_waits_for_it(make_harness) -> None:
    harness = make_harness(waits)
    first = harness.create(waits, id="before")
    harness.run_until_idle()
    sent = harness.mocks.mock_event("approved", {"by": "eve"}, times=2)
    second, third = harness.create(waits, id="after"), harness.create(waits, id="third")
    harness.run_until_idle()
    assert first.result() == second.result() == {"by": "eve"}
    assert third.is_waiting
    assert sent.calls == 2
    assert len(first.events()) == 1


@pytest.mark.parametrize("is_early", [False, True])
def test_a_wait_times_out_at_once_also_where_its_event_has_come(make_harness, is_early) -> None:
    harness = make_harness(waits)
    harness.mocks.force_event_timeout("approval")
    handle = harness.create(waits)
    if is_early:
        handle.send_event("approved", 1)
    harness.run_until_idle()
    assert handle.result() == "expired"
    assert handle.step("approval").error.message == "No event 'approved' came within 1 d"
    assert [event.consumed_by_step_key for event in handle.events()] == [None] * is_early


def test_a_double_serves_one_workflow_if_it_is_named(make_harness) -> None:
    harness = make_harness(simple, define(simple, name="other"))
    harness.mocks.mock_step_result("charge", "mine", workflow="simple")
    harness.mocks.mock_step_result("charge", "theirs", workflow="other")
    one, other = harness.create("simple"), harness.create("other")
    harness.run_until_idle()
    assert (one.result(), other.result()) == ("mine", "theirs")


def test_a_name_that_no_step_has_shows_in_its_calls(make_harness) -> None:
    harness = make_harness(simple)
    wrong = harness.mocks.mock_step_result("chagre", 1)
    harness.mocks.mock_step_result("charge", 1)
    harness.create(simple)
    harness.run_until_idle()
    assert wrong.calls == 0
    with pytest.raises(HarnessMisuse, match=r"times=0 for step 'charge': use a number from 1, or None for always\."):
        harness.mocks.mock_step_result("charge", 1, times=0)


def test_mocks_reach_into_branches(make_harness) -> None:
    def wide(event, step):
        return step.gather(*(step.submit(f"ask {name}", never) for name in "abc"))

    harness = make_harness(wide)
    for name in "abc":
        harness.mocks.mock_step_result(f"ask {name}", name)
    handle = harness.create(wide)
    harness.run_until_idle()
    assert handle.result() == ["a", "b", "c"]
    assert sorted(attempt.step for attempt in harness.attempts) == ["ask a", "ask b", "ask c"]
