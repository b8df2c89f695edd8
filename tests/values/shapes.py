"""Types that authors declare, values of them, and how a test reads a codec."""

from __future__ import annotations

import dataclasses
import enum
import traceback
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import typing_extensions
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from celery_durable.errors import NotSerializable
from celery_durable.values import Codec, PayloadLimits, ValidationFailed

LIMITS = PayloadLimits()
REMEDY = (
    "Use plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); "
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
