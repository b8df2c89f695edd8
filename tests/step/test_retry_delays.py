"""Delays that a function of the author chooses, and jitter: for each kind of step that is attempted."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import LinearStep, Retries, Step, StepConfig, StepFailed, WorkflowEvent, durable_workflow
from celery_durable.errors import RetryDelayInvalid
from celery_durable.testing import DurableHarness
from tests.step.test_retries import Failing, Flaky, charging, run_to_the_end
from tests.support.answers import answer, resize
from tests.support.lines import Line
from tests.support.mapping import mapping
from tests.support.world import World


class RateLimited(Exception):
    retry_after = 42


def wanted_by_the_server(attempt: int, error: BaseException) -> int:
    return error.retry_after if isinstance(error, RateLimited) else attempt


@pytest.mark.parametrize(("error", "gaps"), [(RateLimited("later"), [42, 42]), (Flaky("no"), [1, 2])])
def test_a_function_of_attempt_and_error_chooses_the_delay(world: World, error: Exception, gaps: list[int]) -> None:
    charge = Failing(world, error=error)

    instance = charging(world, charge, StepConfig(retries=Retries(limit=2, delay=wanted_by_the_server))).create()
    run_to_the_end(world, instance)
    assert charge.gaps == gaps
    assert instance.error == f"{type(error).__name__}: {error}"


def test_a_timeout_is_given_to_the_function_as_a_failed_step(world: World) -> None:
    seen: list[Any] = []

    def delay(attempt: int, error: BaseException) -> str:
        seen.append((attempt, type(error), error.error_name))  # type: ignore[attr-defined]
        return "7 s"

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        config = StepConfig(retries=Retries(limit=1, delay=delay), timeout="10 ms")
        step.do("charge", config, lambda: threading.Event().wait(60))

    assert order.run().status == "waiting"
    assert seen == [(1, StepFailed, "StepTimeout")]


BAD: list[tuple[Any, str]] = [
    (lambda attempt, error: error.retry_after, "AttributeError: 'Flaky' object has no attribute 'retry_after'"),
    (lambda attempt, error: -1, "DurationInvalid: "),
    (lambda attempt, error: None, "DurationInvalid: "),
    (lambda attempt: 1, "TypeError: "),
]


@pytest.mark.parametrize(("delay", "reason"), BAD)
def test_a_function_that_gives_no_delay_fails_the_step_at_once(world: World, delay: Any, reason: str) -> None:
    charge = Failing(world)
    causes: list[BaseException | None] = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        try:
            step.do("charge", StepConfig(retries=Retries(limit=None, delay=delay)), charge)
        except StepFailed as exc:
            causes.append(exc.__cause__)
            raise

    instance = order.run()
    assert (instance.status, len(charge.at), instance.step("charge").attempts) == ("errored", 1, 1)
    assert instance.error.startswith(
        f"RetryDelayInvalid: The function delay= of step 'charge' gave no delay after attempt 1: {reason}"
    )
    assert instance.error.endswith("The attempt had failed: Flaky: the bank is closed")
    (cause,) = causes
    assert isinstance(cause, RetryDelayInvalid)
    assert type(cause.__cause__).__name__ == reason.partition(":")[0]


def test_a_linear_step_has_a_function_too(world: World) -> None:
    pay = Failing(world, times=2, error=RateLimited())
    line = Line(world, [LinearStep("PAY", delay=wanted_by_the_server)], PAY=lambda ctx: pay())
    instance = line.flow.create()
    world.run_until_idle()
    assert instance.run_at - world.now == timedelta(seconds=42)


def test_a_function_that_gives_no_delay_fails_a_linear_step(world: World) -> None:
    line = Line(world, [LinearStep("PAY", delay=BAD[0][0])], PAY=lambda ctx: Failing(world)())
    assert line.flow.run().error.startswith("RetryDelayInvalid: The function delay= of step 'PAY'")


def test_a_task_and_the_items_of_a_map_give_their_error_as_a_failed_step(world: World) -> None:
    seen: list[tuple[int, str]] = []

    def delay(attempt: int, error: BaseException) -> int:
        seen.append((attempt, str(error)))
        if attempt == 2:
            raise KeyError("retry_after")
        return 30

    @world.workflow
    def media(event: WorkflowEvent[int], step: Step) -> Any:
        return step.task("thumb", resize.s(event.payload, crop=True), retries=Retries(limit=3, delay=delay))

    of_task = media.run(300)
    answer(world, world.sent[0], error=OSError("disk full"))
    world.run_until_idle()
    world.run_after(30)
    answer(world, world.sent[1], error=OSError("disk full"))
    world.run_until_idle()
    failed = "The attempt had failed: OSError: disk full"
    assert of_task.error.startswith("RetryDelayInvalid: The function delay= of step 'thumb' gave no delay after ")
    assert of_task.error.endswith(failed)
    of_map = mapping(world, 1, retries=Retries(limit=3, delay=delay)).run()
    answer(world, world.sent[2], error=OSError("disk full"))
    world.run_until_idle()
    world.run_after(30)
    answer(world, world.sent[3], error=OSError("disk full"))
    world.run_until_idle()
    name, error_name, message, attempts = of_map.output
    assert (name, error_name, attempts) == ("StepFailed", "RetryDelayInvalid", 2)
    assert message.endswith(failed)
    assert seen == [
        (1, "Step 'thumb' failed after 1 attempt: OSError: disk full"),
        (2, "Step 'thumb' failed after 2 attempts: OSError: disk full"),
        (1, "Step 'convert' failed after 1 attempt: OSError: disk full"),
        (2, "Step 'convert' failed after 2 attempts: OSError: disk full"),
    ]


def test_jitter_spreads_what_failed_together_and_is_the_same_for_the_same_seed() -> None:
    def delays(seed: int) -> list[float]:
        with DurableHarness([order], seed=seed) as harness:
            made = [harness.create(order, id=f"o-{i}") for i in range(9)]
            harness.run_until_idle()
            charges = [each.history().steps[0] for each in made]
            return [(each.next_retry_at - harness.clock.now).total_seconds() for each in charges if each.next_retry_at]

    found = delays(seed=1)
    assert len(set(found)) == 9
    assert all(50 <= each <= 100 for each in found)
    assert delays(seed=1) == found
    assert delays(seed=2) != found


def decline() -> None:
    raise Flaky("the bank is closed")


@durable_workflow(name="order-with-jitter")
def order(event: WorkflowEvent[None], step: Step) -> None:
    step.do("charge", StepConfig(retries=Retries(delay=100, jitter=0.5)), decline)
