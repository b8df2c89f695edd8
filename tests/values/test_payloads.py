from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import json
import math
import traceback
import typing
import uuid
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, computed_field
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_durable.errors import DefinitionInvalid, NotSerializable, PayloadTooLarge
from celery_durable.values import Codec, PayloadLimits, ValidationFailed, encode

LIMITS = PayloadLimits()
REMEDY = (
    "Return plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); "
    "keep other things elsewhere and store a reference."
)
MARK = "4111-1111"
"""Stands for what must not be told."""


def codec(annotation: Any) -> Codec:
    return Codec.for_stored_values(lambda: annotation)


def round_trip(annotation: Any, value: Any) -> Any:
    return codec(annotation).decode(codec(annotation).encode(value, what="Result", limits=LIMITS))


def refusal(annotation: Any, value: Any, limits: PayloadLimits = LIMITS) -> str:
    with pytest.raises(NotSerializable) as refused:
        codec(annotation).encode(value, what="Result", limits=limits)
    return str(refused.value)


def problems(annotation: Any, text: str) -> list[tuple[str, str]]:
    with pytest.raises(ValidationFailed) as failure:
        codec(annotation).decode(text)
    assert MARK not in "".join(traceback.format_exception(failure.value))
    return failure.value.problems


# --- shapes ---------------------------------------------------------------------------------------


class Colour(str, enum.Enum):  # noqa: UP042  # its str() is "Colour.RED"
    RED = "red"


class Kind(enum.StrEnum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


class Mood(enum.Enum):
    CALM = 0.5


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str


@dataclasses.dataclass(slots=True)
class Line:
    sku: uuid.UUID
    price: Money
    on: date
    tags: set[str] = dataclasses.field(default_factory=set)


class Ticket(typing_extensions.TypedDict):
    seat: int
    until: datetime


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Order(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    id: uuid.UUID
    placed_at: datetime
    total: Decimal
    colour: Colour
    level: Level
    mood: Mood
    ttl: timedelta
    blob: bytes
    at: time | None
    pair: tuple[int, str]
    pet: Pet | None = None
    extra: Any = None


aware_datetimes = st.datetimes(timezones=st.just(UTC))
decimals = st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**12), max_value=10**12)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(words, inner, max_size=5),
    max_leaves=40,
)
money = st.builds(Money, amount=decimals, currency=words)
lines = st.builds(Line, sku=st.uuids(), price=money, on=st.dates(), tags=st.sets(words, max_size=3))
pets = st.builds(Cat, lives=st.integers(0, 9)) | st.builds(Dog, good=st.booleans())
orders = st.builds(
    Order,
    id=st.uuids(),
    placed_at=aware_datetimes,
    total=decimals,
    colour=st.sampled_from(Colour),
    level=st.sampled_from(Level),
    mood=st.sampled_from(Mood),
    ttl=st.timedeltas(timedelta(days=-9999), timedelta(days=9999)),
    blob=st.binary(max_size=20),
    at=st.none() | st.times(),
    pair=st.tuples(st.integers(), words),
    pet=st.none() | pets,
    extra=json_values,
)
TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (None, json_values),
    (Any, json_values),
    (dict[str, Any], st.dictionaries(words, json_values, max_size=5)),
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (str, words),
    (bool, st.booleans()),
    (type(None), st.none()),
    (datetime, aware_datetimes | st.datetimes()),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas(timedelta(days=-9999), timedelta(days=9999))),
    (Decimal, decimals),
    (uuid.UUID, st.uuids()),
    (PurePosixPath, st.just(PurePosixPath("/a/b"))),
    (Colour, st.sampled_from(Colour)),
    (Kind, st.sampled_from(Kind)),
    (Level, st.sampled_from(Level)),
    (Mood, st.sampled_from(Mood)),
    (list[datetime | None], st.lists(st.none() | aware_datetimes, max_size=4)),
    (dict[date, Decimal], st.dictionaries(st.dates(), decimals, max_size=4)),
    (dict[int, set[str]], st.dictionaries(st.integers(), st.sets(words, max_size=3), max_size=4)),
    (tuple[int, ...], st.lists(st.integers(), max_size=4).map(tuple)),
    (tuple[str, date], st.tuples(words, st.dates())),
    (frozenset[int], st.frozensets(st.integers(), max_size=4)),
    (Point, st.builds(Point, x=st.integers(), y=st.integers())),
    (Money, money),
    (Line, lines),
    (list[Line], st.lists(lines, max_size=3)),
    (Ticket, st.fixed_dictionaries({"seat": st.integers(), "until": aware_datetimes})),
    (Order, orders),
    (dict[str, Order], st.dictionaries(words, orders, max_size=2)),
    (Pet, pets),
    (
        Tree,
        st.recursive(
            st.builds(Tree, name=words), lambda c: st.builds(Tree, name=words, children=st.lists(c, max_size=3))
        ),
    ),
]


# --- the first run and every replay ---------------------------------------------------------------


