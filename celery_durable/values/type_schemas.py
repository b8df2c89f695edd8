"""How pydantic checks and writes the values of a declared type, and what its fields are for people."""

from __future__ import annotations

import base64
import functools
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pydantic
import pydantic_core
from pydantic.errors import PydanticUserError

from celery_durable.errors import DefinitionInvalid
from celery_durable.values.annotations import adapt_for_pydantic
from celery_durable.values.losses import TimeForm, find_time_form, read_time_zone, refuse, write_time_zone


@dataclass(frozen=True, slots=True)
class TypeSchema:
    """How pydantic checks and writes the values of a declared type."""

    adapter: pydantic.TypeAdapter[Any]
    validator: pydantic_core.SchemaValidator
    dump: Callable[..., Any]
    """Returns a value as plain data; ``mode="json"`` for what JSON can hold, or ``mode="python"``."""
    by_alias: bool
    may_lose: bool
    """Some values may be read back as less than they were."""
    has_union: bool
    has_hidden_losses: bool
    """A value may equal one that is less, such as a deque without its maxlen."""


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
    """Return the schema of a declared type, or None for plain JSON data; raises DefinitionInvalid."""
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

    ``text``: the annotation as text. Equal unions may differ in the order in which pydantic tries their members.
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
    schema: Any = adapter.core_schema
    kinds = frozenset(_find_kinds(schema))
    # By default pydantic writes a NaN in a field of type Any as null.
    config: Any = {"val_json_bytes": "base64", **schema.get("config", {}), "ser_json_inf_nan": "constants"}
    if kinds & _ADAPTED_KINDS:
        schema = _adapt(schema)
        # Otherwise pydantic takes the validator and the serializer that each class of a model already has.
        validator = pydantic_core.SchemaValidator(schema, config, _use_prebuilt=False)
        serializer = pydantic_core.SchemaSerializer(schema, config, _use_prebuilt=False)
    else:
        validator = pydantic_core.SchemaValidator(schema, config)
        serializer = pydantic_core.SchemaSerializer(schema, config)
    by_alias = not _has_different_aliases(schema)
    return TypeSchema(
        adapter,
        validator,
        functools.partial(serializer.to_python, by_alias=by_alias, round_trip=True, warnings=False),
        by_alias,
        has_union="union" in kinds,
        may_lose=not kinds <= _PLAIN_KINDS,
        has_hidden_losses=bool(kinds & {"deque", "is-instance"}),
    )


_schema_cache = functools.lru_cache(maxsize=512)(_build_schema)


_ITERATOR_TYPES = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)


def _is_iterator_type(annotation: Any) -> bool:
    """Return whether pydantic would return an iterator for this type, which can be read only once."""
    origin = typing.get_origin(annotation) or annotation
    return origin in _ITERATOR_TYPES or any(_is_iterator_type(part) for part in typing.get_args(annotation))


def _has_different_aliases(schema: Any) -> bool:
    """Return whether a field has other aliases for output, so only its name can be written and read."""
    if isinstance(schema, dict):
        return schema.get("validation_alias") != schema.get("serialization_alias") or any(
            _has_different_aliases(part) for key, part in schema.items() if key not in ("default", "metadata")
        )
    return isinstance(schema, (list, tuple)) and any(_has_different_aliases(part) for part in schema)


_PLAIN_SCALAR_KINDS = {"bool", "date", "decimal", "enum", "int", "literal", "none", "str", "uuid"}
_SCALAR_KINDS = _PLAIN_SCALAR_KINDS | {"bytes", "complex", "datetime", "float", "time", "timedelta", "url"}
_FUNCTION_KINDS = {"function-after", "function-before", "function-plain", "function-wrap"}
# What the author's functions convert is the author's choice.
_PLAIN_KINDS = _PLAIN_SCALAR_KINDS | _FUNCTION_KINDS | {"any", "default", "definitions", "dict", "list", "nullable"}
_ADAPTED_KINDS = {"datetime", "time", "bytes", "call", "union"}
_NOT_SCHEMAS = {"config", "default", "metadata", "expected", "return_schema"}


def _get_parts(schema: Any) -> dict[Any, Any]:
    """Return the parts of a core schema that may hold schemas: not the default of a field, but a field "default"."""
    if isinstance(schema, dict):
        is_schema = isinstance(schema.get("type"), str)
        return {key: part for key, part in schema.items() if not (is_schema and key in _NOT_SCHEMAS)}
    return dict(enumerate(schema)) if isinstance(schema, (list, tuple)) else {}


