"""Workers that die: at every checkpoint, once and twice, in bodies and between them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Completed, LinearContext, LinearStep, Step, Waiting, WorkflowEvent
from celery_durable.testing import Crash
from tests.support.flows import flow_of
from tests.support.lines import Line
from tests.support.world import FlowControl, Instance, World, insert_name

everywhere = pytest.mark.parametrize(
    "database",
    [
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.gate),
        pytest.param("mariadb", marks=pytest.mark.slow),
    ],
    indirect=True,
)

LEASE = timedelta(seconds=31)


@dataclass(frozen=True)
class Journey:
    """A workflow whose steps write, wait and send, and what is left of each instance."""

    flow: FlowControl
    output: list[Any]
    statuses: dict[str, str]
    first: str
    """The key of the step after which the event is sent."""
    wait: str

    def travel(self, world: World, instance: Instance) -> None:
        for _ in range(20):
            world.run_until_idle()
            if instance.status.is_terminal:
                break
            if instance.statuses().get(self.first) == self.statuses[self.first]:
                instance.send("approval", "yes", id=f"{instance.id}-approval")
            world.advance(LEASE)
        assert instance.output == self.output
        assert instance.statuses() == self.statuses
        assert [consumer for _, _, consumer in instance.events()] == [self.wait]


def of_a_function(world: World) -> Journey:
    """Steps of every kind. Whatever it writes, it writes once."""
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def journey(event: WorkflowEvent, step: Step):
        who = event.instance_id, event.run_number
        plain = step.do("plain", lambda: 1)
        booked = step.do("book one", world.book, *who)
        step.log.info("half way")
        step.sleep("rest", 10)
        answer = step.wait_for_event("approval", "approval").payload
        branches = step.gather(
            step.submit("book two", world.book, *who),
            step.submit("beside", lambda: 2),
            step.submit_sleep("nap", 10),
        )
        step.do("mutate", lambda tx: tx.mutate(insert_name(event.instance_id)))
        return [plain, booked, answer, branches]

    keys = ["plain", "book one", "rest", "approval", "book two", "beside", "nap", "mutate"]
    output = [1, "booked book one", "yes", ["booked book two", 2, None]]
    return Journey(journey, output, dict.fromkeys(keys, "completed"), "rest", "approval")


def of_a_linear_workflow(world: World) -> Journey:
    """Handlers that write in their session or at the commit, one that waits, and one that does nothing."""

    def book(ctx: LinearContext) -> Completed:
        ctx.log.info("on the way")
        return Completed(world.book(ctx.tx, ctx.instance_id, ctx.run_number))

    def wait(ctx: LinearContext) -> Waiting | Completed:
        if ctx.event is None:
            return Waiting("approval", "1 day", outbound_events=[("ApprovalNeeded", ctx.instance_id)])
        return Completed(ctx.event.payload)

    def mutate(ctx: LinearContext) -> Completed:
        ctx.tx.mutate(insert_name(ctx.instance_id))
        return Completed(list(ctx.results.values()))

    handlers: dict[str, Any] = {
        "plain": lambda _: Completed(1), "book one": book, "approval": wait, "book two": book, "mutate": mutate
    }  # fmt: skip
    line = Line(world, [LinearStep(name) for name in handlers], **handlers)
    output = [1, "booked book one", "yes", "booked book two"]
    return Journey(line.flow, output, {str(seq): "DONE" for seq in range(len(handlers))}, "1", "2")


@pytest.fixture(
    params=[of_a_function, pytest.param(of_a_linear_workflow, marks=pytest.mark.gate)], ids=["function", "linear"]
)
def journey(request: pytest.FixtureRequest, world: World) -> Journey:
    made: Journey = request.param(world)
    return made


@pytest.mark.timeout(600)  # a journey for each checkpoint: 40 s, several times that under load
@everywhere
def test_a_worker_that_dies_at_any_checkpoint_costs_time_and_nothing_else(world: World, journey) -> None:
    scout = world.new_worker()
    journey.travel(world, journey.flow.create(id="undisturbed"))
    checkpoints = list(scout.runtime.passed)
    assert set(checkpoints) >= {"claimed", "before-body", "after-body", "before-commit", "after-commit"}
    for number, name in enumerate(checkpoints):
        victim = world.new_worker()
        victim.runtime.crash_at = number
        journey.travel(world, journey.flow.create(id=f"dies-at-{number}-{name}"))
        assert victim.runtime.is_dead
    assert len(world.names()) == len(checkpoints) + 1
    assert len(world.booked()) == 2 * (len(checkpoints) + 1)


@pytest.mark.parametrize("name", ["before-body", "before-commit", "after-commit"])
def test_a_second_worker_that_dies_at_the_same_checkpoint_changes_nothing(world: World, journey, name: str) -> None:
    instance = journey.flow.create()
    for _ in range(3):
        victim = world.new_worker()
        victim.runtime.crash_at = name
        world.run_until_idle()
        assert victim.runtime.is_dead
        world.advance(LEASE)
        world.sweeper.sweep()  # hands it on, after a pause that grows
        world.advance(60)
    journey.travel(world, instance)


def test_a_dead_worker_s_run_is_reclaimed_when_its_lease_ends(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", world.book, event.instance_id, event.run_number)

    instance = order.create()
    world.worker.runtime.crash_at = "after-body"
    world.run_until_idle()
    assert (instance.status, instance.statuses(), world.booked()) == ("active", {}, [])
    world.run_after(29.999)
    assert instance.status == "active"
    world.run_after(0.001)
    assert instance.output == "booked book"
    assert instance.step("book").attempts == 2  # the attempt that died counts


# --- producers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "is_there"), [("before-commit", False), ("after-commit", True)])
def test_a_producer_that_dies_around_its_commit_has_created_all_or_nothing(
    world: World, checkpoint: str, is_there: bool
) -> None:
    order = flow_of(world, lambda step: step.wait_for_event("approval", "approval").payload)
    producer = world.new_producer()
    producer.runtime.crash_at = checkpoint
    with pytest.raises(Crash):
        producer.operations.create.instance("order", id="o-1")
    producer.bury()
    assert world.messages == []
    assert len(world.operations.queries.list("order").items) == is_there
    world.run_after(5)  # the sweep finds what nobody told of
    assert [item.status for item in world.operations.queries.list("order").items] == ["waiting"] * is_there

    instance = order.run(id="o-2")
    producer = world.new_producer()
    producer.runtime.crash_at = checkpoint
    with pytest.raises(Crash):
        producer.operations.events.send("order", "o-2", "approval", "yes")
    producer.bury()
    world.run_after(5)
    assert instance.status == ("complete" if is_there else "waiting")
