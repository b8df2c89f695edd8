"""Runs that take too long, and suspensions that last too long, are ended with a reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery_durable import NonRetryableError, Step, WorkflowEvent
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.world import FlowControl, World, on_one_database

database = on_databases("sqlite", "postgresql", "mariadb")


def reason(world: World, id: str = "i-1") -> str | None:
    return world.operations.history.read("order", id).reason


def waiting(world: World, **limits: Any) -> FlowControl:
    """A workflow that waits for an approval longer than it may."""
    return flow_of(world, lambda step: step.wait_for_event("approved", "approval", timeout="30 days").payload, **limits)


def test_a_run_that_takes_longer_than_its_workflow_allows_is_terminated(world: World) -> None:
    @world.workflow(max_run_duration="2 days")
    def order(event: WorkflowEvent, step: Step):
        step.do("work", lambda: 1)
        step.wait_for_event("approved", "approval", timeout="30 days")

    instance = order.run()
    assert instance.run_at == world.now + timedelta(days=2)
    world.run_after(timedelta(days=2) - timedelta(microseconds=1))
    assert instance.status == "waiting"
    world.run_after(timedelta(microseconds=1))
    assert instance.status == "terminated"
    assert reason(world) == "The run took longer than its max_run_duration of 2 d"
    assert instance.statuses() == {"work": "completed", "approved": "cancelled"}


def test_a_run_does_not_sleep_beyond_its_limit(world: World) -> None:
    instance = flow_of(world, lambda step: step.sleep("rest", "30 days"), max_run_duration="2 days").run()
    assert instance.run_at == world.now + timedelta(days=2)
    world.run_after(timedelta(days=2))
    assert instance.status == "terminated"


@on_one_database
def test_a_restart_begins_a_new_time(world: World) -> None:
    instance = waiting(world, max_run_duration="2 days").run()
    world.run_after(timedelta(days=1))
    instance.restart()
    world.run_until_idle()
    world.run_after(timedelta(days=1))
    assert instance.status == "waiting"
    instance.send("approval")
    world.run_until_idle()
    assert instance.status == "complete"


@on_one_database
def test_the_time_of_a_run_counts_from_its_first_pass(world: World) -> None:
    order = flow_of(world, lambda step: step.sleep("rest", "1 day"), max_run_duration="2 days")
    instance = order.create(run_at=world.now + timedelta(days=10))
    world.run_after(timedelta(days=10))
    assert instance.status == "waiting"
    world.run_after(timedelta(days=1))
    assert instance.status == "complete"


@on_one_database
def test_a_run_that_is_at_work_when_its_time_is_up_ends_at_the_next_boundary(world: World) -> None:
    ran = []

    @world.workflow(max_run_duration="1 minute")
    def order(event: WorkflowEvent, step: Step):
        step.do("long", lambda: world.clock.advance(timedelta(seconds=70)))
        step.do("never", lambda: ran.append(1))

    instance = order.run()
    assert (instance.status, instance.statuses(), ran) == ("terminated", {"long": "completed"}, [])
    assert reason(world) == "The run took longer than its max_run_duration of 1 min"


@on_one_database
def test_what_returns_in_time_is_complete_though_it_is_recorded_late(world: World) -> None:
    @world.workflow(max_run_duration="1 minute")
    def order(event: WorkflowEvent, step: Step):
        step.do("long", lambda: world.clock.advance(timedelta(seconds=70)))
        return "done"

    assert order.run().output == "done"


@on_one_database
def test_a_paused_run_is_terminated_when_it_is_resumed(world: World) -> None:
    instance = waiting(world, max_run_duration="1 day").run()
    instance.pause()
    world.run_after(timedelta(days=3))
    assert instance.status == "paused"
    instance.resume()
    world.run_until_idle()
    assert instance.status == "terminated"


def test_a_suspension_that_lasts_too_long_ends_the_run(world: World) -> None:
    @world.workflow(max_suspend_duration="1 day")
    def order(event: WorkflowEvent, step: Step):
        step.sleep("short", "20 h")
        step.sleep("as long as it may", "24 h")
        step.wait_for_event("approved", "approval", timeout="30 days")

    instance = order.run()
    world.run_after(timedelta(hours=20))
    world.run_after(timedelta(hours=24))
    assert instance.statuses() == {"short": "completed", "as long as it may": "completed", "approved": "waiting"}
    world.run_after(timedelta(hours=24) - timedelta(microseconds=1))
    assert instance.status == "waiting"
    world.run_after(timedelta(microseconds=1))
    assert instance.status == "terminated"
    assert reason(world) == "Waiting at 'approved' took longer than the max_suspend_duration of 1 d"


def test_an_event_that_came_in_time_counts_however_late_it_is_looked_at(world: World) -> None:
    instance = waiting(world, max_suspend_duration="1 day").run()
    world.advance(timedelta(hours=23))
    instance.send("approval", "yes")
    world.messages.clear()
    world.run_after(timedelta(days=2))
    assert instance.output == "yes"


@on_one_database
def test_passes_that_record_nothing_do_not_begin_the_suspension_anew(world: World) -> None:
    instance = waiting(world, max_suspend_duration="1 day").run()
    for _ in range(3):
        world.advance(timedelta(hours=6))
        instance.pause()
        instance.resume()
        world.run_until_idle()
        assert instance.status == "waiting"
    world.run_after(timedelta(hours=6))
    assert instance.status == "terminated"


@on_one_database
def test_each_retry_is_a_suspension_of_its_own(world: World) -> None:
    tries = []

    @world.workflow(max_suspend_duration="30 s")
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            tries.append(1)
            raise ValueError("not yet")

        step.do("work", work)

    instance = order.run()
    world.run_after(10)
    world.run_after(20)
    assert (len(tries), instance.status) == (3, "waiting")
    world.run_after(30)
    assert (len(tries), instance.status) == (3, "terminated")
    assert reason(world) == "Waiting at 'work' took longer than the max_suspend_duration of 30 s"


@on_one_database
def test_a_pass_between_two_attempts_measures_the_suspension_from_the_last_attempt(world: World) -> None:
    @world.workflow(max_suspend_duration="30 s")
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            raise ValueError("not yet")

        step.do("work", work)

    instance = order.run()
    world.run_after(10)
    world.run_after(20)
    assert [step.attempts for step in instance.steps()] == [3]
    world.advance(15)
    instance.pause()
    instance.resume()
    world.run_until_idle()
    assert instance.status == "waiting"
    world.run_after(15)
    assert ([step.attempts for step in instance.steps()], instance.status) == ([3], "terminated")


@on_one_database
def test_what_fails_in_time_fails_under_its_own_name(world: World) -> None:
    @world.workflow(max_run_duration="1 minute", max_suspend_duration="1 minute")
    def order(event: WorkflowEvent, step: Step):
        raise NonRetryableError("no stock")

    assert order.run().error == "NonRetryableError: no stock"
