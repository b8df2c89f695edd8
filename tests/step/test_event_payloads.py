"""Payloads of events: any JSON, checked against the schema of the wait."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta

import pytest

from celery_durable import EventPayloadInvalid, EventRefused, Step, WorkflowEvent
from celery_durable.errors import InstanceNotFound, InvalidEventType, NameInvalid, NotSerializable, PayloadTooLarge
from celery_durable.model import Scope
from tests.support.approvals import Approval, Refusal, define_order
from tests.support.flows import flow_of
from tests.support.world import World, on_one_database


@pytest.fixture
def order(world: World):
    return define_order(world)


@pytest.mark.parametrize("way", ["plain", "id", "session"])
def test_a_payload_that_breaks_the_schema_is_refused_and_the_wait_goes_on(world: World, way: str) -> None:
    order = flow_of(world, lambda step: step.wait_for_event("approval", "approval", schema=Approval).payload.by)
    instance = order.run()
    with ExitStack() as stack:
        options = {"id": {"id": "mail-7"}, "session": {"session": stack.enter_context(world.session())}}.get(way, {})
        with pytest.raises(EventRefused) as refused:
            instance.send("approval", {"approved": "perhaps"}, **options)
    assert str(refused.value) == (
        "Event 'approval' is not what order 'o-1' waits for: $.approved: Input should be a valid boolean, unable to "
        "interpret input; $.by: Field required. Nothing was stored, and the wait goes on: send the event again with a "
        "payload that fits."
    ).replace("o-1", instance.id)
    assert (instance.events(), instance.status) == ([], "waiting")
    instance.send("approval", {"approved": True, "by": "eve"}, **({"id": "mail-7"} if way == "id" else {}))
    world.run_until_idle()
    assert instance.output == "eve"


def test_a_schema_may_be_a_builtin_class(world: World) -> None:
    instance = flow_of(world, lambda step: step.wait_for_event("count", "counted", schema=int).payload).run()
    with pytest.raises(EventRefused):
        instance.send("counted", "seven")
    instance.send("counted", 7)
    world.run_until_idle()
    assert instance.output == 7


def test_a_repeated_event_is_ignored_although_the_next_wait_would_refuse_it(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.wait_for_event("first", "approval")
        step.wait_for_event("second", "approval", schema=Approval)

    instance = order.run()
    assert instance.send("approval", "anything", id="mail-7") is True
    world.run_until_idle()
    assert instance.send("approval", "anything", id="mail-7") is False


def test_a_caller_of_another_scope_does_not_learn_what_a_run_waits_for(world: World) -> None:
    instance = flow_of(world, lambda step: step.wait_for_event("approval", "approval", schema=Approval)).run()
    others = world.operations.restrict_to(Scope(id_prefix="other-"))
    with pytest.raises(InstanceNotFound):
        others.events.send("order", instance.id, "approval", "anything")


def test_a_schema_that_a_deploy_has_changed_is_the_one_that_counts(world: World) -> None:
    schemas = [Approval, Refusal]

    order = flow_of(world, lambda step: step.wait_for_event("approval", "approval", schema=schemas[0]).payload.by)
    instance = order.run()
    schemas.pop(0)
    world.operations.lifecycle.wake("order", instance.id)
    world.run_until_idle()
    instance.send("approval", {"by": "eve"})
    world.run_until_idle()
    assert instance.output == "eve"


def test_a_payload_that_breaks_the_schema_is_consumed_if_it_came_before_the_wait(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("nap", "1 day")
        step.wait_for_event("approval", "approval", schema=Approval)

    instance = order.run()
    instance.send("approval", {"approved": "perhaps"})
    world.run_after(timedelta(days=1))
    assert instance.row.status == "errored"


def test_with_schema_error_raise_a_payload_that_breaks_the_schema_is_consumed_and_fails_the_wait(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.wait_for_event("approval", "approval", schema=Approval, schema_error="raise")
        except EventPayloadInvalid as exc:
            seen.append(str(exc))
        return step.wait_for_event("second try", "approval", schema=Approval).payload.by

    instance = order.run()
    instance.send("approval", {"approved": "perhaps"})
    world.run_until_idle()
    assert instance.events() == [("approval", {"approved": "perhaps"}, "approval")]
    instance.send("approval", {"approved": True, "by": "eve"})
    world.run_until_idle()
    assert instance.output == "eve"
    assert seen == [
        "Step 'approval' failed after 1 attempt: EventPayloadInvalid: The payload of event 'approval' does not fit the "
        "schema of wait 'approval': $.approved: Input should be a valid boolean, unable to interpret input; "
        "$.by: Field required"
    ] * len(seen)
    assert len(seen) == 2


@on_one_database
def test_an_event_that_is_refused_leaves_nothing_behind(world: World, order) -> None:
    instance = order.run()
    for type_, payload, id_, error in (
        ("", None, "e", InvalidEventType),
        ("a b", None, "e", InvalidEventType),
        ("approval\n", None, "e", InvalidEventType),
        ("x" * 101, None, "e", InvalidEventType),
        ("approval", object(), "e", NotSerializable),
        ("approval", float("inf"), "e", NotSerializable),
        ("approval", "x" * 2**20, "e", PayloadTooLarge),
        ("approval", None, "", NameInvalid),
        ("approval", None, "x" * 256, NameInvalid),
    ):
        with pytest.raises(error):
            instance.send(type_, payload, id=id_)
    assert instance.events() == []
