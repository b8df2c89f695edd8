"""Declared types: what pydantic cannot read is refused at the decorator, and a TypedDict of either module is read."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, NotRequired, Required, TypedDict

import pytest

from celery_durable import LinearStep, LinearWorkflow, Step, WorkflowEvent, durable_step
from celery_durable.definitions import define, describe_step
from celery_durable.errors import DefinitionInvalid
from celery_durable.values import ALREADY_CHECKED_LIMITS, Codec, ValidationFailed

REMEDY = (
    "Declare a pydantic model, a dataclass, a TypedDict or plain types; or leave the annotation out, and the values "
    "are plain JSON data that nothing checks."
)


class Plain:
    """Nothing that JSON has a form for."""


class Card(TypedDict):
    number: str
    until: NotRequired[date]


class Owner(Card, total=False):
    """Its annotations are text here, as in most modules; what is required must not get lost with that."""

    name: Required[str]
    cards: list[Card]


class Nested(TypedDict):
    by_name: dict[str, Owner | None]
    noted: Annotated[Card, "as printed"]


CARD = {"number": "4242"}
OWNER = {"number": "1", "name": "ada"}


def why(shown: str) -> str:
    return f"is declared as {shown}, which cannot be read: Unable to generate pydantic-core schema for "


def test_a_workflow_with_parameters_of_a_plain_class_is_refused_at_the_decorator() -> None:
    def order(event: WorkflowEvent[Plain], step: Step) -> None: ...

    with pytest.raises(DefinitionInvalid) as caught:
        define(order)
    text = str(caught.value)
    assert text.startswith(f"The parameter type of workflow {order.__qualname__} {why('Plain')}")
    assert text.endswith(REMEDY)


def test_so_is_its_return_type() -> None:
    def order(event: WorkflowEvent[Any], step: Step) -> list[Plain]: ...

    with pytest.raises(DefinitionInvalid, match=r"^The return type of workflow .*order is declared as list"):
        define(order)


def test_so_is_the_parameter_type_of_a_linear_workflow() -> None:
    with pytest.raises(
        DefinitionInvalid, match=r"^The parameter type of linear workflow 'refused' is declared as Plain"
    ):
        LinearWorkflow("refused", 1, [LinearStep("PAY")], params=Plain)


def test_so_is_the_return_type_of_a_step() -> None:
    def charge() -> Plain: ...

    for mark in (durable_step, durable_step(retries=1), describe_step):
        with pytest.raises(DefinitionInvalid, match=r"^The return type of step function .*charge is declared as Plain"):
            mark(charge)


def test_what_is_defined_below_is_read_when_it_is_needed() -> None:
    found = _defined_early
    assert found.params.decode('{"on": "2030-01-02"}') == Late(date(2030, 1, 2))
    with pytest.raises(DefinitionInvalid, match=r"^The return type of workflow early is declared as list"):
        found.output.decode("[]")


def early(event: WorkflowEvent[Late], step: Step) -> list[Later]: ...


_defined_early = define(early)  # before there is Late, or Later


@dataclass
class Late:
    on: date


class Later:
    pass


# --- TypedDict ----------------------------------------------------------------------------------


def test_a_typed_dict_of_typing_is_read_on_every_python() -> None:
    for annotation, value in [
        (Card, CARD),
        (Card, CARD | {"until": "2030-01-02"}),
        (Owner, OWNER),
        (Owner, OWNER | {"cards": [CARD]}),
        (list[Card], [CARD]),
        (typing.List[Card], [CARD]),  # noqa: UP006  # as it may be written
        (Card | None, None),
        (Nested, {"by_name": {"a": OWNER, "b": None}, "noted": CARD}),
    ]:
        codec = Codec.for_stored_values(lambda: annotation)
        read = codec.check(value)
        assert codec.is_typed
        assert codec.check(codec.decode(codec.encode(read, what="It", limits=ALREADY_CHECKED_LIMITS))) == read


def test_what_a_typed_dict_requires_is_checked() -> None:
    for annotation, value, where in [
        (Card, {}, "$.number"),
        (Card, CARD | {"until": "soon"}, "$.until"),
        (Owner, {"number": "1"}, "$.name"),
        (Owner, {"name": "ada"}, "$.number"),
        (Owner, OWNER | {"cards": [{}]}, "$.cards[0].number"),
        (list[Card], [CARD, {}], "$[1].number"),
        (Nested, {"by_name": {"a": {}}, "noted": CARD}, "$.by_name.a.number"),
        (Nested, {"by_name": {}, "noted": {}}, "$.noted.number"),
    ]:
        with pytest.raises(ValidationFailed) as failure:
            Codec.for_stored_values(lambda: annotation).check(value)
        assert failure.value.problems[0][0] == where


def test_a_workflow_takes_and_returns_typed_dicts() -> None:
    def order(event: WorkflowEvent[Owner], step: Step) -> Card: ...

    found = define(order)
    assert found.params.decode('{"number": "1", "name": "ada"}') == OWNER
    with pytest.raises(ValidationFailed):
        found.output.decode("{}")
