"""Suspension: how a function is left when it must wait, and what happens to code that does not let it go."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import Retries, Step, StepConfig, WorkflowEvent
from celery_durable.errors import Suspend
from tests.support.flows import flow_of
from tests.support.world import World, on_one_database

SWALLOWED = (
    "SuspensionSwallowed: Workflow 'order' returned or raised although it is suspended: it caught celery_durable's "
    "suspension, which a bare `except:`, `except BaseException:` or a `return` in a `finally` does. "
    "Catch Exception instead, then restart the instance."
)


def bare_except(step: Step):
    try:
        step.sleep("rest", 60)
    except:  # noqa: E722
        return "went on"


def base_exception(step: Step):
    try:
        step.wait_for_event("approval", "approval")
    except BaseException as exc:
        raise ValueError("went on") from exc


def return_in_finally(step: Step):
    try:
        step.do("charge", lambda: 1 / 0)
    finally:
        return "went on"  # noqa: B012


def swallow_in_gather(step: Step):
    try:
        step.gather(step.submit("work", lambda: 1), step.submit_sleep("rest", 60))
    except Suspend:
        return "went on"


@on_one_database
@pytest.mark.parametrize("swallow", [bare_except, base_exception, return_in_finally, swallow_in_gather])
def test_a_function_that_swallows_its_suspension_ends_errored_and_is_told_why(world: World, swallow) -> None:
    instance = flow_of(world, lambda step: swallow(step)).run()
    assert instance.error == SWALLOWED
    world.run_after(timedelta(days=2))
    assert instance.error == SWALLOWED


def test_after_a_suspension_no_method_runs_anything(world: World) -> None:
    ran, raised = [], []

    def attempt(method) -> None:
        try:
            method()
        except BaseException as exc:
            raised.append(type(exc))
            raise

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.sleep("rest", 60)
        finally:
            for method in (
                lambda: step.do("a", lambda: ran.append("a")),
                lambda: step.sleep("b", 1),
                lambda: step.wait_for_event("c", "c"),
                lambda: step.submit("d", lambda: ran.append("d")),
                lambda: step.gather(),
                lambda: step.first("e"),
                step.now,
                step.uuid,
            ):
                try:
                    attempt(method)
                except Suspend:
                    pass

    instance = order.run()
    assert instance.statuses() == {"rest": "waiting"}
    assert raised == [Suspend] * 8
    assert ran == []


def test_a_step_in_finally_runs_once_and_when_its_time_has_come(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("charge", StepConfig(retries=Retries(limit=1, delay=5)), lambda: ran.append("charge") or 1 / 0)
        finally:
            step.do("clean up", lambda: ran.append("clean up"))

    instance = order.run()
    assert ran == ["charge"]
    world.run_after(5)
    assert ran == ["charge", "charge", "clean up"]
    assert instance.error == "ZeroDivisionError: division by zero"
    assert instance.statuses() == {"charge": "errored", "clean up": "completed"}


def test_what_is_logged_while_the_function_unwinds_is_kept(world: World) -> None:
    def order_of(wait):
        def order(event: WorkflowEvent, step: Step):
            step.log.info("before")
            try:
                wait(step)
            finally:
                step.log.info("unwinding")

        return order

    waits = {
        "sleep": lambda step: step.sleep("x", 60),
        "wait": lambda step: step.wait_for_event("x", "go"),
        "retry": lambda step: step.do("x", lambda: 1 / 0),
        "gather": lambda step: step.gather(step.submit_sleep("x", 60), step.submit_sleep("y", 60)),
    }
    for name, wait in waits.items():
        instance = world.workflow(order_of(wait), name=name).run()
        assert instance.lines() == ["before", "unwinding"], name


def test_an_author_that_stops_the_process_while_the_function_unwinds_loses_no_attempt(world: World) -> None:
    stop = [True]

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("charge", StepConfig(retries=Retries(limit=1, delay=5)), lambda: 1 / 0)
        finally:
            if stop:
                stop.clear()
                raise SystemExit(0)

    instance = order.create()
    world.new_worker(interruptions=(SystemExit,))
    with pytest.raises(SystemExit):
        world.run_until_idle()
    assert (instance.status, instance.row.claim_token) == ("waiting", None)
    assert (instance.step("charge").status, instance.step("charge").attempts) == ("waiting", 1)
    world.run_after(5)
    assert instance.error == "ZeroDivisionError: division by zero"
    assert instance.step("charge").attempts == 2
