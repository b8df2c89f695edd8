"""The result of a step is the same the first time as on every replay, or the step fails."""

from __future__ import annotations

import functools
import math
import re
import uuid
from datetime import datetime, timedelta
from decimal import Decimal

import pydantic
import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import NotSerializable
from tests.support.flows import flow_of
from tests.support.results import (
    Colour,
    make_amount,
    make_bytes,
    make_id,
    make_infinity,
    make_instant,
    make_keys,
    make_noon,
    make_pair,
    make_parcel,
    make_receipt,
    make_span,
    make_untyped,
)
from tests.support.world import World, on_one_database


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (make_receipt, make_receipt()),
        (make_parcel, make_parcel()),
        (make_instant, make_instant()),
        (make_amount, Decimal("0.10")),
        (make_id, uuid.UUID(int=5)),
        (make_pair, (1, make_receipt())),
        (make_span, timedelta(days=2, microseconds=3)),
        (make_bytes, b"\xff\x00"),
        (make_infinity, math.inf),
        (make_keys, {1: Colour.RED}),
        (make_untyped, [1, {"when": "2030-05-06T07:08:09.123456Z", "2": "1.0"}]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_result_is_the_same_the_first_time_as_on_every_replay(world: World, make, expected) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(step.do("make", make))
        step.sleep("rest", 60)

    order.run()
    world.run_after(60)
    assert seen == [expected, expected]
    assert [type(value) for value in seen] == [type(expected)] * 2


def test_a_day_after_noon_is_noon_on_every_pass_though_the_clocks_change(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent[datetime], step: Step) -> datetime:
        tomorrow = step.do("look", make_noon) + timedelta(days=1)
        seen.append((event.payload, tomorrow))
        step.sleep("rest", 60)
        return tomorrow

    instance = order.run(make_noon())
    world.run_after(60)
    noon = make_noon() + timedelta(days=1)
    assert seen == [(make_noon(), noon), (make_noon(), noon)]
    assert {at.tzinfo for pair in seen for at in pair} == {noon.tzinfo}
    assert instance.output == "2030-03-31T12:00:00+02:00[Europe/Berlin]"


def make_pattern() -> re.Pattern[str]:
    return re.compile("a", re.IGNORECASE)


LOST = "cannot be stored as JSON: $ is a pattern with flags: write them into the pattern, such as (?i). Use plain data"


def test_a_value_that_would_be_read_back_as_less_is_refused_wherever_it_is_stored(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[re.Pattern[str] | None], step: Step) -> re.Pattern[str] | None:
        return make_pattern() if event.payload else step.do("make", make_pattern)

    with pytest.raises(NotSerializable, match=re.escape(f"Parameters of workflow 'order' {LOST}")):
        order.create(make_pattern())
    assert order.run().error.startswith(f"NotSerializable: Result of step 'make' {LOST}")
    assert order.run("a", id="i-2").error.startswith(f"NotSerializable: Output of workflow 'order' {LOST}")


@on_one_database
@pytest.mark.parametrize("value", [float("nan"), "a\x00b", "\ud800", functools.reduce(lambda v, _: [v], range(70), 1)])
def test_a_result_that_some_database_would_refuse_fails_the_step_before_any_sql(world: World, value: object) -> None:
    order = flow_of(world, lambda step: step.do("make", lambda: value))
    assert order.run().error.startswith("NotSerializable: Result of step 'make' cannot be stored as JSON: $")


def promise_number() -> int:
    return "seven"  # type: ignore[return-value]


def test_a_result_that_breaks_its_annotation_fails_the_step_at_once(world: World) -> None:
    order = flow_of(world, lambda step: step.do("count", promise_number))
    assert order.run().error == (
        "StepResultInvalid: The result of step 'count' does not fit the function's return annotation: "
        "$: Input should be a valid integer, unable to parse string as an integer."
    )


class Moody(pydantic.BaseModel):
    @pydantic.model_serializer
    def refuse(self) -> dict:
        raise KeyError("not today")


def make_moody() -> Moody:
    return Moody()


SERIALIZER = (
    "cannot be stored as JSON: $ is a Moody, which has no JSON form. Use plain data (or pydantic models, "
    "dataclasses, datetimes, Decimals, UUIDs, enums); keep other things elsewhere and store a reference."
)


def test_a_result_whose_own_serializer_fails_fails_the_step(world: World) -> None:
    instance = flow_of(world, lambda step: step.do("make", make_moody)).run()
    assert instance.error == f"NotSerializable: Result of step 'make' {SERIALIZER}"
    assert instance.step("make").attempts == 1


def test_an_output_whose_own_serializer_fails_ends_the_instance_errored(world: World) -> None:
    order = flow_of(world, lambda step: Moody())
    assert order.run().error == f"NotSerializable: Output of workflow 'order' {SERIALIZER}"
