"""Values without a JSON form that every database can store are refused by their path."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Generator, Iterator
from datetime import date, datetime
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from celery_durable.errors import NotSerializable, PayloadTooLarge
from celery_durable.values import PayloadLimits, ValidationFailed, encode
from tests.values.shapes import MARK, REMEDY, Pet, codec, refusal, round_trip


class Slot(BaseModel):
    price: float = 0
    anything: Any = None


@dataclasses.dataclass
class Box:
    content: Any


@pytest.mark.parametrize(
    ("annotation", "wrap", "path"),
    [
        (None, lambda x: x, "$"),
        (Any, lambda x: x, "$"),
        (None, lambda x: {"items": [0, {"when": x}]}, "$.items[1].when"),
        (dict[str, Any], lambda x: {"items": [0, {"when": x}]}, "$.items[1].when"),
        (list, lambda x: [x], "$[0]"),
        (list[Slot], lambda x: [Slot(price=x, anything=x)], "$[0].anything"),
        (Slot, lambda x: Slot(anything=[x]), "$.anything[0]"),
        (list[Slot], lambda x: [Slot(anything={"a": x})], "$[0].anything.a"),
        (Box, lambda x: Box({"a": x}), "$.content.a"),
        (None, lambda x: [Box(x)], "$[0].content"),
        (None, lambda x: {"a": {x: 1}}, "$.a"),
    ],
)
def test_a_number_that_json_does_not_have_is_refused_by_its_path(annotation: Any, wrap: Any, path: str) -> None:
    for number in (math.nan, math.inf, -math.inf):
        message = refusal(annotation, wrap(number))
        assert message == f"Result cannot be stored as JSON: {path} is {number}, which JSON does not have. {REMEDY}"


@pytest.mark.parametrize(
    ("annotation", "wrap", "path"),
    [
        (None, lambda x: x, "$"),
        (str, lambda x: x, "$"),
        (None, lambda x: {"a": [1, [x]]}, "$.a[1][0]"),
        (dict[str, str], lambda x: {"a": x}, "$.a"),
        (Slot, lambda x: Slot(anything=[x]), "$.anything[0]"),
        (None, lambda x: [Box(x)], "$[0].content"),
    ],
)
def test_text_that_some_database_would_refuse_is_refused_by_its_path(annotation: Any, wrap: Any, path: str) -> None:
    reason = "contains a NUL character or half a surrogate pair"
    for text in (f"{MARK}\x00", f"\ud800{MARK}", f"{MARK}\udfff"):
        message = refusal(annotation, wrap(text))
        assert message == f"Result cannot be stored as JSON: {path} {reason}. {REMEDY}"


@pytest.mark.parametrize("key", [f"{MARK}\x00", f"\ud800{MARK}"])
def test_a_key_that_some_database_would_refuse_is_refused(key: str) -> None:
    reason = "has a key with a NUL character or half a surrogate pair"
    assert refusal(None, {"a": {key: 1}}) == f"Result cannot be stored as JSON: $.a {reason}. {REMEDY}"


@pytest.mark.parametrize("value", ["\\u0000", ["\\u0000", "a\\u0000b"], {"\\u0000": "\\ud800"}, "\x7f\u2028\uffff"])
def test_text_that_only_looks_like_an_escape_is_accepted(value: Any) -> None:
    assert round_trip(None, value) == value
    assert round_trip(Any, value) == value


TOO_DEEP = "is nested more deeply than durable_max_payload_depth allows"


def nested(depth: int, leaf: Any = None) -> Any:
    for level in range(depth):
        leaf = [leaf] if level % 2 else {"a": leaf}
    return leaf


@pytest.mark.parametrize("leaf", [1, "x", date(2030, 1, 1)])
@pytest.mark.parametrize("annotation", [None, dict[str, Any] | list[Any]])
def test_nesting_is_allowed_up_to_the_limit_and_refused_beyond(annotation: Any, leaf: Any) -> None:
    limits = PayloadLimits(depth=5)
    codec(annotation).encode(nested(5, leaf), what="Result", limits=limits)
    message = refusal(annotation, nested(6, leaf), limits)
    assert message == f"Result cannot be stored as JSON: $[0].a[0].a[0] {TOO_DEEP}. {REMEDY}"


@pytest.mark.parametrize("annotation", [None, list, list[Any]])
def test_endless_and_absurd_nesting_is_refused(annotation: Any) -> None:
    circle: list[Any] = []
    circle.append(circle)
    abyss: Any = []
    for _ in range(100_000):
        abyss = [abyss]
    for value in (circle, abyss):
        path = "$" + "[0]" * 64
        assert refusal(annotation, value) == f"Result cannot be stored as JSON: {path} {TOO_DEEP}. {REMEDY}"
    while abyss:  # its destruction would need as deep a stack
        abyss = abyss.pop()


def test_many_brackets_are_not_deep() -> None:
    wide = [{"a": [index]} for index in range(1000)]
    assert round_trip(None, wide) == wide


def test_a_dataclass_that_holds_itself_is_refused() -> None:
    box = Box(None)
    box.content = [box]
    assert refusal(None, box).endswith(f" {TOO_DEEP}. {REMEDY}")
    assert refusal(Box, box).endswith(f" {TOO_DEEP}. {REMEDY}")


@pytest.mark.parametrize(
    ("text", "size"), [("x" * 98, 100), ("\xe9" * 49, 100), ("\N{GRINNING FACE}" * 24 + "xx", 100)]
)
def test_size_is_counted_in_bytes_and_the_limit_is_allowed(text: str, size: int) -> None:
    encode(text, what="Result", limits=PayloadLimits(size_bytes=size))
    with pytest.raises(PayloadTooLarge) as refused:
        encode(text, what="Result", limits=PayloadLimits(size_bytes=size - 1))
    assert str(refused.value) == (
        f"Result has {size} bytes as JSON; at most {size - 1} are allowed. "
        "Keep large data elsewhere and store a reference, or raise durable_max_payload_bytes."
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_python_would_not_read_back_is_refused(sign: int) -> None:
    longest = sign * (10**4300 - 1)
    assert round_trip(None, longest) == longest
    reason = "is an integer of more than 4300 digits"
    for annotation, value, path in (
        (None, [10**4300 * sign], "$[0]"),
        (Slot, Slot(anything=10**4300 * sign), "$.anything"),
    ):
        assert refusal(annotation, value) == f"Result cannot be stored as JSON: {path} {reason}. {REMEDY}"


@dataclasses.dataclass
class Scan:
    """Its first two fields have a JSON form because they are declared."""

    picture: bytes
    score: float
    more: Any


class Handle:
    """An object of the author's that is no data."""

    def __repr__(self) -> str:
        return MARK