def _find_kinds(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and isinstance(kind := schema.get("type"), str):
        yield kind
    for part in _get_parts(schema).values():
        yield from _find_kinds(part)


def _adapt(schema: Any, *, sets_bytes: bool = True) -> Any:
    """Return a core schema that keeps time zones and writes bytes as base64, unless a model around it says how."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(_adapt(part, sets_bytes=sets_bytes) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind, config = schema.get("type"), None
    if kind in ("model", "dataclass", "typed-dict"):
        config = schema.get("config", {})
        written = config.get("ser_json_bytes") or config.get("val_json_bytes")
        sets_bytes = written is None
        config = {"val_json_bytes": written or "base64", "ser_json_bytes": written or "utf8", **config}
    parts = {key: _adapt(part, sets_bytes=sets_bytes) for key, part in _get_parts(schema).items()}
    adapted: dict[str, Any] = {**schema, **parts}
    if config is not None:
        adapted["config"] = config
    if "serialization" in schema:
        return adapted
    match kind:
        case "datetime" | "time":
            return _adapt_time(schema)
        case "bytes" if sets_bytes:
            return {**adapted, "serialization": _build_serialization(_write_bytes, schema)}
        case "call":  # a NamedTuple, which pydantic before 2.14 writes as if its items had no types
            items = [each["schema"] for each in parts["arguments_schema"]["arguments_schema"]]
            items_schema = {"type": "tuple", "items_schema": items}
            return {**adapted, "serialization": _build_serialization(_write_unchanged, items_schema)}
        case "union" if _get_choice_kinds(schema) <= _SCALAR_KINDS:
            return {**adapted, "serialization": _build_serialization(_build_union_writer(adapted), adapted)}
    return adapted


def _write_unchanged(value: Any, serialize: Callable[[Any], Any]) -> Any:
    return serialize(value)


def _write_bytes(value: Any, serialize: Callable[[Any], Any]) -> Any:
    return base64.urlsafe_b64encode(value).decode() if isinstance(value, bytes) else serialize(value)


def _adapt_time(schema: Any) -> dict[str, Any]:
    # Pydantic reads JSON text less strictly than text from a function, so only a text with a suffix goes through one.
    function = {"type": "no-info", "function": read_time_zone}
    return {
        "type": "tagged-union",
        "discriminator": find_time_form,
        "choices": {
            TimeForm.PLAIN: schema,
            TimeForm.SUFFIXED: {"type": "function-before", "function": function, "schema": schema},
        },
        "serialization": _build_serialization(write_time_zone, schema),
    }


def _build_serialization(write: Callable[[Any, Any], Any], schema: Any) -> dict[str, Any]:
    return {"type": "function-wrap", "function": write, "schema": schema, "when_used": "json"}


def _get_choice_kinds(union: Any) -> set[str]:
    """Return the kinds of the members of a union; a member may be a pair with its label."""
    return {(each[0] if isinstance(each, tuple) else each)["type"] for each in union["choices"]}


def _build_union_writer(union: Any) -> Callable[[Any, Any], Any]:
    """Return a serializer of a union that refuses a value, such as a Decimal, that the union would read as a str."""
    read = pydantic_core.SchemaValidator(union, {"val_json_bytes": "base64"}).validate_json

    def write(value: Any, serialize: Callable[[Any], Any]) -> Any:
        text = serialize(value)
        if isinstance(text, str) and not isinstance(value, str):
            with suppress(pydantic.ValidationError):  # a value of another type, which is refused when it is read
                back = read(pydantic_core.to_json(text))
                if type(back) is not type(value) and back != value:
                    kind, read_kind = type(value).__name__, type(back).__name__
                    return refuse(f"is a {kind}, and its union would read a {read_kind}: declare only {kind}")
        return text

    return write


@functools.lru_cache(maxsize=512)
def build_json_schema(adapter: pydantic.TypeAdapter[Any]) -> dict[str, Any] | None:
    """Return the JSON schema of a type's values; None if JSON schema lacks such a type."""
    try:
        return adapter.json_schema()
    except PydanticUserError:
        return None


_NAMES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of the declared type. ``type`` is for people: ``str``, ``list``, ``int | null``, or a model's name."""

    name: str
    type: str
    required: bool


def read_parameters(schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return the fields of a JSON schema; none if it describes no object with fields."""
    required = schema.get("required", ())
    return tuple(
        Parameter(name, _describe(each), name in required) for name, each in schema.get("properties", {}).items()
    )


def _describe(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(_describe, choices)))
    kind = schema.get("type")
    return _NAMES.get(kind, kind) if isinstance(kind, str) else "any"
