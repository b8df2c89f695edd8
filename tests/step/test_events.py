"""Waiting for events: buffered from the start, consumed once, oldest first, up to and including the deadline."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import EventTimeout, Step, StepFailed, WorkflowEvent
from tests.support.approvals import Approval, define_order
from tests.support.flows import flow_of
from tests.support.world import World


@pytest.fixture
def order(world: World):
    return define_order(world)


def test_an_event_ends_the_wait_and_is_returned(world: World, order) -> None:
    instance = order.run()
    step = instance.step("approval")
    assert (instance.status, step.wait_event_type, step.wake_at) == (
        "waiting",
        "approval",
        world.now + timedelta(seconds=60),
    )
    world.advance(5)
    sent_at = world.now
    assert instance.send("approval", {"by": "eve"}) is True
    world.run_after(1)
    assert instance.output == ["approval", {"by": "eve"}, sent_at.isoformat()]
    assert instance.events() == [("approval", {"by": "eve"}, "approval")]


def test_an_event_from_before_the_wait_is_buffered(world: World, order) -> None:
    instance = order.create()
    instance.send("approval", 1)
    world.run_until_idle()
    assert instance.output[1] == 1


def test_an_event_that_comes_while_paused_is_buffered(world: World, order) -> None:
    instance = order.run()
    instance.pause()
    instance.send("approval", 1)
    world.run_until_idle()
    assert instance.status == "paused"
    instance.resume()
    world.run_until_idle()
    assert instance.output[1] == 1


def test_events_of_other_types_are_left_for_others(world: World, order) -> None:
    instance = order.run()
    instance.send("refusal")
    assert world.messages == []  # nobody waits for it, so nobody is woken
    world.run_until_idle()
    assert instance.status == "waiting"
    instance.send("approval", "yes")
    world.run_until_idle()
    assert instance.events() == [("refusal", None, None), ("approval", "yes", "approval")]


def test_a_wait_is_replayed_with_its_event(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(step.wait_for_event("approval", "approval", schema=Approval))
        step.sleep("rest", 60)

    instance = order.run()
    instance.send("approval", {"approved": True, "by": "eve"})
    world.run_until_idle()
    instance.send("approval", {"approved": False, "by": "mallory"})
    world.run_after(60)
    assert instance.status == "complete"
    assert seen[0] == seen[1]
    assert seen[0].payload == Approval(approved=True, by="eve")


# --- deadlines ----------------------------------------------------------------------------------


def test_without_an_event_the_wait_times_out_and_the_workflow_may_go_on(world: World, order) -> None:
    instance = order.run()
    world.run_after(59.999999)
    assert instance.status == "waiting"
    world.run_after(0.000001)
    assert instance.output == (
        "Step 'approval' failed after 1 attempt: EventTimeout: No event 'approval' came within 1 min"
    )
    assert instance.statuses() == {"approval": "errored"}


def test_a_timeout_is_the_same_error_on_both_passes_and_ends_an_instance_that_does_not_catch_it(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.wait_for_event("approval", "approval", timeout="1 minute")
        except (StepFailed, TimeoutError) as exc:
            seen.append((type(exc), str(exc), exc.error_name, exc.attempts))
            step.sleep("rest", 60)
            raise

    instance = order.run()
    world.run_after(60)
    world.run_after(60)
    assert instance.error == "EventTimeout: No event 'approval' came within 1 min"
    assert seen[0] == seen[1]
    assert seen[0][0] is EventTimeout


def test_an_event_at_the_deadline_is_in_time(world: World, order) -> None:
    instance = order.run()
    world.advance(60)
    instance.send("approval", "just")
    world.run_until_idle()
    assert instance.output[1] == "just"


def test_an_event_in_time_is_delivered_however_late_the_workers_are(world: World, order) -> None:
    instance = order.run()
    world.advance(59)
    instance.send("approval", "in time")
    world.messages.clear()
    world.run_after(timedelta(days=3))
    assert instance.output[1] == "in time"


def test_a_late_event_does_not_wake_and_does_not_complete_the_wait_that_expired(world: World, order) -> None:
    instance = order.run()
    world.advance(60.000001)
    assert instance.send("approval", "late") is True
    assert world.messages == []
    world.run_until_idle()
    assert "EventTimeout" in instance.output
    assert instance.events() == [("approval", "late", None)]


def test_the_default_deadline_is_a_day(world: World) -> None:
    instance = flow_of(world, lambda step: step.wait_for_event("approval", "approval")).run()
    assert instance.run_at == world.now + timedelta(hours=24)
    world.run_after(timedelta(hours=24))
    assert instance.error == "EventTimeout: No event 'approval' came within 1 d"


@pytest.mark.parametrize("timeout", [1, timedelta(days=365)])
def test_the_shortest_and_the_longest_deadline(world: World, timeout) -> None:
    instance = flow_of(world, lambda step: step.wait_for_event("approval", "approval", timeout=timeout)).run()
    world.run_after(timeout)
    assert instance.error.startswith("EventTimeout: ")


# --- sending ------------------------------------------------------------------------------------


def test_an_event_id_is_accepted_once_per_run(world: World) -> None:
    instance = flow_of(world, lambda step: [step.wait_for_event(f"page {n}", "page").payload for n in range(2)]).run()
    assert instance.send("page", "a", id="delivery-1") is True
    assert instance.send("page", "a", id="delivery-1") is False
    world.run_until_idle()
    assert instance.send("page", "a", id="delivery-1") is False  # also after it was consumed
    assert instance.status == "waiting"
    instance.restart()
    assert instance.send("page", "a", id="delivery-1") is True
    assert instance.send("page", "b", id="delivery-2") is True
    world.run_until_idle()
    assert instance.output == ["a", "b"]


def test_the_same_event_id_serves_two_instances(world: World, order) -> None:
    one, two = order.run(id="a"), order.run(id="b")
    assert one.send("approval", 1, id="x") is True
    assert two.send("approval", 2, id="x") is True
    world.run_until_idle()
    assert (one.output[1], two.output[1]) == (1, 2)


def test_a_wait_whose_type_was_changed_by_a_deploy_is_woken_by_the_new_type(world: World) -> None:
    instance = flow_of(world, lambda step: step.wait_for_event("answer", "approval", timeout="1 hour").payload).run()
    deadline = instance.step("answer").wake_at
    flow_of(world, lambda step: step.wait_for_event("answer", "decision", timeout="1 hour").payload)
    world.advance(60)
    instance.pause()
    instance.resume()
    world.run_until_idle()
    assert (instance.step("answer").wait_event_type, instance.step("answer").wake_at) == ("decision", deadline)
    instance.send("decision", "yes")
    world.run_until_idle()
    assert instance.output == "yes"
