"""A retry gives the failed step fresh attempts, in a new run that keeps the rest."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import EventTimeout, NonRetryableError, Retries, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.errors import DurationInvalid, InstanceNotErrored
from celery_durable.insight.explain import Code, explain
from celery_durable.model import Origin
from tests.support.flows import flow_of
from tests.support.rewinds import retry, rewind, say
from tests.support.world import World, on_one_database

ONCE = StepConfig(retries=0)


def test_a_retry_gives_the_failed_step_fresh_attempts_and_keeps_the_rest(world: World, ran: list[str]) -> None:
    broken = [True]

    def b(run: int) -> str:
        say(ran, f"b{run}")
        if broken[0]:
            raise ConnectionError("away")
        return f"b{run}"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        a = step.do("a", say, ran, f"a{event.run_number}")
        return [a, step.do("b", StepConfig(retries=Retries(limit=1, delay=10)), b, event.run_number)]

    instance = order.run()
    world.run_after(10)
    assert instance.error == "ConnectionError: away"
    assert retry(instance) == 2
    world.run_until_idle()
    world.run_after(10)
    broken[0] = False
    assert retry(instance) == 3
    world.run_until_idle()
    assert instance.output == ["a1", "b3"]
    assert ran == ["a1", "b1", "b1", "b2", "b2", "b3"]
    assert instance.step("b").attempts == 1
    assert world.operations.history.read("order", "i-1").origin == Origin("i-1", 2, "b")


@pytest.mark.parametrize("status", ["active", "waiting", "paused", "complete", "terminated"])
def test_only_what_has_failed_is_tried_again(world: World, status: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if status != "complete":
            step.sleep("rest", 60)

    instance = order.create()
    if status != "active":
        world.run_until_idle()
    if status == "paused":
        instance.pause()
    if status == "terminated":
        instance.terminate()
    with pytest.raises(InstanceNotErrored) as caught:
        retry(instance)
    assert str(caught.value) == (
        f"Cannot retry instance 'i-1' of workflow 'order': it is {status}, not errored. "
        "To start a new run, restart it from its first step or from a later one."
    )


def test_a_retry_runs_all_failed_branches_again_and_no_finished_sibling(world: World, ran: list[str]) -> None:
    def work(name: str, run: int) -> str:
        say(ran, f"{name}{run}")
        if run == 1 and name in "ac":
            raise NonRetryableError(name)
        return name

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(*(step.submit(name, work, name, event.run_number) for name in "abcd"))

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    assert instance.output == ["a", "b", "c", "d"]
    assert sorted(ran) == ["a1", "a2", "b1", "c1", "c2", "d1"]


def test_a_retry_leaves_failures_that_were_caught(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("card", ONCE, lambda: 1 / 0)
        except StepFailed:
            pass
        return step.do("invoice", ONCE, lambda: 1 // (event.run_number - 1))

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    assert instance.output == 1
    assert instance.step("card") == instance.step("card", run=1)


def test_what_answered_the_failure_is_done_again_where_it_fails_again(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("reserve", say, ran, f"reserve{event.run_number}")
        try:
            step.do("charge", ONCE, lambda: 1 / 0)
        except StepFailed:
            step.do("release", say, ran, f"release{event.run_number}")
            raise RuntimeError("no money") from None

    instance = order.run()
    assert instance.error == "RuntimeError: no money"
    retry(instance)
    world.run_until_idle()
    assert ran == ["reserve1", "release1", "release2"]
    assert instance.statuses() == {"reserve": "completed", "charge": "errored", "release": "completed"}


def test_a_race_that_failed_is_run_again(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        work = step.submit("work", ONCE, lambda: 1 // (event.run_number - 1))
        return step.first("race", step.submit_sleep("limit", 60), work)

    instance = order.run()
    assert instance.error.startswith("ZeroDivisionError")
    retry(instance)
    world.run_until_idle()
    assert instance.output == 1


def test_an_error_of_the_function_itself_is_tried_again_behind_all_its_steps(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", say, ran, f"a{event.run_number}")
        if event.run_number == 1:
            raise ValueError("a bug, fixed meanwhile")
        return "done"

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    assert (instance.output, ran) == ("done", ["a1"])
    assert world.operations.history.read("order", "i-1").origin == Origin("i-1", 1, None)


def test_a_wait_that_timed_out_gets_a_new_deadline_and_the_event_that_was_too_late(world: World) -> None:
    order = flow_of(world, lambda step: step.wait_for_event("approval", "approval", timeout=60).payload)
    instance = order.run()
    world.run_after(61)
    assert instance.error.startswith("EventTimeout")
    retry(instance)
    world.run_until_idle()
    assert instance.run_at == world.now + timedelta(seconds=60)
    instance.send("approval", "yes")
    world.run_until_idle()
    assert instance.output == "yes"


@on_one_database
def test_event_timeouts_are_not_mistaken_for_results(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            return step.wait_for_event("approval", "approval", timeout=60).payload
        except EventTimeout:
            return "late"

    instance = order.run()
    world.run_after(61)
    rewind(instance, "approval")
    instance.send("approval", "in time")
    world.run_until_idle()
    assert instance.output == "in time"


def test_a_retry_with_a_delay_starts_after_it(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        a = step.do("a", say, ran, f"a{event.run_number}")
        if event.run_number == 1:
            step.do("b", ONCE, ran.index, "nothing")
        return [a, step.do("b", say, ran, "b2")]

    instance = order.run()
    assert instance.status == "errored"
    assert world.operations.rewind.retry("order", "i-1", delay="10 minutes", reason="later") == 2
    assert (instance.status, instance.run_at - world.now) == ("waiting", timedelta(minutes=10))
    assert world.tick() == []
    found = explain(world.operations.queries.facts("order", "i-1"))
    assert (found.code, found.sentence) == (Code.SCHEDULED, "A new run is to start later, and starts in 10 min.")
    world.run_after(599)
    assert ran == ["a1"]
    world.run_after(1)
    assert (instance.status, instance.output) == ("complete", ["a1", "b2"])


def test_wake_starts_a_delayed_retry_early_and_a_pause_keeps_its_time(world: World, abc, ran: list[str]) -> None:
    del ran[:]

    @world.workflow(name="fails")
    def fails(event: WorkflowEvent, step: Step):
        step.do("a", ONCE, ran.index, f"nothing {event.run_number}")

    instance = fails.run()
    world.operations.rewind.retry("fails", "i-1", delay=60)
    world.operations.lifecycle.pause("fails", "i-1")
    world.operations.lifecycle.resume("fails", "i-1")
    assert (instance.status, instance.run_at - world.now) == ("waiting", timedelta(minutes=1))
    assert world.operations.lifecycle.wake("fails", "i-1")
    world.run_until_idle()
    assert instance.error == "ValueError: 'nothing 2' is not in list"


def test_a_delay_that_cannot_be_is_refused(world: World) -> None:
    for delay in ("-1 s", "366 days", "soon"):
        with pytest.raises(DurationInvalid):
            world.operations.rewind.retry("order", "i-1", delay=delay)