@pytest.mark.parametrize(("annotation", "strategy"), TYPED, ids=[str(annotation) for annotation, _ in TYPED])
@settings(deadline=None, max_examples=30)
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


@settings(deadline=None)
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


@settings(deadline=None)
@given(json_values)
def test_the_text_is_compact_json_that_utf_8_can_hold(value: Any) -> None:
    text = encode(value, what="Result", limits=LIMITS)
    assert json.loads(text.encode().decode()) == value
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@settings(deadline=None)
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


# --- models ---------------------------------------------------------------------------------------


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


# --- refusals -------------------------------------------------------------------------------------


class Slot(BaseModel):
    price: float = 0
    anything: Any = None


@dataclasses.dataclass
class Box:
    content: Any


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("annotation", "wrap", "path"),
    [
        (None, lambda x: x, "$"),
        (float, lambda x: x, "$"),
        (float | None, lambda x: x, "$"),
        (None, lambda x: {"items": [0, {"when": x}]}, "$.items[1].when"),
        (dict[str, Any], lambda x: {"items": [0, {"when": x}]}, "$.items[1].when"),
        (list, lambda x: [x], "$[0]"),
        (Slot, lambda x: Slot(price=x), "$.price"),
        (Slot, lambda x: Slot(anything=[x]), "$.anything[0]"),
        (list[Slot], lambda x: [Slot(anything={"a": x})], "$[0].anything.a"),
        (Box, lambda x: Box({"a": x}), "$.content.a"),
        (None, lambda x: [Box(x)], "$[0].content"),
        (None, lambda x: {"a": {x: 1}}, "$.a"),
    ],
)
def test_a_number_that_json_does_not_have_is_refused_by_its_path(
    annotation: Any, wrap: Any, path: str, number: float
) -> None:
    message = refusal(annotation, wrap(number))
    assert message == f"Result cannot be stored as JSON: {path} is {number}, which JSON does not have. {REMEDY}"


@pytest.mark.parametrize("text", [f"{MARK}\x00", f"\ud800{MARK}", f"{MARK}\udfff"])
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
def test_text_that_some_database_would_refuse_is_refused_by_its_path(
    annotation: Any, wrap: Any, path: str, text: str
) -> None:
    message = refusal(annotation, wrap(text))
    reason = "contains a NUL character or half a surrogate pair"
    assert message == f"Result cannot be stored as JSON: {path} {reason}. {REMEDY}"


@pytest.mark.parametrize("key", [f"{MARK}\x00", f"\ud800{MARK}"])
def test_a_key_that_some_database_would_refuse_is_refused(key: str) -> None:
    reason = "has a key with a NUL character or half a surrogate pair"
    assert refusal(None, {"a": {key: 1}}) == f"Result cannot be stored as JSON: $.a {reason}. {REMEDY}"


@pytest.mark.parametrize("value", ["\\u0000", ["\\u0000", "a\\u0000b"], {"\\u0000": "\\ud800"}, "\x7f\u2028\uffff"])
def test_text_that_only_looks_like_an_escape_is_accepted(value: Any) -> None:
    assert round_trip(None, value) == value
    assert round_trip(Any, value) == value


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
    assert message == f"Result cannot be stored as JSON: $[0].a[0].a[0] is nested too deeply. {REMEDY}"


@pytest.mark.parametrize("annotation", [None, list, list[Any]])
def test_endless_and_absurd_nesting_is_refused(annotation: Any) -> None:
    circle: list[Any] = []
    circle.append(circle)
    abyss: Any = []
    for _ in range(100_000):
        abyss = [abyss]
    for value in (circle, abyss):
        path = "$" + "[0]" * 64
        assert refusal(annotation, value) == f"Result cannot be stored as JSON: {path} is nested too deeply. {REMEDY}"
    while abyss:  # its destruction would need as deep a stack
        abyss = abyss.pop()


def test_many_brackets_are_not_deep() -> None:
    wide = [{"a": [index]} for index in range(1000)]
    assert round_trip(None, wide) == wide


def test_a_dataclass_that_holds_itself_is_refused() -> None:
    box = Box(None)
    box.content = [box]
    assert refusal(None, box).endswith(f" is nested too deeply. {REMEDY}")
    assert refusal(Box, box).endswith(f" is nested too deeply. {REMEDY}")


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
        (None, {"a": Box([Handle()])}, "$.a.content[0]", "Handle"),
        (None, len, "$", "builtin_function_or_method"),
        (None, b"\xff", "$", "bytes"),
        (bytes, b"\xff", "$", "bytes"),
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


@settings(deadline=None)
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


# --- annotations that are no data types -----------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)


class Incomplete(BaseModel):
    child: Missing  # noqa: F821  # type: ignore[name-defined]  # never defined


T = typing.TypeVar("T")
Json = (
    dict[str, "Json"] | list["Json"] | str | int | None
    if typing.TYPE_CHECKING
    else typing.Union[  # noqa: UP007
        dict[str, "Json"], list["Json"], str, int, None
    ]
)


