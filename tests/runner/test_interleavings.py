"""What happens to an instance between any two commits of its worker, one action after another."""

from __future__ import annotations

import pytest

from celery_durable import EventTimeout, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.errors import InstanceTerminal
from celery_durable.model import Status
from tests.support.world import World, insert_name

mostly_on_sqlite = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
patient = pytest.mark.timeout(180)

UNLOCKED = ("claimed", "after-commit", "before-body")
"""Checkpoints at which the worker holds no lock."""


@pytest.fixture
def errand(world: World):
    """A few steps of every kind, without sessions: on SQLite those would keep everybody else out."""
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def errand(event: WorkflowEvent, step: Step):
        step.do("begin", lambda: 1)
        try:
            answer = step.wait_for_event("approval", "approval", timeout=300).payload
        except EventTimeout:
            answer = "late"
        step.gather(
            step.submit("flaky", StepConfig(retries=Retries(limit=1, delay=5)), lambda tx: 1 / (tx.attempt - 1)),
            step.submit_sleep("nap", 10),
        )
        step.do("end", lambda tx: tx.mutate(insert_name(f"{event.instance_id}-{event.run_number}")))
        return [event.run_number, answer]

    return errand


def finish(world: World, instance) -> None:
    for _ in range(20):
        world.run_until_idle()
        if instance.status.is_terminal:
            return
        if instance.status is Status.PAUSED:
            instance.resume()
        world.advance(61)
    raise AssertionError(instance.row)


def send(instance) -> None:
    instance.send("approval", "yes", id=f"{instance.id}-yes")


ACTIONS = {
    "send_event": send,
    "pause": lambda instance: instance.pause(),
    "pause and resume": lambda instance: (instance.pause(), instance.resume()),
    "terminate": lambda instance: instance.terminate(),
    "restart": lambda instance: instance.restart(),
    "queue": lambda instance: instance.world.operations.create.instance("errand", id=instance.id, if_running="queue"),
}


@patient
@mostly_on_sqlite
@pytest.mark.parametrize(
    "action", [pytest.param(name, marks=pytest.mark.slow if "pause" in name else ()) for name in ACTIONS]
)
def test_anything_may_happen_to_an_instance_between_any_two_commits_of_its_worker(
    world: World, errand, action: str
) -> None:
    scout = world.new_worker()
    finish(world, errand.create(id="scout"))
    numbers = [n for n, name in enumerate(scout.runtime.passed) if name in UNLOCKED]
    scout.runtime.is_dead = True  # from here on each instance has a worker of its own
    for number in numbers:
        instance = errand.create(id=f"at-{number}")
        done = []

        def act(instance=instance, done=done) -> None:
            done.append(instance.status)
            try:
                ACTIONS[action](instance)
            except InstanceTerminal:
                assert instance.status.is_terminal

        world.new_worker().runtime.at[number] = act
        finish(world, instance)
        assert len(done) == 1, number
        was_over = done[0].is_terminal
        match action:
            case "send_event":
                in_time = was_over or instance.output == [1, "yes"] or instance.step("approval").status == "errored"
                assert in_time, number
            case "terminate":
                assert instance.status == ("complete" if was_over else "terminated"), number
            case "restart" | "queue":
                assert instance.output == [2, "late"], number
                assert instance.row.run_number == 2
            case _:
                assert instance.output == [1, "late"], number


WAITS = {
    "alone": lambda step: step.wait_for_event("approval", "approval", timeout=300),
    "in a gather": lambda step: step.gather(
        step.submit("work", lambda: 1),
        step.submit_sleep("nap", 300),
        step.submit_wait_for_event("approval", "approval", timeout=300),
    ),
    "in a race": lambda step: step.first(
        "race",
        step.submit_wait_for_event("other", "other", timeout=300),
        step.submit_wait_for_event("approval", "approval", timeout=300),
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_event_is_never_missed_whenever_it_is_sent(world: World, wait: str) -> None:
    """Before the wait, while it is being recorded, after: nobody has to wait for the deadline."""
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("begin", lambda: 1)
        WAITS[wait](step)

    scout = world.new_worker()
    assert order.run(id="scout").status == "waiting"
    numbers = [n for n, name in enumerate(scout.runtime.passed) if name in UNLOCKED]
    scout.runtime.is_dead = True
    for number in numbers:
        instance = order.create(id=f"at-{number}")
        world.new_worker().runtime.at[number] = lambda instance=instance: send(instance)
        world.run_until_idle()
        assert instance.statuses()["approval"] == "completed", number
        world.run_after(300)
        assert instance.status == "complete", number
