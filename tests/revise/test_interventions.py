"""Steps that people settle by hand: set a result, skip."""

from __future__ import annotations

import pytest

from celery_durable import Retries, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.errors import (
    InstanceTerminal,
    NameInvalid,
    StepNotFound,
    StepNotOpen,
    ValueRefused,
)
from tests.support.flows import flow_of
from tests.support.world import World

ONCE = StepConfig(retries=0)


@pytest.fixture
def failing(world: World):
    return flow_of(
        world,
        lambda step: step.do("charge", StepConfig(retries=Retries(limit=1, delay=600)), lambda: 1 / 0),
        name="failing",
    )


def test_an_open_step_is_settled_in_its_run_which_goes_on(world: World, failing) -> None:
    instance = failing.run()
    run = world.operations.interventions.set_result(
        "failing", "i-1", "charge", {"paid": 5}, by="eve", reason="by hand, #42"
    )
    world.run_until_idle()
    assert (run, instance.output) == (1, {"paid": 5})
    (audit,) = world.operations.history.read("failing", "i-1").audit
    assert (audit.step_key, audit.action, audit.by, audit.reason) == ("charge", "set_result", "eve", "by hand, #42")
    assert (audit.before.status, audit.before.attempts, audit.run_number) == ("waiting", 1, 1)
    assert (audit.before.error.name, audit.created_at) == ("ZeroDivisionError", world.now)
    with pytest.raises(InstanceTerminal, match="it is complete"):
        world.operations.interventions.skip("failing", "i-1", "charge", by="eve")


def test_a_step_that_ended_its_instance_is_settled_in_a_new_run(world: World, failing) -> None:
    instance = failing.run()
    world.run_after(600)
    world.prior_runs["failing", "i-1", 1] = world.recorded(instance, 1)
    assert world.operations.interventions.skip("failing", "i-1", "charge", by="eve") == 2
    world.run_until_idle()
    assert instance.output is None
    assert instance.step("charge").attempts == 2
    (audit,) = world.operations.history.read("failing", "i-1").audit
    assert (audit.action, audit.before.status, audit.reason) == ("skip", "errored", None)
    assert world.operations.history.read("failing", "i-1", run=1).audit == ()


def test_a_sleep_is_skipped_and_a_wait_is_given_an_event(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", "30 days")
        return [step.wait_for_event(name, "approval").payload for name in ("one", "two")]

    instance = order.run()
    with pytest.raises(ValueRefused) as caught:
        world.operations.interventions.set_result("order", "i-1", "rest", 1, by="eve")
    assert str(caught.value) == "Step 'rest' is a sleep and has no result. Skip it instead."
    world.operations.interventions.skip("order", "i-1", "rest", by="eve")
    world.run_until_idle()
    world.operations.interventions.set_result("order", "i-1", "one", "yes", by="eve")
    world.run_until_idle()
    world.operations.interventions.skip("order", "i-1", "two", by="eve")
    world.run_until_idle()
    assert instance.output == ["yes", None]
    assert instance.events() == [("approval", "yes", "one"), ("approval", None, "two")]


def test_a_settled_wait_is_in_time_although_its_deadline_has_passed(world: World) -> None:
    order = flow_of(world, lambda step: step.wait_for_event("approval", "approval", timeout=60).payload)
    instance = order.run()
    world.advance(61)
    world.operations.interventions.set_result("order", "i-1", "approval", "yes", by="eve")
    world.run_until_idle()
    assert instance.output == "yes"


@pytest.mark.parametrize("step", ["a", "c"])
def test_what_has_ended_is_not_settled_again(world: World, step: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: 1)
        try:
            step.do("c", ONCE, lambda: 1 / 0)
        except StepFailed:
            step.sleep("b", 60)

    instance = order.run()
    before = instance.row
    with pytest.raises(StepNotOpen) as caught:
        world.operations.interventions.set_result("order", "i-1", step, 2, by="eve")
    assert str(caught.value) == (
        f"Step {step!r} of run 1 of instance 'i-1' of workflow 'order' is {instance.step(step).status}. Only an open "
        "step, or one that ended an errored instance, can be completed by hand. "
        "To run it again, restart the instance from this step."
    )
    assert instance.row == before
    with pytest.raises(StepNotFound):
        world.operations.interventions.skip("order", "i-1", "d", by="eve")
    with pytest.raises(NameInvalid):
        world.operations.interventions.skip("order", "i-1", "b", by="")
    instance.terminate()
    with pytest.raises(InstanceTerminal) as ended:
        world.operations.interventions.skip("order", "i-1", "b", by="eve")
    assert str(ended.value).startswith("Cannot skip a step of instance 'i-1' of workflow 'order': it is terminated.")


def test_a_paused_instance_stays_paused(world: World, failing) -> None:
    instance = failing.run()
    instance.pause()
    world.operations.interventions.set_result("failing", "i-1", "charge", 1, by="eve")
    world.run_until_idle()
    assert instance.status == "paused"
    instance.resume()
    world.run_until_idle()
    assert instance.output == 1


def test_a_runner_in_flight_changes_nothing_after_its_step_was_settled(world: World) -> None:
    ran = []

    def charge(attempt_of: list[str]) -> str:
        attempt_of.append("charge")
        if len(attempt_of) == 1:
            raise ConnectionError("away")
        instance.pause()  # asked for, and obeyed by who takes the claim away
        world.operations.interventions.set_result("order", "i-1", "charge", "by hand", by="eve")
        return "by the worker"

    order = flow_of(world, lambda step: step.do("charge", StepConfig(retries=Retries(limit=3, delay=10)), charge, ran))
    instance = order.run()
    world.advance(10)
    assert instance.advance().startswith("superseded")
    assert (instance.status, instance.step("charge").result) == ("paused", "by hand")
    instance.resume()
    world.run_until_idle()
    assert (instance.output, ran) == ("by hand", ["charge", "charge"])


def test_siblings_whose_bodies_ran_lose_no_attempt_when_a_step_is_settled(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    ran = []

    def work() -> str:
        ran.append("work")
        if len(ran) == 1:  # its run keeps the open attempt
            world.restart(instance)
        elif len(ran) == 2:
            world.operations.interventions.set_result("order", "i-1", "approval", "yes", by="eve")
        return "worked"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        approval = step.submit_wait_for_event("approval", "approval")
        return step.gather(approval, step.submit("work", ONCE, work))[1]

    instance = order.create()
    world.run_until_idle()
    assert (instance.output, ran) == ("worked", ["work"] * 3)
    assert instance.step("work").attempts == 1
