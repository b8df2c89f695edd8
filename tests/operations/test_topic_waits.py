"""The deadline and the schema of a wait on a topic, and topics and emissions that are refused."""

from __future__ import annotations

from datetime import timedelta

import pydantic
import pytest

from celery_durable import EventPayloadInvalid, EventTimeout, Step, WorkflowEvent
from celery_durable.errors import InvalidTopic, NameInvalid, NotSerializable, PayloadTooLarge
from tests.support.topics import left, waiting
from tests.support.world import World, on_one_database


class Price(pydantic.BaseModel):
    cents: int


def test_a_wait_times_out_the_same_on_both_passes(world: World) -> None:
    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        try:
            step.wait_for_topic("price", "prices", timeout="1 minute")
        except EventTimeout as exc:
            step.sleep("rest", 60)
            return str(exc)

    instance = watch.run()
    world.run_after(60)
    assert (instance.status, waiting(world, "prices"), left(world)) == ("waiting", [], 0)
    world.run_after(60)
    text = "Nothing was emitted to topic 'prices' within 1 min"
    assert instance.output == f"Step 'price' failed after 1 attempt: EventTimeout: {text}"


def test_the_deadline_is_within(world: World, watch) -> None:
    instance = watch.run()
    world.advance(60)
    assert world.operations.topics.emit("prices/eur.usd", "at the deadline") == 1
    world.run_until_idle()
    assert instance.output[1] == "at the deadline"


def test_what_comes_after_the_deadline_is_for_nobody(world: World, watch) -> None:
    instance = watch.run()
    world.advance(timedelta(seconds=60, milliseconds=1))
    assert world.operations.topics.emit("prices/eur.usd", "late") == 0
    world.run_until_idle()
    assert instance.output.endswith("EventTimeout: Nothing was emitted to topic 'prices/eur.usd' within 1 min")
    assert instance.events() == []


def test_a_payload_that_breaks_the_schema_is_consumed_and_fails_the_wait(world: World) -> None:
    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        try:
            step.wait_for_topic("first", "prices", schema=Price)
        except EventPayloadInvalid as exc:
            step.log.info(str(exc))
        return step.wait_for_topic("second", "prices", schema=Price).payload.cents

    instance = watch.run()
    world.operations.topics.emit("prices", {"cents": "many"})
    world.run_until_idle()
    assert world.operations.topics.emit("prices", {"cents": 5}) == 1
    world.run_until_idle()
    assert instance.output == 5
    assert instance.lines()[0] == (
        "Step 'first' failed after 1 attempt: EventPayloadInvalid: The payload of topic 'prices' does not fit the "
        "schema of wait 'first': $.cents: Input should be a valid integer, unable to parse string as an integer"
    )


@on_one_database
def test_an_emission_that_is_refused_leaves_nothing_behind(world: World) -> None:
    for topic, payload, id_, error in (
        *((topic, None, "e", InvalidTopic) for topic in ("", "a b", ".a", "a\n", "x" * 101)),
        ("prices", object(), "e", NotSerializable),
        ("prices", "x" * 2**20, "e", PayloadTooLarge),
        ("prices", None, "", NameInvalid),
        ("prices", None, "x" * 201, NameInvalid),
    ):
        with pytest.raises(error):
            world.operations.topics.emit(topic, payload, id=id_)
    assert left(world) == 0


def test_a_topic_is_checked_where_it_is_waited_for(world: World) -> None:
    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        step.wait_for_topic("price", "no spaces")

    assert watch.run().error == (
        "InvalidTopic: Topic 'no spaces' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - . : / and "
        "begin with none of - . : /."
    )
