"""Models with aliases, computed fields and validators as parameters and results."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, computed_field

from celery_durable.values import Codec, ValidationFailed
from tests.values.shapes import LIMITS, MARK, Cat, Pet, Tree, codec, problems, round_trip


class Aliased(BaseModel):
    order_id: int = Field(default=0, alias="orderId")


class WrittenOtherwise(BaseModel):
    order_id: int = Field(default=0, serialization_alias="orderId")


class ReadOtherwise(BaseModel):
    order_id: int = Field(default=0, validation_alias=AliasChoices("orderId", AliasPath("order", "id")))
    item: WrittenOtherwise | None = None


class AliasesThatCross(BaseModel):
    """Read by alias and by name at once, `legacy` would get what is `id`'s."""

    id: str = Field(default="", validation_alias="_id")
    legacy: str = Field(default="", validation_alias="id")


class ByNameOnly(BaseModel):
    model_config = ConfigDict(validate_by_alias=False, validate_by_name=True)

    order_id: int = Field(default=0, alias="orderId")


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    width: int

    @computed_field
    def area(self) -> int:
        return self.width**2


class Envelope(BaseModel):
    body: pydantic.Json[dict[str, int]]


@pydantic.dataclasses.dataclass
class Row:
    order_id: int = Field(default=0, serialization_alias="orderId")


@pytest.mark.parametrize(
    "value",
    [
        Aliased(orderId=5),
        WrittenOtherwise(order_id=5),
        ReadOtherwise.model_validate({"order": {"id": 5}, "item": {"order_id": 6}}),
        AliasesThatCross.model_validate({"_id": "a", "id": "b"}),
        ByNameOnly(order_id=5),
        Computed(width=3),
        Envelope(body='{"a": 1}'),  # type: ignore[arg-type]  # read from text
        Row(order_id=5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_round_trips_whatever_its_aliases_and_computed_fields(value: Any) -> None:
    assert round_trip(type(value), value) == value
    assert round_trip(list[type(value)], [value]) == [value]  # type: ignore[misc]
    assert round_trip(dict[str, type(value) | None], {"a": value}) == {"a": value}  # type: ignore[misc]


def test_stored_text_uses_aliases_where_they_are_the_same_for_reading_and_writing() -> None:
    assert codec(Aliased).encode(Aliased(orderId=5), what="Result", limits=LIMITS) == '{"orderId":5}'
    assert codec(Computed).encode(Computed(width=3), what="Result", limits=LIMITS) == '{"width":3}'


def test_text_from_outside_names_fields_by_the_aliases_of_their_model() -> None:
    assert Codec(ReadOtherwise).decode('{"orderId":5}').order_id == 5
    assert Codec(Aliased).decode('{"orderId":5}').order_id == 5


def test_a_dict_becomes_its_model_when_it_is_checked() -> None:
    found = codec(Cat).check({"lives": "9"})
    assert found == Cat(lives=9)
    assert codec(Cat).check(found) is found
    assert codec(None).check({"lives": "9"}) == {"lives": "9"}


def test_what_does_not_fit_is_told_by_path_without_the_value() -> None:
    text = json.dumps({"name": "a", "children": [{"name": "b"}, {"name": [MARK]}]})
    assert problems(Tree, text) == [("$.children[1].name", "Input should be a valid string")]
    assert problems(dict[str, list[int]], f'{{"a":[1,"{MARK}"]}}') == [
        ("$.a[1]", "Input should be a valid integer, unable to parse string as an integer")
    ]
    assert problems(Decimal, '"NaN"') == [("$", "Input should be a finite number")]


def test_an_unknown_tag_is_not_told_since_it_is_a_value() -> None:
    assert problems(list[Pet], f'[{{"kind":"{MARK}"}}]') == [("$[0]", "Input has an unknown tag")]


class BrokenValidator(BaseModel):
    x: int

    @pydantic.field_validator("x", mode="before")
    @classmethod
    def look_up(cls, value: Any) -> Any:
        return {}[value]


def test_a_validator_that_raises_is_a_validation_failure_and_no_internal_error() -> None:
    with pytest.raises(ValidationFailed) as on_decode:
        codec(BrokenValidator).decode('{"x":1}')
    with pytest.raises(ValidationFailed) as on_check:
        codec(BrokenValidator).check({"x": 1})
    assert on_decode.value.problems == on_check.value.problems == [("$", "a validator raised KeyError")]
