"""Child workflows as steps: created with the record, answered by their end in its transaction, once."""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import (
    Child,
    LinearStep,
    LinearWorkflow,
    Step,
    StepFailed,
    StepTimeout,
    StepTx,
    WorkflowEvent,
)
from celery_durable.errors import InstanceTerminal
from celery_durable.linear import Completed
from tests.support.billing import Bill
from tests.support.flows import flow_of
from tests.support.lost_connections import cut_commit
from tests.support.world import Worker, World, on_one_database

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


@pytest.fixture
def order(world: World, billing) -> Any:
    """A parent that tells what came of its child."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        try:
            bill = step.child("bill", billing, Bill(cents=100), id="b-1", timeout="1 hour", labels={"of": "order"})
        except StepFailed as exc:
            return [type(exc).__name__, exc.error_name, exc.error_message]
        return [type(bill).__name__, bill.cents]

    return order


@everywhere
def test_a_child_does_a_step(world: World, order, billing) -> None:
    instance = order.run()
    step = instance.step("bill")
    assert (instance.status, step.type, step.status, step.wake_at) == (
        "waiting", "child", "waiting", world.now + timedelta(hours=1),
    )  # fmt: skip
    assert (step.child.workflow, step.child.instance_id, step.wait_event_type) == ("billing", "b-1", None)
    child = billing.of("b-1")
    assert (child.status, child.row.parent_pk, child.row.parent_step_key) == ("waiting", instance.row.id, "bill")
    child.send("paid", 7)
    world.run_until_idle()
    assert (child.output, instance.output) == ({"cents": 107}, ["Bill", 107])
    assert instance.step("bill").result == {"cents": 107}


@everywhere
def test_how_a_child_fails_is_how_its_step_fails(world: World, order, billing) -> None:
    instance = order.run()
    billing.of("b-1").send("paid", 0)
    world.run_until_idle()
    assert instance.output == ["StepFailed", "KeyError", "'no payment'"]


@everywhere
def test_a_child_that_is_terminated_fails_its_step(world: World, order, billing) -> None:
    instance = order.run()
    billing.of("b-1").terminate("sold twice")
    world.run_until_idle()
    assert instance.output == [
        "StepFailed", "ChildTerminated", "Instance 'b-1' of workflow 'billing' was terminated: sold twice",
    ]  # fmt: skip


def test_a_child_whose_workers_keep_dying_fails_its_step(world: World, order, billing) -> None:
    instance = order.run()
    child = billing.of("b-1")
    child.send("paid", 7)
    for _ in range(world.settings.max_crashes):
        world.worker.runtime.crash_at = "claimed"
        child.advance()
        world.advance(world.settings.lease)
    child.advance()
    world.run_until_idle()
    assert (child.status, instance.output[1]) == ("errored", "WorkerCrashLoop")


def test_a_child_that_takes_too_long_is_not_waited_for(world: World, order, billing) -> None:
    instance = order.run()
    world.run_after(3600)
    kind, *_, text = instance.output
    assert (kind, text) == (
        StepTimeout.__name__, "Instance 'b-1' of workflow 'billing' did not end in time; it continues",
    )  # fmt: skip
    child = billing.of("b-1")
    child.send("paid", 7)
    world.run_until_idle()
    assert (child.output, instance.events()) == ({"cents": 107}, [])


@everywhere
def test_a_linear_child(world: World) -> None:
    shop = LinearWorkflow("packing", 1, steps=[LinearStep("PACK")])

    @shop.handler("PACK")
    def pack(call: Any) -> Completed:
        return Completed({"packed": call.params})

    world.registry.replace(shop.definition)
    order = flow_of(world, lambda step: step.child("pack", shop, 7))
    assert order.run().output == {"packed": 7}


@everywhere
def test_children_side_by_side(world: World, billing) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        bills = step.gather(*(step.submit_child(f"bill {n}", billing, Bill(cents=n), id=f"b-{n}") for n in range(3)))
        return sum(bill.cents for bill in bills)

    instance = order.run()
    for n in (2, 0, 1):
        assert instance.status == "waiting"
        billing.of(f"b-{n}").send("paid", 10)
        world.run_until_idle()
    assert instance.output == 33


def test_a_taken_id_fails_the_step(world: World, order, billing) -> None:
    billing.run(Bill(cents=1), id="b-1")
    kind, name, text = order.run().output
    assert (kind, name) == ("StepFailed", "InstanceAlreadyExists")
    assert "'b-1'" in text


def test_parameters_that_do_not_fit_fail_the_step(world: World, billing) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        try:
            step.child("bill", billing, {"cents": "many"})
        except StepFailed as exc:
            return exc.error_name

    assert order.run().output == "WorkflowParamsInvalid"


class Id(str, enum.Enum):  # noqa: UP042  # its members have a text of their own, unlike those of StrEnum
    BILL = "b-1"


def test_the_id_of_a_child_may_be_the_member_of_an_enum(world: World, billing) -> None:
    order = flow_of(world, lambda step: step.child("bill", billing, Bill(cents=1), id=Id.BILL))
    assert order.run().step("bill").child == Child("billing", "b-1")


@everywhere
def test_a_restart_makes_a_child_of_its_own(world: World, billing) -> None:
    instance = flow_of(world, lambda step: step.child("bill", billing, Bill(cents=100)).cents).run()
    first = instance.step("bill").child.instance_id
    world.restart(instance)
    world.run_until_idle()
    second = instance.step("bill").child.instance_id
    assert first != second
    billing.of(first).send("paid", 1)
    world.run_until_idle()
    assert instance.status == "waiting"  # what was a child of run 1 answers nobody
    billing.of(second).send("paid", 2)
    world.run_until_idle()
    assert instance.output == 102


def test_a_retry_of_the_parent_makes_another_child(world: World, billing) -> None:
    instance = flow_of(world, lambda step: step.child("bill", billing, Bill(cents=100)).cents).run()
    billing.of(instance.step("bill").child.instance_id).send("paid", 0)
    world.run_until_idle()
    assert instance.status == "errored"
    world.operations.rewind.retry("order", instance.id)
    world.run_until_idle()
    billing.of(instance.step("bill").child.instance_id).send("paid", 5)
    world.run_until_idle()
    assert instance.output == 105


def test_a_child_that_is_restarted_answers_when_it_has_ended(world: World, order, billing) -> None:
    instance = order.run()
    child = billing.of("b-1")
    world.restart(child)
    world.run_until_idle()
    child.send("paid", 9)
    world.run_until_idle()
    assert instance.output == ["Bill", 109]


def test_the_end_of_the_parent_is_not_the_end_of_its_child(world: World, order, billing) -> None:
    instance = order.run()
    instance.terminate("no longer needed")
    child = billing.of("b-1")
    child.send("paid", 1)
    world.run_until_idle()
    assert (child.output, instance.status) == ({"cents": 101}, "terminated")
    with pytest.raises(InstanceTerminal):
        instance.send("x")


def test_what_a_body_creates_is_no_child_that_anybody_waits_for(world: World, billing) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        def create(tx: StepTx) -> str:
            return tx.create(billing, Bill(cents=1), id="b-1")

        step.do("create", create)
        return step.wait_for_event("done", "done").payload

    instance = order.run()
    billing.of("b-1").send("paid", 1)
    world.run_until_idle()
    assert (billing.of("b-1").output, instance.status, instance.events()) == ({"cents": 2}, "waiting", [])


@everywhere
def test_a_child_is_created_once_and_answers_once_wherever_a_runner_dies(world: World, billing) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        return step.child("bill", billing, Bill(cents=100), id=f"b-{event.instance_id}").cents

    def journey(key: str, *, begins: Worker, ends: Worker) -> None:
        """The parent's first pass, and the child's last, are each done by a worker that may die in it."""
        instance = order.create(id=key)
        instance.advance(begins)
        world.new_worker()
        world.run_after(60)
        child = billing.of(f"b-{key}")
        child.send("paid", 7)
        world.messages.clear()
        child.advance(ends)
        world.new_worker()
        world.run_after(120)
        assert (child.output, instance.output, len(instance.events())) == ({"cents": 107}, 107, 1)

    begins, ends = world.new_worker(), world.new_worker()
    journey("undisturbed", begins=begins, ends=ends)
    for number in range(len(begins.runtime.passed)):
        begins = world.new_worker()
        begins.runtime.crash_at = number
        journey(f"begins-{number}", begins=begins, ends=world.new_worker())
        assert begins.runtime.is_dead
    for number in range(len(ends.runtime.passed)):
        dies = world.new_worker()
        dies.runtime.crash_at = number
        journey(f"ends-{number}", begins=world.new_worker(), ends=dies)
        assert dies.runtime.is_dead


@pytest.mark.parametrize("database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_end_whose_commit_is_in_doubt_answers_once(world: World, billing, when: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        return step.child("bill", billing, Bill(cents=100), id=f"b-{event.instance_id}").cents

    done = []
    for nth in (1, 2, 3, 4):
        instance = order.run(id=f"i-{nth}")
        child = billing.of(f"b-i-{nth}")
        child.send("paid", 7)
        world.messages.clear()
        with cut_commit(world.worker.store, when=when, nth=nth) as cut:
            child.advance()
        world.run_after(120)
        assert (instance.output, len(instance.events())) == (107, 1)
        done += cut
    assert len(done) >= 2  # the wait's and the end's


@pytest.mark.parametrize("database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_termination_whose_commit_is_in_doubt_answers_once(world: World, order, billing, when: str) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when) as cut:
        billing.of("b-1").terminate()
    assert cut == [when]
    world.run_after(120)
    assert (instance.output[1], len(instance.events())) == ("ChildTerminated", 1)


@everywhere
def test_an_instance_that_is_made_again_has_a_child_of_its_own(world: World, billing) -> None:
    order = flow_of(world, lambda step: step.child("bill", billing, Bill(cents=100)).cents)
    instance = order.run()
    first = instance.step("bill").child.instance_id
    instance.terminate()
    world.advance(60)
    world.operations.retention.prune(older_than=timedelta(0), workflow="order")
    world.accepted.pop(0)
    again = order.run(id=instance.id)
    second = again.step("bill").child.instance_id
    assert first != second
    billing.of(first).send("paid", 1)
    billing.of(second).send("paid", 2)
    world.run_until_idle()
    assert again.output == 102


@on_one_database
def test_a_child_of_a_child(world: World, billing) -> None:
    middle = flow_of(world, lambda step: step.child("bill", billing, Bill(cents=1), id="b-1").cents, name="middle")
    instance = flow_of(world, lambda step: step.child("middle", middle)).run()
    billing.of("b-1").send("paid", 1)
    world.run_until_idle()
    assert instance.output == 2
