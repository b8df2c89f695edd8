"""Annotations that are no data types, and secrets."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping
from typing import Annotated, Any

import pydantic
import pytest
from pydantic import BaseModel
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_durable.errors import DefinitionInvalid, NotSerializable
from celery_durable.values import Codec
from tests.values.shapes import LIMITS, MARK, REMEDY, Cat, codec, refusal, round_trip
from tests.values.test_refused_payloads import Handle

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
