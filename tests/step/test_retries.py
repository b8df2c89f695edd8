"""Retries: when, how often, with which error, and what the workflow sees of it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import Retries, Step, StepConfig, StepFailed, WorkflowEvent, durable_step
from tests.support.flows import flow_of
from tests.support.world import FlowControl, World, on_one_database


class Flaky(Exception):
    pass


class Failing:
    """A body that fails ``times`` times, and keeps the moments of its attempts."""

    def __init__(self, world: World, times: int = 10**6, error: Exception | None = None, takes: float = 0) -> None:
        self.world, self.times, self.takes = world, times, takes
        self.error = error or Flaky("the bank is closed")
        self.at: list[int] = []

    def __call__(self) -> str:
        self.at.append(self.world.now_us)
        self.world.advance(self.takes)
        if len(self.at) <= self.times:
            raise self.error
        return "paid"

    @property
    def gaps(self) -> list[float]:
        """Seconds between an attempt's end and the next attempt."""
        return [(b - a) / 1_000_000 - self.takes for a, b in zip(self.at, self.at[1:], strict=False)]


def charging(world: World, charge: Failing, config: StepConfig | None = None) -> FlowControl:
    """A workflow whose one step is this body."""
    return flow_of(world, lambda step: step.do("charge", config or StepConfig(), charge))


def run_to_the_end(world: World, instance, limit: int = 50) -> None:
    """Go from one due time to the next."""
    world.run_until_idle()
    for _ in range(limit):
        if instance.status.is_terminal:
            return
        assert instance.run_at > world.now
        world.advance(instance.run_at - world.now - timedelta(microseconds=1))
        world.run_until_idle()
        world.run_after(timedelta(microseconds=1))


def test_by_default_a_step_is_tried_five_times_more_after_10_20_40_80_and_160_seconds(world: World) -> None:
    charge = Failing(world)

    instance = charging(world, charge).create()
    run_to_the_end(world, instance)
    assert charge.gaps == [10, 20, 40, 80, 160]
    assert instance.error == "Flaky: the bank is closed"
    assert (instance.step("charge").attempts, instance.step("charge").max_attempts) == (6, 6)


def test_the_delay_counts_from_the_failure_not_from_the_start_of_the_attempt(world: World) -> None:
    charge = Failing(world, times=2, takes=7)

    instance = charging(world, charge).create()
    run_to_the_end(world, instance)
    assert instance.output == "paid"
    assert charge.gaps == [10, 20]
    assert instance.step("charge").attempts == 3


@on_one_database
@pytest.mark.parametrize(
    ("retries", "gaps"),
    [
        (Retries(limit=3, delay=5, backoff="constant"), [5, 5, 5]),
        (Retries(limit=3, delay="5 s", backoff="linear"), [5, 10, 15]),
        (Retries(limit=3, delay=timedelta(seconds=5), backoff="exponential"), [5, 10, 20]),
        (Retries(limit=4, delay=5, backoff="exponential", max_delay=12), [5, 10, 12, 12]),
        (Retries(limit=2, delay=0), [0, 0]),
        (Retries(limit=0), []),
        (1, [10]),
        (Retries(backoff="constant"), [10, 10, 10, 10, 10]),
    ],
)
def test_what_a_config_leaves_out_comes_from_the_defaults(world: World, retries, gaps) -> None:
    charge = Failing(world)

    instance = charging(world, charge, StepConfig(retries=retries)).create()
    run_to_the_end(world, instance)
    assert charge.gaps == gaps
    assert instance.error == "Flaky: the bank is closed"


def test_configs_of_app_workflow_function_and_call_are_laid_over_each_other(make_world) -> None:
    world = make_world(step_defaults=StepConfig(retries=Retries(limit=9, delay=100, backoff="constant"), timeout=50))
    charge = Failing(world)

    @durable_step(retries=Retries(delay=3))
    def pay() -> str:
        return charge()

    order = flow_of(
        world,
        lambda step: step.do("charge", StepConfig(retries=Retries(limit=2)), pay),
        step_defaults=StepConfig(retries=Retries(limit=4)),
    )
    instance = order.create()
    run_to_the_end(world, instance)
    assert charge.gaps == [3, 3]
    assert instance.step("charge").timeout == timedelta(seconds=50)


def test_without_a_limit_a_step_is_tried_until_it_succeeds(world: World) -> None:
    charge = Failing(world, times=30)

    instance = charging(world, charge, StepConfig(retries=Retries(limit=None, delay=1, backoff="constant"))).create()
    run_to_the_end(world, instance)
    assert instance.output == "paid"
    assert (instance.step("charge").attempts, instance.step("charge").max_attempts) == (31, None)


def test_a_nonretryable_error_is_known_by_its_name_too(world: World) -> None:
    foreign = type("NonRetryableError", (Exception,), {})
    charge = Failing(world, error=foreign("from a copy of the class"))

    order = flow_of(world, lambda step: step.do("charge", charge))
    assert order.run().error == "NonRetryableError: from a copy of the class"
    assert len(charge.at) == 1


def test_a_failed_step_raises_the_same_on_the_first_pass_and_on_every_replay(world: World) -> None:
    charge = Failing(world, error=Flaky("the bank is closed"))
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("charge", StepConfig(retries=1), charge)
        except StepFailed as exc:
            seen.append((type(exc), str(exc), exc.step, exc.error_name, exc.error_message, exc.attempts, exc.__cause__))
        step.sleep("rest", 60)
        return step.do("tell", lambda: "told")

    instance = order.create()
    run_to_the_end(world, instance)
    assert instance.output == "told"
    first, replay = seen
    assert (
        first[:-1]
        == replay[:-1]
        == (
            StepFailed,
            "Step 'charge' failed after 2 attempts: Flaky: the bank is closed",
            "charge",
            "Flaky",
            "the bank is closed",
            2,
        )
    )
    assert first[-1] is charge.error
    assert replay[-1] is None
    assert len(charge.at) == 2


def test_the_original_error_is_not_what_a_workflow_catches(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("charge", StepConfig(retries=0), Failing(world))
        except Flaky:
            return "caught the original"

    assert order.run().error == "Flaky: the bank is closed"


def test_an_error_that_is_raised_from_a_failed_step_ends_the_instance_under_its_own_name(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("charge", StepConfig(retries=0), Failing(world))
        except StepFailed as exc:
            raise LookupError("no payment") from exc

    assert order.run().error == "LookupError: no payment"


def test_retries_run_under_the_config_of_the_code_that_is_deployed(world: World) -> None:
    charge = Failing(world)

    instance = charging(world, charge).run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", StepConfig(retries=0), charge)

    world.run_after(10)
    assert instance.error == "Flaky: the bank is closed"
    assert (instance.step("charge").attempts, len(charge.at)) == (1, 1)


def test_a_step_that_succeeds_after_all_leaves_no_error_behind(world: World) -> None:
    charge = Failing(world, times=1)

    instance = charging(world, charge).run()
    world.run_after(10)
    assert instance.output == "paid"
    step = instance.step("charge")
    assert (step.error, step.next_retry_at, step.attempts, step.result) == (None, None, 2, "paid")