@pytest.mark.parametrize(
    "annotation",
    [
        None,
        Any,
        object,
        Incomplete,
        list["Missing"],  # noqa: F821  # type: ignore[name-defined]
        Iterable,
        Iterable[int],
        typing.Iterable[int],
        Iterator[int],
        Generator[int, None, None],
        AsyncIterator[int],
        list[Iterable[int]],
        Iterable[int] | None,
        Annotated[Iterable[int], "rows"],
        dict[str, Iterator[int]],
        typing.NoReturn,
    ],
    ids=str,
)
def test_an_annotation_that_is_no_data_type_counts_as_none(annotation: Any) -> None:
    assert round_trip(annotation, [1, {"a": "2030-01-01"}]) == [1, {"a": "2030-01-01"}]
    assert codec(annotation).check([1]) == [1]
    if annotation is not typing.NoReturn:
        assert not codec(annotation).is_typed


@pytest.mark.parametrize("annotation", [T, Json, Mapping[str, Any] | list[Any]])
def test_a_type_that_allows_any_json_takes_it_as_it_is(annotation: Any) -> None:
    assert round_trip(annotation, [{"a": "2030-01-01"}, [1]]) == [{"a": "2030-01-01"}, [1]]


@pytest.mark.parametrize("annotation", [Account, list[Account], Handle, dict[str, Handle | None]])
def test_a_type_that_pydantic_cannot_read_is_refused_when_it_is_needed(annotation: Any) -> None:
    with pytest.raises(DefinitionInvalid, match=r"^The return type of f is declared as .*, which cannot be read: "):
        Codec.for_stored_values(lambda: annotation, what="The return type of f").decode("1")


def test_an_orm_object_is_refused_where_it_is_returned() -> None:
    message = refusal(None, Account(id=1))
    assert message == f"Result cannot be stored as JSON: $ is a Account, which has no JSON form. {REMEDY}"


def test_a_codec_resolves_its_type_when_it_is_first_needed() -> None:
    asked: list[int] = []

    def find() -> Any:
        asked.append(1)
        return Cat

    late = Codec.for_stored_values(find)
    assert asked == []
    assert late.decode('{"lives":9}') == late.check({"lives": 9}) == Cat(lives=9)
    assert late.is_typed
    assert asked == [1]


# --- secrets ------------------------------------------------------------------------------------


class Login(BaseModel):
    user: str
    password: pydantic.SecretStr = pydantic.SecretStr("")


@dataclasses.dataclass
class Logins:
    items: list[Login]


class Told(BaseModel):
    password: pydantic.SecretStr

    @pydantic.field_serializer("password")
    def reveal(self, value: pydantic.SecretStr) -> str:
        return value.get_secret_value()


SECRET = Login(user="eve", password=pydantic.SecretStr(MARK))


@pytest.mark.parametrize(
    ("annotation", "value", "path", "kind"),
    [
        (Login, SECRET, "$.password", "SecretStr"),
        (Login | None, SECRET, "$.password", "SecretStr"),
        (tuple[int, Login], (1, SECRET), "$[1].password", "SecretStr"),
        (Logins, Logins([SECRET]), "$.items[0].password", "SecretStr"),
        (dict[str, Any], {"a": {"b": SECRET}}, "$.a.b.password", "SecretStr"),
        (pydantic.SecretBytes, pydantic.SecretBytes(MARK.encode()), "$", "SecretBytes"),
        (pydantic.Secret[int], pydantic.Secret[int](4111), "$", "Secret"),
        (None, SECRET, "$.password", "SecretStr"),
        (None, {"a": [1, SECRET]}, "$.a[1].password", "SecretStr"),
        (None, pydantic.SecretStr(MARK), "$", "SecretStr"),
    ],
)
def test_a_secret_is_refused_by_name_instead_of_being_stored_as_asterisks(
    annotation: Any, value: Any, path: str, kind: str
) -> None:
    with pytest.raises(NotSerializable) as refused:
        codec(annotation).encode(value, what="Result", limits=LIMITS)
    assert str(refused.value) == (
        f"Result cannot be stored as JSON: {path} is a {kind}, of which JSON would keep nothing but asterisks. {REMEDY}"
    )


@pytest.mark.parametrize("annotation", [None, dict[str, str]])
def test_asterisks_that_hide_nothing_are_stored(annotation: Any) -> None:
    value = {"stars": "*" * 20}
    assert codec(annotation).decode(codec(annotation).encode(value, what="Result", limits=LIMITS)) == value


def test_a_secret_whose_model_says_how_to_write_it_is_stored_as_it_says() -> None:
    value = Told(password=pydantic.SecretStr(f"{MARK}{'*' * 10}"))
    text = codec(Told).encode(value, what="Result", limits=LIMITS)
    assert (json.loads(text), codec(Told).decode(text)) == ({"password": f"{MARK}{'*' * 10}"}, value)
