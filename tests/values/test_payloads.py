from __future__ import annotations

import collections
import json
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.values import encode
from tests.values.shapes import (
    LIMITS,
    TYPED,
    Cat,
    Colour,
    Kind,
    Level,
    Money,
    Mood,
    Point,
    aware_datetimes,
    codec,
    decimals,
    json_values,
    lines,
    orders,
    round_trip,
    words,
)


@pytest.mark.parametrize(("annotation", "strategy"), TYPED, ids=[str(annotation) for annotation, _ in TYPED])
@settings(max_examples=30)
@given(data=st.data())
def test_a_value_of_a_declared_type_comes_back_as_it_was(
    annotation: Any, strategy: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(strategy)
    text = codec(annotation).encode(value, what="Result", limits=LIMITS)
    back = codec(annotation).decode(text)
    assert back == value
    assert type(back) is type(value)
    assert round_trip(annotation, back) == back


@given(
    st.recursive(
        json_values
        | decimals
        | aware_datetimes
        | st.uuids()
        | st.sampled_from([*Colour, *Kind, *Level, *Mood])
        | lines
        | orders
        | st.binary(max_size=3).filter(lambda data: data.isascii() and b"\x00" not in data),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(words | st.integers() | st.booleans() | st.dates(), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_without_a_declared_type_what_the_first_run_gets_is_what_replays_get(value: Any) -> None:
    first = round_trip(None, value)
    assert round_trip(None, first) == first


@given(json_values)
def test_the_text_is_compact_json_that_utf_8_can_hold(value: Any) -> None:
    text = encode(value, what="Result", limits=LIMITS)
    assert json.loads(text.encode().decode()) == value
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@given(
    json_values
    | st.sampled_from([*Colour, *Kind, *Level])
    | st.dictionaries(
        words | st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False), json_values, max_size=4
    )
)
def test_a_value_is_stored_among_a_hundred_others_as_it_is_alone(value: Any) -> None:
    crowd: list[Any] = [[] for _ in range(100)]  # too many brackets for the fast way
    assert round_trip(None, [*crowd, value]) == [*crowd, round_trip(None, value)]


def test_mappings_sets_and_named_tuples_become_plain_json() -> None:
    value = {"a": MappingProxyType({"b": 1}), "c": collections.OrderedDict(d=Point(1, 2)), "e": frozenset({1})}
    assert round_trip(None, value) == {"a": {"b": 1}, "c": {"d": [1, 2]}, "e": [1]}


def test_an_undeclared_model_is_written_as_its_json_form() -> None:
    assert round_trip(None, [Money(Decimal("1.50"), "EUR"), Cat(lives=9)]) == [
        {"amount": "1.50", "currency": "EUR"},
        {"kind": "cat", "lives": 9},
    ]
