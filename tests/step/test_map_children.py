"""Maps over workflows: one child instance for each item, whose end answers the item in the transaction that ends it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable import Child, LinearStep, LinearWorkflow, Retries, Step, StepFailed, WorkflowEvent
from celery_durable.all_operations import Operations
from celery_durable.linear import Completed
from celery_durable.model import ItemRef, ParentStep, Scope
from celery_durable.operations.context import OperationContext
from celery_durable.runtime import Runtime
from tests.support.billing import Bill
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


def mapping(world: World, workflow: Any, count: int = 3, name: str = "month", **options: Any) -> Any:
    """A workflow with one map over children, which tells what came of it."""

    @world.workflow(name=name)
    def month(event: WorkflowEvent, step: Step) -> Any:
        try:
            got = step.map("bill", workflow, [Bill(cents=100 * n) for n in range(count)], **options)
        except StepFailed as exc:
            return [type(exc).__name__, exc.error_name, exc.error_message, exc.attempts]
        return [str(each) if isinstance(each, Exception) else [type(each).__name__, each.cents] for each in got]

    return month


def child_of(workflow: Any, instance: Any, position: int, attempt: int = 1) -> Any:
    """The child of an item."""
    pk, run = instance.row.id, instance.row.run_number
    return workflow.of(ItemRef(pk, "bill", position, attempt).work_id(run))


def billings(world: World) -> list[str]:
    """The ids of all children, in the order of their creation."""
    i = world.store.tables.instance.c
    return [
        row.instance_id for row in world.rows(sa.select(i.instance_id).where(i.workflow == "billing").order_by(i.id))
    ]


def test_each_item_is_done_by_a_child_of_its_own(world: World, billing) -> None:
    instance = mapping(world, billing).run()
    step = instance.step("bill")
    assert (step.type, step.status, step.task, step.child, step.workflow) == ("map", "waiting", None, None, "billing")
    assert (step.items.total, step.items.done, step.wake_at) == (3, 0, world.now + timedelta(days=365))
    children = [child_of(billing, instance, n) for n in range(3)]
    assert [child.instance_id for child in step.items.children] == [child.id for child in children]
    for n in (2, 0):
        children[n].send("paid", n + 1)
        world.run_until_idle()
        assert instance.status == "waiting"
    assert instance.step("bill").items.done == 2
    children[1].send("paid", 2)
    world.run_until_idle()
    assert instance.output == [["Bill", 1], ["Bill", 102], ["Bill", 203]]
    assert instance.step("bill").result == [{"output": {"cents": each}} for each in (1, 102, 203)]


def test_so_many_children_run_at_a_time(world: World, billing) -> None:
    instance = mapping(world, billing, 4, max_concurrency=2).run()
    version = instance.row.version
    assert len(billings(world)) == 2
    child_of(billing, instance, 1).send("paid", 1)
    world.run_until_idle()
    assert billings(world) == [child_of(billing, instance, n).id for n in (0, 1, 2)]
    assert instance.row.version == version  # the end of one child has created the next, and woken nobody
    for n in (0, 2, 3):
        child_of(billing, instance, n).send("paid", 1)
        world.run_until_idle()
    assert instance.output == [["Bill", 100 * n + 1] for n in range(4)]


def test_how_a_child_fails_is_how_its_item_fails(world: World, billing) -> None:
    instance = mapping(world, billing).run()
    children = [child_of(billing, instance, n) for n in range(3)]
    children[2].send("paid", 0)
    children[1].terminate("sold twice")
    children[0].send("paid", 1)
    world.run_until_idle()
    text = f"Instance '{children[1].id}' of workflow 'billing' was terminated: sold twice"
    assert instance.output == ["StepFailed", "ChildTerminated", f"item 1: {text}", 1]
    items = instance.step("bill").items
    assert [(each.position, each.child.instance_id) for each in items.failures] == [
        (n, children[n].id) for n in (1, 2)
    ]  # fmt: skip
    attempts = world.operations.history.read("month", "i-1").attempts
    assert sorted((each.item, each.error.name, each.task_id) for each in attempts) == [
        (1, "ChildTerminated", children[1].id), (2, "KeyError", children[2].id),
    ]  # fmt: skip


def test_failures_may_be_wanted(world: World, billing) -> None:
    instance = mapping(world, billing, 2, return_exceptions=True).run()
    child_of(billing, instance, 0).send("paid", 1)
    child_of(billing, instance, 1).send("paid", 0)
    world.run_until_idle()
    assert instance.output == [["Bill", 1], "Step 'bill[1]' failed after 1 attempt: KeyError: 'no payment'"]


def test_an_item_that_failed_is_tried_again_by_another_child(world: World, billing) -> None:
    instance = mapping(world, billing, 2, retries=Retries(limit=1, delay=30)).run()
    child_of(billing, instance, 1).send("paid", 0)
    child_of(billing, instance, 0).send("paid", 1)
    world.run_until_idle()
    assert (instance.status, len(billings(world))) == ("waiting", 2)
    world.run_after(30)
    second = child_of(billing, instance, 1, attempt=2)
    assert [each.instance_id for each in instance.step("bill").items.children] == [second.id]
    second.send("paid", 5)
    world.run_until_idle()
    assert instance.output == [["Bill", 1], ["Bill", 105]]


def test_a_terminated_child_is_not_tried_again(world: World, billing) -> None:
    instance = mapping(world, billing, 1, retries=5).run()
    child_of(billing, instance, 0).terminate()
    world.run_until_idle()
    assert instance.output[1] == "ChildTerminated"


def test_an_item_that_takes_too_long_is_not_waited_for_and_its_child_continues(world: World, billing) -> None:
    instance = mapping(world, billing, 2, timeout="1 hour", retries=Retries(limit=1, delay=0)).run()
    first = child_of(billing, instance, 1)
    child_of(billing, instance, 0).send("paid", 1)
    world.run_after(3600)
    world.run_until_idle()
    second = child_of(billing, instance, 1, attempt=2)
    first.send("paid", 1)  # it has no say any more
    world.run_until_idle()
    assert (first.output, instance.status, second.status) == ({"cents": 101}, "waiting", "waiting")
    world.run_after(3600)
    kind, *_, text, attempts = instance.output
    assert (kind, text, attempts) == (
        "StepTimeout", f"item 1: Instance '{second.id}' did not end within 1 h; it continues", 2,
    )  # fmt: skip


def test_a_retry_of_the_parent_repeats_only_the_items_that_failed(world: World, billing) -> None:
    flow = flow_of(
        world, lambda step: [each.cents for each in step.map("bill", billing, [Bill(cents=n) for n in range(3)])]
    )
    instance = flow.run()
    for n, paid in enumerate((1, 0, 1)):
        child_of(billing, instance, n).send("paid", paid)
    world.run_until_idle()
    assert instance.error == "KeyError: item 1: 'no payment'"
    world.operations.rewind.retry(instance.workflow, instance.id)
    world.run_until_idle()
    assert len(billings(world)) == 4
    child_of(billing, instance, 1).send("paid", 9)
    world.run_until_idle()
    assert instance.output == [1, 10, 3]


def test_a_child_of_an_earlier_run_answers_nobody(world: World, billing) -> None:
    instance = mapping(world, billing, 1).run()
    first = child_of(billing, instance, 0)
    world.restart(instance)
    world.run_until_idle()
    first.send("paid", 1)
    world.run_until_idle()
    assert (first.status, instance.status) == ("complete", "waiting")
    child_of(billing, instance, 0).send("paid", 2)
    world.run_until_idle()
    assert instance.output == [["Bill", 2]]


def test_a_paused_parent_gets_no_further_children(world: World, billing) -> None:
    instance = mapping(world, billing, 2, max_concurrency=1).run()
    world.operations.lifecycle.pause("month", "i-1")
    child_of(billing, instance, 0).send("paid", 1)
    world.run_until_idle()
    assert len(billings(world)) == 1
    world.operations.lifecycle.resume("month", "i-1")
    world.run_until_idle()
    child_of(billing, instance, 1).send("paid", 1)
    world.run_until_idle()
    assert instance.output == [["Bill", 1], ["Bill", 101]]


def test_a_terminated_child_leaves_the_next_one_to_a_pass(world: World, billing) -> None:
    instance = mapping(world, billing, 2, max_concurrency=1).run()
    child_of(billing, instance, 0).terminate()
    assert len(billings(world)) == 1
    world.run_until_idle()
    child_of(billing, instance, 1).send("paid", 1)
    world.run_until_idle()
    assert instance.output[1] == "ChildTerminated"


def test_parameters_that_do_not_fit_fail_the_step_and_no_child_is_created(world: World, billing) -> None:
    @world.workflow
    def month(event: WorkflowEvent, step: Step) -> Any:
        try:
            step.map("bill", billing, [{"cents": 1}, {"cents": "many"}])
        except StepFailed as exc:
            return [exc.error_name, exc.error_message]

    name, text = month.run().output
    assert (name, billings(world)) == ("WorkflowParamsInvalid", [])
    assert text.startswith("Parameters of workflow 'billing' for instance 'item 1' are not valid: $.cents:")


def test_an_id_that_is_taken_fails_its_item(world: World, billing) -> None:
    month = mapping(world, billing, 2)
    instance = month.create()
    taken = child_of(billing, instance, 1).id
    billing.create(Bill(cents=1), id=taken)
    world.run_until_idle()
    child_of(billing, instance, 0).send("paid", 1)
    world.run_until_idle()
    assert instance.output[1:3] == [
        "InstanceAlreadyExists",
        f"item 1: Workflow 'billing' already has an instance '{taken}'. Use another id, or get or restart the existing "
        "instance.",
    ]


def test_nothing_to_do_is_done_at_once(world: World, billing) -> None:
    assert mapping(world, billing, 0).run().output == []


def test_children_of_a_linear_workflow(world: World) -> None:
    shop = LinearWorkflow("packing", 1, steps=[LinearStep("PACK")])

    @shop.handler("PACK")
    def pack(call: Any) -> Completed:
        return Completed({"packed": call.params})

    world.registry.replace(shop.definition)
    assert flow_of(world, lambda step: step.map("pack", shop, [7, 8], max_concurrency=1)).run().output == [
        {"packed": 7}, {"packed": 8},
    ]  # fmt: skip


def test_a_child_names_its_parent_and_item(world: World, billing) -> None:
    instance = mapping(world, billing, 2).run()
    parent = world.operations.history.read("billing", child_of(billing, instance, 1).id).parent
    assert parent == ParentStep("month", "i-1", 1, "bill", 1)


def test_a_copied_map_names_the_child_of_the_run_that_created_it(world: World, billing) -> None:
    def work(step: Step) -> None:
        step.map("bill", billing, [Bill(cents=1)], return_exceptions=True)
        raise ValueError

    instance = flow_of(world, work).run()
    child = child_of(billing, instance, 0)
    child.send("paid", 0)
    world.run_until_idle()
    world.operations.rewind.retry(instance.workflow, instance.id)
    world.run_until_idle()
    children = [instance.step("bill", run).items.failures[0].child for run in (1, 2)]
    assert children == [Child("billing", child.id)] * 2


def test_a_caller_with_a_scope_sees_no_links_to_children(world: World, billing) -> None:
    instance = mapping(world, billing, 2).run()
    child_of(billing, instance, 0).send("paid", 0)
    world.run_until_idle()
    everything = OperationContext(world.store, world.settings, world.registry, Runtime(), world.messages.extend)
    scoped = Operations(replace(everything, scope=Scope(id_prefix="i-")))
    [step] = scoped.history.read("month", "i-1").steps
    assert (step.workflow, step.items.children, step.items.failures[0].child) == ("billing", (), None)


def test_a_map_that_loses_a_race_leaves_its_children_alone(world: World, billing) -> None:
    @world.workflow
    def month(event: WorkflowEvent, step: Step) -> Any:
        bills = step.submit_map("bill", billing, [Bill(cents=1)])
        return step.first("sooner", bills, step.submit_sleep("deadline", "1 hour"))

    instance = month.run()
    world.run_after(3600)
    assert instance.output is None
    child_of(billing, instance, 0).send("paid", 1)
    world.run_until_idle()
    assert instance.step("bill").status == "cancelled"


def test_on_lost_is_refused(world: World, billing) -> None:
    instance = flow_of(world, lambda step: step.map("bill", billing, [], on_lost="fail")).run()
    assert instance.error == (
        "ValueRefused: step.map('bill') got on_lost='fail', which is for tasks: no child is ever lost."
    )


def test_code_that_maps_over_tasks_instead_is_refused_while_children_are_open(world: World, billing) -> None:
    instance = mapping(world, billing, 2, max_concurrency=1, retries=Retries(limit=1, delay=0)).run()
    mapping(world, "press.convert", 2)
    child_of(billing, instance, 0).send("paid", 0)
    world.run_until_idle()
    assert instance.error.startswith("StepTypeMismatch: ")
