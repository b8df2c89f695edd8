"""What a test gets wrong about the kit itself is said, and does not pass for a result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from celery_durable import NonRetryableError, Step, WorkflowEvent
from celery_durable.errors import InstantInvalid, WorkflowNotFound
from celery_durable.testing import DurableHarness, HarnessMisuse, SampledSchedules, assert_crash_safe


def trip(event: WorkflowEvent[Any], step: Step) -> str:
    hotel = step.do("hotel", lambda: "H1")
    step.sleep("think about it", "2 days")
    return step.do("pay", lambda: f"{hotel} paid")


def refused(event: WorkflowEvent[Any], step: Step) -> None:
    def refuse() -> None:
        raise NonRetryableError("no card", "CardDeclined")

    step.do("pay", refuse)


# --- assert_crash_safe --------------------------------------------------------------------------


def test_a_workflow_that_fails_undisturbed_is_not_called_crash_safe() -> None:
    with pytest.raises(HarnessMisuse) as caught:
        assert_crash_safe(refused)
    assert str(caught.value) == (
        "Workflow 'refused' ends errored with CardDeclined: no card, also undisturbed, and not complete. If it is "
        "meant to fail, pass expect_error='CardDeclined'."
    )
    assert assert_crash_safe(refused, expect_error="CardDeclined", schedules=9).crashes


@pytest.mark.parametrize(("code", "how"), [(trip, "complete"), (refused, "errored with CardDeclined: no card")])
def test_an_error_that_is_expected_and_does_not_come_is_a_failure(code: Any, how: str) -> None:
    with pytest.raises(HarnessMisuse, match=rf"ends {how}, also undisturbed, and not errored with Timeout\."):
        assert_crash_safe(code, expect_error="Timeout")


@pytest.mark.slow
def test_a_sample_of_schedules_says_that_it_is_one() -> None:
    def long(event: WorkflowEvent[Any], step: Step) -> None:
        for number in range(30):
            step.do(f"step {number}", lambda: None)

    with pytest.warns(SampledSchedules, match=r"^200 of \d+ schedules are run, which the seed chooses\. ") as seen:
        report = assert_crash_safe(long)
    assert f"schedules={report.possible} runs all" in str(seen[0].message)
    assert report.is_sample
    assert report.schedules == 200 < report.possible
    assert not assert_crash_safe(trip).is_sample


# --- mocks ------------------------------------------------------------------------------------

MOCKS: dict[str, Callable[[DurableHarness], Any]] = {
    "result": lambda harness: harness.mocks.mock_step_result("hotle", "H1"),
    "error": lambda harness: harness.mocks.mock_step_error("hotle", ValueError),
    "task": lambda harness: harness.mocks.mock_task("hotle", len),
    "timeout": lambda harness: harness.mocks.force_step_timeout("hotle"),
    "crash": lambda harness: harness.faults.crash_in_step("hotle"),
    "barrier": lambda harness: harness.faults.hold("hotle"),
    "sleep": lambda harness: harness.mocks.disable_sleeps(["hotle"]),
    "retry": lambda harness: harness.mocks.disable_retry_delays(["hotle"]),
    "event": lambda harness: harness.mocks.force_event_timeout("hotle"),
}
MISNAMED = "Mocks name step 'hotle', to which no workflow came. Steps that were met: 'hotel', 'pay', 'think about it'."


@pytest.mark.parametrize("mock", MOCKS)
def test_a_double_that_names_no_step_is_an_error(mock: str) -> None:
    def run(*, unused_mocks: bool) -> None:
        with DurableHarness([trip], unused_mocks=unused_mocks) as harness:
            MOCKS[mock](harness)
            harness.create(trip)
            harness.advance("3 days")

    with pytest.raises(HarnessMisuse) as caught:
        run(unused_mocks=False)
    assert str(caught.value) == (f"{MISNAMED} Correct the name, or allow it: DurableHarness(unused_mocks=True).")
    run(unused_mocks=True)


def test_a_crash_is_before_or_after_the_function_of_its_step() -> None:
    when: Any = "during"
    with DurableHarness([trip]) as harness, pytest.raises(HarnessMisuse) as caught:
        harness.faults.crash_in_step("hotel", when=when)
    assert str(caught.value) == "when='during' for step 'hotel': use 'before' or 'after'."


def test_it_is_one_in_the_setup_of_assert_crash_safe_too() -> None:
    with pytest.raises(HarnessMisuse) as caught:
        assert_crash_safe(trip, setup=MOCKS["result"])
    assert str(caught.value) == f"{MISNAMED} Correct the names in setup=."


def test_a_test_that_fails_by_itself_says_why_and_not_that_a_double_was_unused() -> None:
    def fail() -> None:
        with DurableHarness([trip]) as harness:
            harness.mocks.mock_step_result("hotle", "H1")
            pytest.fail("its own reason")

    with pytest.raises(pytest.fail.Exception, match="its own reason"):
        fail()


def test_what_a_double_means_for_the_test_itself_is_no_failed_attempt() -> None:
    def run() -> None:
        with DurableHarness([trip]) as harness:
            harness.mocks.mock_step_error("hotel", pytest.fail.Exception("must not be called"))
            harness.create(trip)
            harness.run_until_idle()

    with pytest.raises(pytest.fail.Exception, match="must not be called"):
        run()


# --- the harness --------------------------------------------------------------------------------


def test_a_naive_instant_explains_itself() -> None:
    with DurableHarness([trip]) as harness:
        harness.create(trip)
        with pytest.raises(InstantInvalid, match="advance_to"):
            harness.advance_to(datetime(2031, 1, 1))  # it is what is refused


def test_durable_tick_runs_what_is_due_with_the_harness_s_runners_and_mocks() -> None:
    with DurableHarness([trip]) as harness:
        harness.mocks.mock_step_result("hotel", "H2")
        handle = harness.create(trip)
        harness.messages.clear()  # as where cron ticks, and no worker listens
        assert harness.durable.tick(max_steps=1) == 1
        assert [step.name for step in handle.steps()] == ["hotel"]
        while harness.durable.tick():
            pass
        assert harness.clock.now < harness.next_due()
        harness.clock.advance("2 days")
        assert harness.durable.tick() == 1
        assert handle.result() == "H2 paid"


def test_a_second_runner_may_be_one_of_a_release_that_does_not_know_a_workflow() -> None:
    with DurableHarness([trip, refused]) as harness:
        old = harness.second_runner(without=[trip])
        handle = harness.create(trip)
        assert harness.deliver(handle, to=old) == "noop: workflow 'trip' is unknown to this worker"
        other = harness.create(refused)
        assert harness.deliver(other, to=old) == "errored: CardDeclined"
        harness.advance("3 days")  # the runner of the new release takes it over
        assert handle.result() == "H1 paid"
        with pytest.raises(WorkflowNotFound):
            harness.second_runner(without=["tripp"])


def test_a_second_runner_keeps_the_code_that_it_was_made_with() -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> str:
        return step.do("hotel", lambda: "of today")

    today.__name__ = today.__qualname__ = "trip"
    with DurableHarness([trip, refused]) as harness:
        old = harness.second_runner(without=[refused])
        harness.deploy(today)
        handle = harness.create(trip)
        harness.deliver(handle, to=old)
        assert next(step.result for step in handle.steps()) == "H1"
