"""Steps change the labels of their instance with their commit."""

from __future__ import annotations

import pytest

from celery_durable import Completed, LinearStep, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.definitions import define_linear
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.labelled import found, labels_of, order, rows
from tests.support.world import FlowControl, World

__all__ = ["order"]
database = on_databases("sqlite", "postgresql", "mariadb")
ONCE_MORE = StepConfig(retries=Retries(limit=1, delay=1))


def test_a_step_changes_labels_with_its_commit(world: World, order: FlowControl) -> None:
    seen = []
    instance = order.create(
        [{"stage": "packed", "tenant": None, "weight": "7 kg"}], labels={"tenant": "acme", "stage": "new", "kept": "k"}
    )
    world.worker.runtime.at["after-body"] = lambda: seen.append(labels_of(instance))
    world.run_until_idle()
    assert seen == [{"kept": "k", "stage": "new", "tenant": "acme"}]
    assert labels_of(instance) == {"kept": "k", "stage": "packed", "weight": "7 kg"}
    assert found(world, labels={"stage": "new"}) == []
    assert found(world, labels={"stage": "packed", "weight": "7 kg"}) == ["i-1"]


def test_later_calls_and_later_steps_win(world: World) -> None:
    def twice(tx, *given):
        for labels in given:
            tx.set_labels(labels)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("first", twice, {"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": None})
        step.do("second", twice, {"c": None, "absent": None})
        step.do("same", twice, {"a": "2"})

    assert labels_of(order.run()) == {"a": "2"}
    assert rows(world) == 1


def test_what_an_attempt_that_failed_had_set_is_dropped(world: World) -> None:
    def work(tx) -> None:
        tx.set_labels({f"attempt-{tx.attempt}": "here"})
        if tx.attempt == 1:
            raise ValueError("once more")

    instance = flow_of(world, lambda step: step.do("work", ONCE_MORE, work)).run(labels={"tenant": "acme"})
    assert labels_of(instance) == {"tenant": "acme"}
    world.run_after(1)
    assert labels_of(instance) == {"attempt-2": "here", "tenant": "acme"}


def test_what_a_step_that_failed_for_good_had_set_is_dropped(world: World) -> None:
    def work(tx) -> None:
        tx.set_labels({"tenant": None, "stage": "broken"})
        raise NonRetryableError("no")

    instance = flow_of(world, lambda step: step.do("work", work)).run(labels={"tenant": "acme"})
    assert (instance.status, labels_of(instance)) == ("errored", {"tenant": "acme"})


def test_labels_are_set_in_the_steps_own_session_too(world: World) -> None:
    def book(tx, instance: str, run: int) -> str:
        tx.set_labels({"booked": "yes"})
        return world.book(tx, instance, run)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", book, event.instance_id, event.run_number)

    assert labels_of(order.run()) == {"booked": "yes"}
    assert world.booked() == ["book"]


def test_branches_label_the_same_instance(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        names = ("a", "b", "c")
        step.gather(*(step.submit(name, lambda tx, name=name: tx.set_labels({name: name})) for name in names))

    assert labels_of(order.run()) == {"a": "a", "b": "b", "c": "c"}


def test_a_worker_that_lost_its_claim_labels_nothing(world: World, order: FlowControl) -> None:
    instance = order.create([{"stage": "packed"}], labels={"tenant": "acme"})
    slow = world.worker
    slow.runtime.at["after-body"] = instance.terminate
    world.run_until_idle()
    assert (instance.status, labels_of(instance)) == ("terminated", {"tenant": "acme"})


@pytest.mark.parametrize("checkpoint", ["before-commit", "after-commit"])
def test_a_worker_that_dies_at_the_commit_has_labelled_once_or_not_at_all(
    world: World, order: FlowControl, checkpoint: str
) -> None:
    instance = order.create([{"stage": "packed", "tenant": None}], labels={"tenant": "acme"})
    victim = world.worker
    victim.runtime.at["after-body"] = lambda: setattr(victim.runtime, "crash_at", checkpoint)
    world.run_until_idle()
    assert victim.runtime.is_dead
    assert labels_of(instance) == ({"tenant": "acme"} if checkpoint == "before-commit" else {"stage": "packed"})
    world.run_after(60)
    assert (instance.status, labels_of(instance)) == ("complete", {"stage": "packed"})


def test_handlers_of_a_linear_workflow_set_labels_too(world: World) -> None:
    def pay(ctx) -> Completed:
        ctx.tx.set_labels({"stage": "paid", "tenant": None})
        return Completed()

    definition = define_linear("line", module=__name__, version=1, steps=[LinearStep("PAY")])
    definition.handlers["PAY"] = pay
    world.registry.replace(definition)
    line = FlowControl(world, definition)  # type: ignore[arg-type]
    assert labels_of(line.run(labels={"tenant": "acme"})) == {"stage": "paid"}


def test_a_step_creates_instances_with_labels(world: World, order: FlowControl) -> None:
    @world.workflow
    def parent(event: WorkflowEvent, step: Step):
        step.do("create", lambda tx: tx.create(order, id="child", labels={"tenant": "acme"}))
        step.do("create another", lambda tx: tx.create(order, id="plain"))

    parent.run()
    assert labels_of(order.of("child")) == {"tenant": "acme"}
    assert labels_of(order.of("plain")) == {}