@pytest.mark.parametrize(
    ("annotation", "value", "path", "kind"),
    [
        (None, Handle(), "$", "Handle"),
        (None, {"rows": [1, Handle()]}, "$.rows[1]", "Handle"),
        (dict[str, Any], {"rows": [1, Handle()]}, "$.rows[1]", "Handle"),
        (Slot, Slot(anything={"a": Handle()}), "$.anything.a", "Handle"),
        (None, Slot(anything={"a": Handle()}), "$.anything.a", "Handle"),
        (Box, Box([Handle()]), "$.content[0]", "Handle"),
        (Scan, Scan(b"\xff", math.nan, [Handle()]), "$.more[0]", "Handle"),
        (None, {"a": Box([Handle()])}, "$.a.content[0]", "Handle"),
        (None, len, "$", "builtin_function_or_method"),
        (None, b"\xff", "$", "bytes"),
        (dict[str, Any], {"a": b"\xff"}, "$.a", "bytes"),
        (None, Box, "$", "type"),
    ],
)
def test_what_has_no_json_form_is_refused_by_path_and_type(annotation: Any, value: Any, path: str, kind: str) -> None:
    message = refusal(annotation, value)
    assert message == f"Result cannot be stored as JSON: {path} is a {kind}, which has no JSON form. {REMEDY}"


def test_a_key_that_is_no_scalar_is_refused_by_its_type() -> None:
    message = refusal(None, {"a": {Handle(): 1}})
    assert message == f"Result cannot be stored as JSON: $.a has a key of type Handle. {REMEDY}"


def failing() -> Generator[int]:
    yield 1
    raise KeyError(MARK)


@pytest.mark.parametrize("annotation", [None, list[int], Iterator[int], Generator[int, None, None]])
def test_a_generator_is_refused_unread_since_its_code_would_run_outside_the_step(annotation: Any) -> None:
    for value in (failing(), {"a": failing()}) if annotation is None else (failing(),):
        path, started = ("$.a", value["a"]) if isinstance(value, dict) else ("$", value)
        reason = "is a generator, which can be read only once: make it a list"
        assert refusal(annotation, value) == f"Result cannot be stored as JSON: {path} {reason}. {REMEDY}"
        assert next(started) == 1
    assert "is a map, which" in refusal(None, map(int, "12"))
    assert "is a chain, which" in refusal(None, itertools.chain([1]))


class BrokenSerializer(BaseModel):
    x: str

    @pydantic.field_serializer("x")
    def look_up(self, value: str) -> Any:
        raise KeyError(value)


@dataclasses.dataclass(slots=True)
class Unfinished:
    later: int = dataclasses.field(init=False)


@pytest.mark.parametrize("value", [BrokenSerializer(x=MARK), Unfinished()])
def test_a_serializer_that_breaks_is_a_refusal_without_the_value(value: Any) -> None:
    for annotation in (None, type(value)):
        assert refusal(annotation, value) == (
            f"Result cannot be stored as JSON: $ is a {type(value).__name__}, which has no JSON form. {REMEDY}"
        )


@given(
    st.recursive(
        st.just(MARK) | st.sampled_from([f"{MARK}\x00", f"{MARK}\ud800", math.nan]) | st.builds(Handle),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            | st.builds(Box, inner)
            | st.builds(Slot, anything=inner)
        ),
        max_leaves=5,
    ),
    st.sampled_from([None, Box, Slot, str, int, datetime, dict[str, Any], list[Box], Pet]),
)
def test_no_message_tells_a_value(value: Any, annotation: Any) -> None:
    """Wrong values of wrong types included: each ends as one of our two errors, or comes through."""
    try:
        text = codec(annotation).encode(value, what="Result", limits=PayloadLimits(size_bytes=200, depth=3))
        codec(annotation).decode(text)
    except (NotSerializable, PayloadTooLarge, ValidationFailed) as refused:
        assert MARK not in str(refused)
