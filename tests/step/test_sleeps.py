"""Sleeps: the wake time is fixed when the sleep is first reached, and kept by the database's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import SleepTooFar
from celery_durable.testing import START
from tests.support.flows import flow_of
from tests.support.world import World, on_one_database


@on_one_database
@pytest.mark.parametrize("span", [90, 90.0, "90 s", "1.5 minutes", timedelta(seconds=90)])
def test_a_sleep_ends_when_its_time_has_come_and_not_before(world: World, span) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", span)
        return "rested"

    instance = order.run()
    assert (instance.status, instance.step("rest").wake_at) == ("waiting", world.now + timedelta(seconds=90))
    world.run_after(89.999999)
    assert instance.status == "waiting"
    world.run_after(0.000001)
    assert instance.output == "rested"


def test_a_sleeping_instance_costs_nothing(world: World) -> None:
    instance = flow_of(world, lambda step: step.sleep("rest", "30 days")).run()
    before = instance.row
    for _ in range(5):
        world.advance(timedelta(days=5))
        assert world.tick() == []
    assert instance.row == before


def test_later_passes_do_not_restart_a_sleep(world: World) -> None:
    instance = flow_of(world, lambda step: step.sleep("rest", 100)).run()
    wake_at = instance.step("rest").wake_at
    world.advance(60)
    instance.pause()
    instance.resume()
    world.run_until_idle()
    assert (instance.status, instance.step("rest").wake_at, instance.run_at) == ("waiting", wake_at, wake_at)
    world.run_after(40)
    assert instance.status == "complete"


@pytest.mark.parametrize("when", [START - timedelta(days=400), START, START.astimezone(timezone(timedelta(hours=5)))])
def test_a_sleep_until_the_past_ends_at_once_and_is_recorded(world: World, when: datetime) -> None:
    passes = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        passes.append(1)
        step.sleep_until("then", when)
        return "no rest"

    instance = order.run()
    assert instance.output == "no rest"
    assert instance.statuses() == {"then": "completed"}
    assert len(passes) == 1


def test_a_sleep_of_nothing_ends_at_once(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", 0)
        return "no rest"

    instance = order.run()
    assert instance.output == "no rest"
    assert instance.statuses() == {"rest": "completed"}


def test_the_longest_sleep_lasts_a_year(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", "365 days")
        step.sleep_until("more", START + timedelta(days=730))
        return "rested"

    instance = order.run()
    world.run_after(timedelta(days=365))
    world.run_after(timedelta(days=365))
    assert instance.output == "rested"


def test_a_sleep_that_was_refused_stays_refused_when_time_has_gone_by(world: World) -> None:
    too_far = datetime(2031, 1, 2, tzinfo=UTC)  # 366 days from the start, fewer from the next pass
    refused = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.sleep_until("rest", too_far)
        except SleepTooFar:
            refused.append(1)
        step.sleep("instead", timedelta(days=10))
        return "rested"

    instance = order.run()
    world.run_after(timedelta(days=10))
    assert instance.output == "rested"
    assert instance.statuses() == {"instead": "completed"}
    assert len(refused) == 2


def test_an_overdue_sleep_ends_on_the_first_look_however_late(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", 10)
        return step.now().isoformat()

    instance = order.run()
    world.run_after(timedelta(days=900))
    assert instance.output == world.now.isoformat()
