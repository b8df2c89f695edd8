"""How pydantic checks and writes the values of a declared type."""

from __future__ import annotations

import functools
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pydantic
import pydantic_core
from pydantic.errors import PydanticUserError

from celery_durable.errors import DefinitionInvalid
from celery_durable.values.annotations import adapt_for_pydantic


@dataclass(frozen=True, slots=True)
class TypeSchema:
    """The pydantic validator and serializer of a declared type."""

    adapter: pydantic.TypeAdapter[Any]
    serializer: pydantic_core.SchemaSerializer
    by_alias: bool

    def dump(self, value: Any, mode: str = "json") -> Any:
        """Return a value as plain data that JSON can hold; ``mode`` as in pydantic."""
        return self.serializer.to_python(value, mode=mode, by_alias=self.by_alias, round_trip=True, warnings=False)


class UndefinedName(Exception):
    """An annotation names a class that is not defined, or not yet."""


_REMEDY = (
    "Declare a pydantic model, a dataclass, a TypedDict or plain types; or leave the annotation out, and the values "
    "are plain JSON data that nothing checks."
)
# The last three come also from a type that is given as text.
_UNREADABLE = (
    PydanticUserError,
    pydantic_core.SchemaError,
    KeyError,
    RecursionError,
    ValueError,
    AttributeError,
    SyntaxError,
    TypeError,
)
_UNTYPED_ANNOTATIONS: tuple[Any, ...] = (None, Any, object, typing.NoReturn, typing.Never)


def build_type_schema(annotation: Any, what: str) -> TypeSchema | None:
    """Return the schema of a declared type, or None if the values are plain JSON data.

    Raises DefinitionInvalid if pydantic cannot read the type.
    """
    if any(annotation is each for each in _UNTYPED_ANNOTATIONS) or _is_iterator_type(annotation):
        return None
    try:
        return _build_cached_schema(annotation, repr(annotation))
    except NameError as exc:
        raise UndefinedName(str(exc).partition("\n")[0]) from exc
    except _UNREADABLE as exc:
        shown = annotation.__qualname__ if isinstance(annotation, type) else annotation
        why = str(exc).partition("\n")[0].rstrip(".")
        raise DefinitionInvalid(f"{what} is declared as {shown}, which cannot be read: {why}. {_REMEDY}") from exc


def _build_cached_schema(annotation: Any, text: str) -> TypeSchema:
    """Build the schema of a type once, since each call of a closure as a step asks for it again.

    ``text``: the annotation as text. ``int | str`` equals ``str | int``, but pydantic tries their members in order.
    """
    try:
        hash(annotation)
    except TypeError:  # Annotated with a list, for example
        return _build_schema(annotation, text)
    return _schema_cache(annotation, text)


def _build_schema(annotation: Any, text: str) -> TypeSchema:
    adapter = pydantic.TypeAdapter(adapt_for_pydantic(annotation))
    if not adapter.pydantic_complete:
        raise UndefinedName(text)
    schema = adapter.core_schema
    # By default pydantic writes a NaN in a field of type Any as null.
    config: Any = {**schema.get("config", {}), "ser_json_inf_nan": "constants"}
    return TypeSchema(
        adapter, pydantic_core.SchemaSerializer(schema, config), by_alias=not _has_different_aliases(schema)
    )


_schema_cache = functools.lru_cache(maxsize=512)(_build_schema)


_ITERATOR_TYPES = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)


def _is_iterator_type(annotation: Any) -> bool:
    """Return whether pydantic would return an iterator for this type, which can be read only once."""
    origin = typing.get_origin(annotation) or annotation
    return origin in _ITERATOR_TYPES or any(_is_iterator_type(part) for part in typing.get_args(annotation))


def _has_different_aliases(schema: Any) -> bool:
    """Return whether a field has different aliases for input and output.

    Then only the name of the field itself can be both written and read.
    """
    if isinstance(schema, dict):
        return schema.get("validation_alias") != schema.get("serialization_alias") or any(
            _has_different_aliases(part) for key, part in schema.items() if key not in ("default", "metadata")
        )
    return isinstance(schema, (list, tuple)) and any(_has_different_aliases(part) for part in schema)
