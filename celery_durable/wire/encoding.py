"""Records as JSON, and back: one `TypeAdapter` for each of their classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


_get_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def to_json(record: object) -> bytes:
    """Return a record as JSON text. Fields that are None are left out."""
    return _get_adapter(type(record)).dump_json(record, by_alias=True, exclude_none=True)


def to_data(record: object) -> dict[str, Any]:
    """Return a record as JSON data. Fields that are None are left out."""
    data: dict[str, Any] = _get_adapter(type(record)).dump_python(record, mode="json", by_alias=True, exclude_none=True)
    return data


def parse(type_: type[T], data: object) -> T:
    """Return the record of JSON data. Raises ValueError, which names the first field that is wrong."""
    try:
        found: T = _get_adapter(type_).validate_python(data)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        where = ".".join(map(str, error["loc"])) or "body"
        raise ValueError(f"{where}: {error['msg']}, not {error['input']!r}") from None
    return found
