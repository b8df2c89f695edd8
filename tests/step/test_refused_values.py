"""What an author writes by mistake ends with a sentence that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
import pytest

from celery_durable import LinearStep, Step, StepConfig, WorkflowEvent
from celery_durable.definitions import durable_step
from celery_durable.errors import InstanceTerminal, NotSerializable
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.lines import Line, waits_for
from tests.support.world import World, on_one_database

database = on_databases("sqlite", "postgresql", "mariadb")
COROUTINE = "$ is a coroutine, not its result: `await` it"
never = StepConfig(retries=0)


async def coro() -> int:
    return 1


@on_one_database
def test_a_lambda_that_makes_a_coroutine_is_told_so(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("work", never, lambda: coro())

    assert order.run().error.startswith(f"NotSerializable: Result of step 'work' cannot be stored as JSON: {COROUTINE}")


@on_one_database
def test_a_coroutine_among_the_parameters_or_in_an_event_is_named(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.wait_for_event("approval", "approval")

    instance = order.run()
    with pytest.raises(NotSerializable) as refused:
        order.create(coro(), id="i-2")
    assert str(refused.value).startswith(f"Parameters of workflow 'order' cannot be stored as JSON: {COROUTINE}")
    with pytest.raises(NotSerializable) as refused:
        instance.send("approval", coro())
    assert str(refused.value).startswith(f"Payload of event 'approval' cannot be stored as JSON: {COROUTINE}")


@on_one_database
@pytest.mark.parametrize(
    ("value", "around"),
    [
        ({1: "a", "1": "b"}, lambda value: value),
        ({True: "a", "true": "b"}, lambda value: [0, {"in": value}]),
        ({None: "a", "null": "b"}, lambda value: Box(value)),
    ],
)
def test_keys_that_json_writes_alike_are_refused_with_their_path(world: World, value: Any, around: Any) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("work", never, lambda: around(value))

    path = {dict: "$", list: "$[1].in", Box: "$.items"}[type(around(value))]
    key, kind = list(value)[1], type(next(iter(value))).__name__
    kinds = " and ".join(sorted([kind, "str"]))
    assert f": {path}.{key} has two keys that JSON writes alike, of types {kinds}." in order.run().error


@dataclass
class Box:
    items: Any


def _typed() -> dict[int | str, str]:
    return {1: "a", "1": "b"}


@on_one_database
def test_they_are_where_a_type_is_declared(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("work", never, _typed)

    assert "$.1 has two keys that JSON writes alike, of types int and str." in order.run().error


@on_one_database
def test_keys_that_only_look_alike_are_kept(world: World) -> None:
    order = flow_of(
        world, lambda step: step.do("work", lambda: {1: "a", "01": "b", "-2": ["1", "2"], "x": {"2030": 1}})
    )
    assert order.run().output == {"1": "a", "01": "b", "-2": ["1", "2"], "x": {"2030": 1}}


@durable_step
def bare() -> int:
    """Marked without parentheses."""
    return 7


@on_one_database
def test_durable_step_needs_no_parentheses(world: World) -> None:
    order = flow_of(world, lambda step: step.do(bare))
    assert (order.run().output, bare()) == (7, 7)


# --- events after the end -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "linear"])
@pytest.mark.parametrize("end", ["complete", "terminated"])
def test_an_event_that_was_accepted_is_so_after_the_end_too(world: World, kind: str, end: str) -> None:
    if kind == "linear":
        flow = Line(world, [LinearStep("PAY")], PAY=waits_for("paid")).flow
    else:

        @world.workflow(name="order")
        def flow(event: WorkflowEvent[Any], step: Step) -> Any:
            return step.wait_for_event("wait", "paid").payload

    instance = flow.run()
    if end == "complete":
        assert instance.send("paid", 5, id="e-1")
        world.run_until_idle()
        assert instance.output == 5
    else:
        assert instance.send("other", 5, id="e-1")
        instance.terminate()
    assert not instance.send("paid", 5, id="e-1")
    for other in ({}, {"id": "e-2"}):
        with pytest.raises(InstanceTerminal):
            world.operations.events.send("order", "i-1", "paid", 5, **other)
    instance.restart()
    assert instance.send("paid", 6, id="e-1")  # another run accepts it anew
    world.run_until_idle()


class CustomsError(Exception):
    """Of the author: not one of Python's own errors, which pydantic and json raise."""


def refuse(value: int) -> int:
    raise CustomsError(f"{value} boxes")


Boxes = Annotated[int, pydantic.AfterValidator(refuse)]


def test_an_output_whose_validator_raises_ends_the_instance(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Boxes:
        return 7

    assert order.run().error == "CustomsError: 7 boxes"


@pytest.mark.parametrize("how", ["child", "create"])
def test_parameters_whose_validator_raises_fail_the_step(world: World, how: str) -> None:
    @world.workflow
    def parcel(event: WorkflowEvent[Boxes], step: Step) -> None: ...

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        if how == "child":
            step.child("send", parcel, 7)
        else:
            step.do("send", never, lambda tx: tx.create(parcel, 7))

    instance = order.run()
    assert (instance.error, instance.statuses()) == ("CustomsError: 7 boxes", {"send": "errored"})
