"""Instances with a limit of their own for each of their runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Completed, NonRetryableError, Step, StepConfig, Waiting, WorkflowEvent
from celery_durable.errors import DurationInvalid
from celery_durable.model import Status
from tests.support.instances import Instance
from tests.support.lines import Line, state
from tests.support.world import World, on_one_database

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
DAY = timedelta(days=1)


def waiting(world: World, **options: Any) -> Any:
    @world.workflow(**options)
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("work", lambda: 1)
        step.wait_for_event("approved", "approval", timeout="30 days")

    return order


def end_of(instance: Instance) -> tuple[str, str | None]:
    return instance.status, instance.world.operations.history.read("order", instance.id).reason


@everywhere
@pytest.mark.parametrize("of_workflow", [{}, {"max_run_duration": "1 hour"}, {"max_run_duration": "20 days"}])
def test_a_run_that_takes_longer_than_its_instance_allows_is_terminated(world: World, of_workflow: Any) -> None:
    """Whatever its workflow allows."""
    instance = waiting(world, **of_workflow).run(max_run=2 * DAY)
    assert instance.run_at == world.now + 2 * DAY
    world.run_after(2 * DAY - timedelta(microseconds=1))
    assert instance.status == Status.WAITING
    world.run_after(timedelta(microseconds=1))
    assert end_of(instance) == (Status.TERMINATED, "The run took longer than its max_run of 2 d")


@on_one_database
def test_other_instances_have_the_limit_of_their_workflow(world: World) -> None:
    order = waiting(world, max_run_duration="3 days")
    order.run(max_run=DAY)
    other = order.run(id="i-2")
    world.run_after(2 * DAY)
    assert other.status == Status.WAITING
    world.run_after(DAY)
    assert end_of(other) == (Status.TERMINATED, "The run took longer than its max_run_duration of 3 d")


@everywhere
@pytest.mark.parametrize("again", ["restart", "rewind", "fork"])
def test_a_run_that_starts_again_has_the_same_limit_from_its_own_start(world: World, again: str) -> None:
    instance = waiting(world).run(max_run=2 * DAY)
    world.run_after(DAY)
    if again == "restart":
        world.restart(instance)
    elif again == "rewind":
        world.operations.rewind.restart("order", "i-1", from_step="approved")
    else:
        world.operations.rewind.fork("order", "i-1", "approved", id="i-2")
        world.accepted.append(("order", "i-2"))
        instance = Instance(world, "order", "i-2")
    world.run_until_idle()
    assert instance.run_at == world.now + 2 * DAY
    world.run_after(2 * DAY)
    assert end_of(instance) == (Status.TERMINATED, "The run took longer than its max_run of 2 d")


@on_one_database
def test_a_retried_run_has_the_same_limit(world: World) -> None:
    answers = [NonRetryableError("no card"), 1]

    def charge() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("charge", StepConfig(retries=0), charge)
        step.sleep("rest", "30 days")

    instance = order.run(max_run=DAY)
    assert instance.status == Status.ERRORED
    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert instance.run_at == world.now + DAY
    world.run_after(DAY)
    assert end_of(instance) == (Status.TERMINATED, "The run took longer than its max_run of 1 d")


@everywhere
def test_a_linear_run_has_a_limit_too(world: World) -> None:
    line = Line(world, VALIDATE=lambda ctx: Waiting("approval", timeout="30 days"))
    instance = line.flow.run(max_run=DAY)
    assert instance.run_at == world.now + DAY
    world.run_after(DAY)
    assert (instance.status, state(instance)) == (Status.TERMINATED, "CANCELED")


@on_one_database
def test_a_linear_run_ends_after_the_handler_that_reaches_its_limit(world: World) -> None:
    line = Line(world, VALIDATE=lambda ctx: world.clock.advance(15) or Completed("valid"))
    instance = line.flow.create(max_run=timedelta(seconds=5))
    world.run_until_idle()
    assert end_of(instance) == (Status.TERMINATED, "The run took longer than its max_run of 5 s")
    assert line.called == [("VALIDATE", "RUN", 1)]


@on_one_database
def test_a_limit_is_a_duration(world: World) -> None:
    order = waiting(world)
    for max_run, why in (
        (0.5, "it is shorter than 1 s"),
        (timedelta(days=36_501), "it is longer than 36500 d"),
        ("soon", "a unit is unknown"),
    ):
        with pytest.raises(DurationInvalid, match=why):
            order.run(max_run=max_run)
