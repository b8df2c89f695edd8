"""Published values that cannot be written, or are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import NameInvalid, NotSerializable, PayloadTooLarge
from tests.support.publishing import Statements, published
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


# --- when it cannot be written ------------------------------------------------------------------


@everywhere
def test_a_database_that_is_away_for_a_moment_is_not_the_bodys_failure(world: World, caplog) -> None:
    watched = Statements(world)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            watched.fails = lambda statement: "workflow_published" in statement
            step.publish("n", 1)
            step.publish("n", 2)
            watched.fails = lambda _: False
            return "worked"

        return step.do("work", work)

    with caplog.at_level(logging.WARNING, "celery_durable.runner"):
        instance = order.run()
    assert instance.output == "worked"
    assert instance.step("work").attempts == 1
    assert published(instance) == {"n": 2}
    (warning,) = [record.message for record in caplog.records if "publish" in record.message]
    assert warning == ("order/i-1#1 could not publish 'n', it is tried again: the database is away")


def test_a_value_that_could_not_be_written_is_tried_again_a_second_later(world: World) -> None:
    watched, seen = Statements(world), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            watched.fails = lambda statement: "workflow_published" in statement
            step.publish("a", 1)
            watched.fails = lambda _: False
            world.advance(1)
            step.publish("b", 2)
            seen.append(published(instance))

        step.do("work", work)

    instance = order.create()
    world.run_until_idle()
    assert seen == [{"a": 1, "b": 2}]


class SoftTimeLimit(Exception):
    """As Celery's, which is an Exception."""


def test_what_stops_a_body_stops_it_also_while_it_publishes(world: World) -> None:
    worker, began = world.new_worker(interruptions=(SoftTimeLimit,)), []

    def stop() -> None:
        raise SoftTimeLimit

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            began.append(1)
            if len(began) == 1:
                worker.runtime.at["before-commit"] = stop
            step.publish("n", len(began))
            return "worked"

        return step.do("work", work)

    instance = order.create()
    with pytest.raises(SoftTimeLimit):
        worker.advance(instance.ref)
    world.exempt["I9"] = "the worker was stopped"
    world.run_until_idle()
    assert instance.output == "worked"
    assert published(instance) == {"n": 2}


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (
            "k" * 65,
            1,
            NameInvalid,
            f"Published key '{'k' * 65}' is not allowed: use text of 1 to 64 characters without control characters.",
        ),
        (
            7,
            1,
            NameInvalid,
            "Published key 7 is not allowed: it is of type int; pass text (str).",
        ),
        (
            "n",
            {"socket": object()},
            NotSerializable,
            "Published value 'n' cannot be stored as JSON: $.socket is a object, which has no JSON form. "
            "Use plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things "
            "elsewhere and store a reference.",
        ),
        (
            "n",
            "x" * 2**20,
            PayloadTooLarge,
            "Published value 'n' has 1048578 bytes as JSON; at most 1048576 are allowed. "
            "Keep large data elsewhere and store a reference, or raise durable_max_payload_bytes.",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_published_also_on_replay(
    world: World, key: Any, value: Any, error: type[Exception], message: str
) -> None:
    caught = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def publish() -> None:
            try:
                step.publish(key, value)
            except error as exc:
                caught.append(str(exc))

        publish()
        step.do("body", publish)
        step.sleep("rest", 60)

    instance = order.run()
    world.run_after(60)
    assert instance.status == "complete"
    assert caught == [message] * 3
    assert published(instance) == {}


def test_a_function_that_has_been_interrupted_publishes_nothing(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.publish("state", "started")
            step.sleep("rest", 60)
        finally:
            step.publish("state", "over")

    instance = order.run()
    assert published(instance) == {"state": "started"}
    world.run_after(60)
    assert published(instance) == {"state": "over"}
