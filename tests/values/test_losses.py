"""A value of a declared type is read back as all that it was, or it is refused."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import uuid
import zoneinfo
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from celery_durable.errors import NotSerializable, PayloadTooLarge
from celery_durable.values import Codec, PayloadLimits, ValidationFailed
from tests.values.shapes import LIMITS, REMEDY, codec, problems, refusal, round_trip

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOON = datetime(2030, 3, 30, 12, tzinfo=BERLIN)
SECOND_HALF_PAST_TWO = datetime(2030, 10, 27, 2, 30, tzinfo=BERLIN, fold=1)


class Visit(BaseModel):
    at: datetime
    picture: bytes = b"\xff"
    score: float = 0.0


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    id: uuid.UUID
    type: datetime | None = None
    default: time | None = None
    visits: dict[datetime, list[Visit]] = {}
    children: list[Strict] = []


@dataclasses.dataclass(frozen=True)
class Page:
    at: datetime
    body: bytes


class Row(NamedTuple):
    at: datetime
    body: bytes


class Entry(typing_extensions.TypedDict):
    at: datetime
    body: bytes


def is_same(value: Any, back: Any) -> bool:
    """Compare also what `==` leaves out."""
    if isinstance(value, datetime | time):
        same_zone = value.tzinfo is back.tzinfo or value.tzinfo.utcoffset(None) == back.tzinfo.utcoffset(None)
        same_fold = value.fold == back.fold or (isinstance(value, datetime) and value.utcoffset() is not None)
        return bool(value == back and same_zone and same_fold and value.utcoffset() == back.utcoffset())
    if isinstance(value, float) and math.isnan(value):
        return isinstance(back, float) and math.isnan(back)
    if isinstance(value, dict):
        keys = {key: key for key in back}
        return value.keys() == back.keys() and all(
            is_same(key, keys[key]) and is_same(value[key], back[key]) for key in value
        )
    if isinstance(value, list | tuple | collections.deque):
        sizes = getattr(value, "maxlen", None), getattr(back, "maxlen", None)
        return type(value) is type(back) and len({*sizes}) == 1 and all(map(is_same, value, back))
    if isinstance(value, BaseModel):
        return type(value) is type(back) and is_same(dict(value), dict(back))
    if dataclasses.is_dataclass(value):
        return type(value) is type(back) and is_same(vars(value), vars(back))
    return bool(value == back) and type(value) is type(back)


times_of_day = st.times(timezones=st.none() | st.just(UTC) | st.just(BERLIN)) | st.builds(
    time.replace, st.times(), fold=st.integers(0, 1)
)
instants = (
    st.datetimes(timezones=st.none() | st.timezones() | st.just(BERLIN), allow_imaginary=True)
    | st.datetimes(timezones=st.builds(timezone, st.timedeltas(-timedelta(hours=20), timedelta(hours=20))))
    | st.builds(datetime.replace, st.datetimes(), fold=st.integers(0, 1))
    | st.just(SECOND_HALF_PAST_TWO)
)
blobs = st.binary(max_size=10)
visits = st.builds(Visit, at=instants, picture=blobs, score=st.floats())
deques = st.builds(collections.deque, st.lists(instants, max_size=2), st.none() | st.integers(2, 3))
patterns = st.builds(re.compile, st.sampled_from(["a", "(?i)a"]), st.sampled_from([0, re.IGNORECASE]))
scalars = (
    st.decimals(allow_nan=False, allow_infinity=False, places=2)
    | instants
    | st.dates()
    | blobs
    | st.text("a0", max_size=3)
)
LOSSY: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (datetime, instants),
    (datetime | None, instants),
    (time, times_of_day),
    (list[datetime], st.lists(instants, max_size=3)),
    (dict[str, datetime], st.dictionaries(st.just("a"), instants)),
    (tuple[datetime, bytes], st.tuples(instants, blobs)),
    (bytes, blobs),
    (float, st.floats()),
    (list[float | None], st.lists(st.floats() | st.none(), max_size=3)),
    (Visit, visits),
    (list[Visit], st.lists(visits, max_size=2)),
    (
        Strict,
        st.builds(Strict, id=st.uuids(), type=st.none() | instants, default=st.none() | times_of_day),
    ),
    (Page, st.builds(Page, at=instants, body=blobs)),
    (Row, st.builds(Row, at=instants, body=blobs)),
    (Entry, st.fixed_dictionaries({"at": instants, "body": blobs})),
    (collections.deque[datetime], deques),
    (
        collections.defaultdict[str, list[datetime]],
        st.builds(
            collections.defaultdict, st.just(list), st.dictionaries(st.just("a"), st.lists(instants, max_size=2))
        ),
    ),
    (collections.abc.Sequence[datetime], st.lists(instants, max_size=2)),
    (collections.abc.Mapping[str, Row], st.dictionaries(st.just("a"), st.builds(Row, at=instants, body=blobs))),
    (list[Visit | Page], st.lists(visits | st.builds(Page, at=instants, body=blobs), max_size=2)),
    (re.Pattern[str], patterns),
    (date | datetime, st.dates() | instants),
    (Decimal | date | bytes | datetime, scalars.filter(lambda value: not isinstance(value, str))),
]


@pytest.mark.parametrize(("annotation", "strategy"), LOSSY, ids=[str(annotation) for annotation, _ in LOSSY])
@given(data=st.data())
def test_a_value_is_read_back_as_all_that_it_was_or_it_is_refused(
    annotation: Any, strategy: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(strategy)
    try:
        _, back = codec(annotation).convert(value, what="Result", limits=LIMITS)
    except NotSerializable:
        return
    assert is_same(value, back)


@pytest.mark.parametrize(
    ("annotation", "wrap"),
    [
        (datetime, lambda at: at),
        (datetime | None, lambda at: at),
        (list[datetime], lambda at: [at]),
        (set[datetime], lambda at: {at}),
        (dict[datetime, datetime], lambda at: {at: at}),
        (pydantic.AwareDatetime, lambda at: at),
        (Visit, lambda at: Visit(at=at)),
        (Page, lambda at: Page(at, b"\xff")),
        (Row, lambda at: Row(at, b"\xff")),
        (Entry, lambda at: {"at": at, "body": b"\xff"}),
        (Strict, lambda at: Strict(id=uuid.UUID(int=1), type=at, visits={at: [Visit(at=at)]})),
        (list[Strict], lambda at: [Strict(id=uuid.UUID(int=1), children=[Strict(id=uuid.UUID(int=2), type=at)])]),
        (date | datetime, lambda at: at),
    ],
)
def test_a_datetime_keeps_its_zone(annotation: Any, wrap: Any) -> None:
    for at in (NOON, SECOND_HALF_PAST_TWO, datetime(2030, 3, 31, 2, 30, tzinfo=BERLIN)):
        value = wrap(at)
        assert is_same(value, round_trip(annotation, value))
        assert is_same(value, codec(annotation).check(value))


def test_a_zone_is_written_after_the_offset_as_rfc_9557_says() -> None:
    for at, text in (
        (NOON, '"2030-03-30T12:00:00+01:00[Europe/Berlin]"'),
        (NOON.astimezone(UTC), '"2030-03-30T11:00:00Z"'),
        (NOON.astimezone(zoneinfo.ZoneInfo("UTC")), '"2030-03-30T11:00:00Z"'),
        (NOON.replace(tzinfo=None), '"2030-03-30T12:00:00"'),
        (datetime(2030, 10, 27, 2, 30, fold=1), '"2030-10-27T02:30:00[_fold=1]"'),
    ):
        assert codec(datetime).encode(at, what="Result", limits=LIMITS) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2030-03-30T12:00[Europe/Berlin]", NOON),
        ("2030-03-30T11:00:00Z[Europe/Berlin]", NOON),
        ("2030-03-30T12:00:00+01:00[Europe/Berlin]", NOON),
        ("2030-10-27T02:30:00+01:00[Europe/Berlin]", SECOND_HALF_PAST_TWO),
    ],
)
def test_callers_may_name_the_zone_of_a_datetime(text: str, expected: datetime) -> None:
    assert is_same(expected, Codec(datetime).check(text))
    assert is_same(expected, Codec(Visit).decode(f'{{"at":"{text}"}}').at)


@pytest.mark.parametrize("zone", ["Nowhere/Land", "Europe"])
def test_an_unknown_zone_is_refused_by_path(zone: str) -> None:
    reason = "Value error, the time zone is unknown here: install the package tzdata, or update it"
    assert problems(list[Visit], f'[{{"at":"2030-03-30T12:00+01:00[{zone}]"}}]') == [("$[0].at", reason)]


@pytest.mark.parametrize("text", ["x", "x]", "x[Europe/Berlin]"])
def test_text_that_is_no_datetime_is_refused_by_path(text: str) -> None:
    ((path, reason),) = problems(dict[str, Visit], f'{{"a":{{"at":"{text}"}}}}')
    assert path == "$.a.at"
    assert reason.startswith("Input should be a valid datetime")


class SummerTime(tzinfo):
    """A zone of another library, which has rules and no name."""

    def utcoffset(self, at: datetime | None) -> timedelta | None:
        return None if at is None else timedelta(hours=1 + (4 <= at.month <= 10))


@dataclasses.dataclass
class Shape:
    name: str


@dataclasses.dataclass
class Circle(Shape):
    radius: int = 1


class Animal(BaseModel):
    name: str = "x"


class Dog(Animal):
    good: bool = True


class Cat(BaseModel):
    name: str = "x"


@dataclasses.dataclass
class Counter:
    step: int
    total: int = dataclasses.field(init=False, default=0)


def count_to(total: int) -> Counter:
    counter = Counter(1)
    counter.total = total
    return counter


ABROAD = datetime(2030, 6, 1, tzinfo=SummerTime())
ODD = datetime(2030, 6, 1, tzinfo=timezone(timedelta(seconds=3630)))
NO_NAME = "has a time zone of type SummerTime without a name: use zoneinfo.ZoneInfo(name), or UTC"


@pytest.mark.parametrize(
    ("annotation", "value", "path", "reason"),
    [
        (datetime, ABROAD, "$", NO_NAME),
        (list[Visit], [Visit(at=NOON), Visit(at=ABROAD)], "$[1].at", NO_NAME),
        (dict[str, Page], {"a": Page(ABROAD, b"")}, "$.a.at", NO_NAME),
        (dict[datetime, int], {ABROAD: 1}, "$", f"has a key that {NO_NAME}"),
        (list[Visit | int], [1, Visit(at=ABROAD)], "$[1].at", NO_NAME),
        (datetime, ODD, "$", "has a UTC offset with seconds, which JSON text would not keep"),
        (
            list[re.Pattern[str]],
            [re.compile("a", re.IGNORECASE)],
            "$[0]",
            "is a pattern with flags: write them into the pattern, such as (?i)",
        ),
        (
            dict[str, collections.deque[int]],
            {"a": collections.deque([1], maxlen=2)},
            "$.a",
            "is a deque with a maxlen: use a deque without, and set it after reading",
        ),
        (Shape, Circle("a"), "$.radius", "is a field of Circle, and the declared type is Shape: declare Circle"),
        (list[Animal], [Dog()], "$[0].good", "is a field of Dog, and the declared type is Animal: declare Dog"),
        (list[Animal | Cat], [Cat()], "$[0]", "is a Cat, and would be read as a Animal: add a discriminator"),
        (Counter, count_to(3), "$.total", "is a field with init=False, which is not read back"),
        (float, 2**60 + 1, "$", "is an integer that a float cannot hold"),
        (str | Decimal, Decimal("1.5"), "$", "is a Decimal, and its union would read a str: declare only Decimal"),
        (list[str | bytes], [b"a"], "$[0]", "is a bytes, and its union would read a str: declare only bytes"),
        (float | str, math.inf, "$", "is inf, which JSON does not have"),
        (dict[tuple[int], int], {(1,): 1}, "$.1.[key]", "could not be read back: Input should be a valid array"),
    ],
)
def test_a_value_that_would_be_less_is_refused_by_path(annotation: Any, value: Any, path: str, reason: str) -> None:
    assert refusal(annotation, value) == f"Result cannot be stored as JSON: {path} {reason}. {REMEDY}"


def to_utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


class Hidden(BaseModel):
    name: str
    token: str = Field("none", exclude=True)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Hidden, Hidden(name="a", token="b"), Hidden(name="a")),
        (Annotated[datetime, PlainSerializer(lambda at: to_utc(at).isoformat())], ABROAD, to_utc(ABROAD)),
        (Annotated[datetime, AfterValidator(to_utc)], NOON, to_utc(NOON)),
        (Animal, {"name": "a", "more": 1}, Animal(name="a")),
        (Entry, {"at": NOON, "body": b"", "more": 1}, {"at": NOON, "body": b""}),
        (datetime, "2030-03-30T11:00:00Z", to_utc(NOON)),
        (datetime | str, "2030-03-30T11:00:00Z", to_utc(NOON)),
    ],
)
def test_what_the_declared_type_leaves_out_or_converts_is_the_authors_choice(
    annotation: Any, value: Any, expected: Any
) -> None:
    assert round_trip(annotation, value) == expected


# --- bytes and floats -----------------------------------------------------------------------------


class Utf8(BaseModel):
    model_config = ConfigDict(ser_json_bytes="utf8")

    text: bytes


class Hex(BaseModel):
    model_config = ConfigDict(ser_json_bytes="hex")

    data: bytes


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (bytes, b"\xff\xfe?", '"__4_"'),
        (list[bytes], [b"\xff"], '["_w=="]'),
        (dict[str, bytes | None], {"a": b"\xff"}, '{"a":"_w=="}'),
        (Page, Page(NOON, b"\xff"), '{"at":"2030-03-30T12:00:00+01:00[Europe/Berlin]","body":"_w=="}'),
        (Utf8, Utf8(text=b"a"), '{"text":"a"}'),
        (Hex, Hex(data=b"\xff"), '{"data":"ff"}'),
        (float, math.inf, '"Infinity"'),
        (dict[str, float], {"a": -math.inf}, '{"a":"-Infinity"}'),
    ],
)
def test_declared_bytes_are_base64_and_numbers_that_json_lacks_are_text(annotation: Any, value: Any, text: str) -> None:
    assert codec(annotation).encode(value, what="Result", limits=LIMITS) == text
    assert is_same(value, codec(annotation).decode(text))
    assert is_same(value, Codec(annotation).decode(text))


def test_the_size_of_bytes_is_counted_after_encoding() -> None:
    codec(bytes).encode(b"x" * 72, what="Result", limits=PayloadLimits(size_bytes=98))
    with pytest.raises(PayloadTooLarge, match="Result has 102 bytes as JSON"):
        codec(bytes).encode(b"x" * 73, what="Result", limits=PayloadLimits(size_bytes=98))


def test_a_caller_gives_declared_bytes_as_base64() -> None:
    assert codec(bytes).check("_w==") == b"\xff"
    assert codec(Visit).check({"at": NOON, "picture": "_w=="}).picture == b"\xff"
    with pytest.raises(ValidationFailed):
        codec(bytes).check("no base64!")


def test_a_type_that_wants_finite_numbers_gets_them() -> None:
    with pytest.raises(ValidationFailed) as refused:
        codec(pydantic.FiniteFloat).convert(math.nan, what="Result", limits=LIMITS)
    assert refused.value.problems == [("$", "Input should be a finite number")]
