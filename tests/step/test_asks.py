"""Waits that ask a person: what lists of waits show of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import ValueRefused
from celery_durable.model import EventWait, StepRecord, WaitFilter
from tests.support.approvals import Approval
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.instances import Instance
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


def approve(step: Step, **options: Any) -> Any:
    return step.wait_for_event("approve", "approval", **options)


def ask(world: World, **options: Any) -> Instance:
    options = {"schema": Approval, "ask": "Refund 1999 cents to Ada?", "to": "finance"} | options
    return flow_of(world, lambda step: approve(step, **options).payload).run()


def waits(world: World, **given: Any) -> list[EventWait]:
    return list(world.operations.stats.waits(WaitFilter(**given)).items)


def shown(instance: Instance) -> StepRecord:
    history = instance.world.operations.history.read(instance.workflow, instance.id)
    return next(step for step in history.steps if step.step_key == "approve")


def test_a_wait_shows_its_question_and_the_schema_of_its_answer(world: World) -> None:
    began = world.now
    instance = ask(world, timeout="2 days")
    (found,) = waits(world, to="finance")
    assert (found.workflow, found.instance_id, found.run_number) == ("order", instance.id, 1)
    assert (found.step_key, found.ask, found.to) == ("approve", "Refund 1999 cents to Ada?", "finance")
    assert (found.since - began < timedelta(seconds=1), found.wake_at) == (True, found.since + timedelta(days=2))
    assert found.schema == Approval.model_json_schema()
    step = shown(instance)
    assert (step.ask, step.to) == ("Refund 1999 cents to Ada?", "finance")


def test_a_question_may_be_facts_and_may_have_no_addressee_and_no_schema(world: World) -> None:
    ask(world, ask={"cents": 1999, "customer": 'Ada "the first"'}, to=None, schema=None)
    (found,) = waits(world, is_asking=True)
    assert (found.ask, found.to, found.schema) == ({"cents": 1999, "customer": 'Ada "the first"'}, None, None)
    assert waits(world, to="finance") == []


def test_a_list_has_only_the_waits_that_ask_this_addressee(world: World) -> None:
    addressees = ["finance", "Finance", "%", "_______", 'a"}', "Büro", "x,to:finance", None]

    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.wait_for_event("approve", "approval", ask="?", to=event.payload)

    @world.workflow
    def plain(event: WorkflowEvent[Any], step: Step) -> None:
        step.wait_for_event("approve", "approval")

    plain.run(id="p")
    for n, addressee in enumerate(addressees):
        order.run(addressee, id=f"i-{n}")
    for n, addressee in enumerate(addressees[:-1]):
        assert [each.instance_id for each in waits(world, to=addressee)] == [f"i-{n}"]
    assert len(waits(world, is_asking=True, workflow="order", event_type="approval")) == len(addressees)
    assert waits(world, is_asking=True, event_type="other") == []
    assert len(waits(world)) == len(addressees) + 1


def test_a_deploy_changes_the_question_of_an_open_wait(world: World) -> None:
    instance = ask(world)
    flow_of(world, lambda step: approve(step, ask={"cents": 5000}, to="board").payload)
    world.operations.lifecycle.wake("order", instance.id)
    world.run_until_idle()
    (found,) = waits(world, is_asking=True)
    assert (found.ask, found.to, found.schema) == ({"cents": 5000}, "board", None)


def test_a_step_keeps_its_question_after_its_end(world: World) -> None:
    answered, late, lost = (
        flow_of(world, body, name=name).run()
        for name, body in {
            "answered": lambda step: approve(step, ask="?", to="finance").payload,
            "late": lambda step: approve(step, ask="?", to="finance", timeout=10).payload,
            "lost": lambda step: step.first(
                "either",
                step.submit_wait_for_event("approve", "approval", ask="?", to="finance"),
                step.submit_sleep("nap", 10),
            ),
        }.items()
    )
    answered.send("approval")
    world.run_after(11)
    for instance, status in ((answered, "completed"), (late, "errored"), (lost, "cancelled")):
        step = shown(instance)
        assert (str(step.status), step.ask, step.to) == (status, "?", "finance")
    assert waits(world, is_asking=True) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "finance"}, "Wait 'approve' got to='finance' without ask=: pass the question, too."),
        ({"ask": ""}, "ask='' of wait 'approve' cannot be used: pass a sentence, or a dict of facts."),
        ({"ask": 7}, "ask=7 of wait 'approve' cannot be used: pass a sentence, or a dict of facts."),
        (
            {"ask": "?", "to": ""},
            "to= of wait 'approve' '' is not allowed: use text of 1 to 255 characters without control characters.",
        ),
        (
            {"ask": "?" * 20_000},
            "ask= of wait 'approve' has 20002 characters as JSON, and 16384 are the most: ask in a sentence, and give "
            "a link to the rest.",
        ),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_question_that_cannot_be_used_is_refused(world: World, options: Any, message: str) -> None:
    def body(step: Step) -> str:
        with pytest.raises(ValueRefused) as refused:
            approve(step, **options)
        return str(refused.value)

    assert flow_of(world, body).run().output == message
