"""Values that the json module cannot write as they are: their plain JSON form, or the reason why they have none."""

from __future__ import annotations

import collections
import inspect
import json
import math
from collections.abc import (
    Iterator,
    Mapping,
)
from typing import Any

import pydantic
import pydantic_core

from celery_durable.errors import NotSerializable
from celery_durable.values.losses import get_fields, get_parts, read_refusal
from celery_durable.values.names import UNSTORABLE_CHARACTERS

# Errors that user code, such as a validator or a serializer, may raise for a value. Not Exception, because Celery
# raises its time limits as Exceptions, and they say nothing about the value.
AUTHOR_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


_SECRETS = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)


def check_secrets(value: Any, what: str, path: str) -> None:
    """Raise NotSerializable for a secret in a dumped value, unless a serializer of its model reveals it."""
    if isinstance(value, _SECRETS):
        kind = next(kind for kind in _SECRETS if isinstance(value, kind))
        raise NotSerializable(what, path, f"is a {kind.__name__}, of which JSON would keep nothing but asterisks")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_secrets(item, what, f"{path}.{key}")
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for index, item in enumerate(value):
            check_secrets(item, what, f"{path}[{index}]")


def check_duplicate_keys(value: Any, path: str, what: str) -> None:
    """Raise NotSerializable if two keys of a mapping are equal as JSON, because only one of them would be stored."""
    if isinstance(value, Mapping):
        kinds: dict[str, type] = {}
        for key, item in value.items():
            text = _encode_key(key, path, what)
            if text in kinds:
                names = " and ".join(sorted((kinds[text].__name__, type(key).__name__)))
                raise NotSerializable(what, f"{path}.{text}", f"has two keys that JSON writes alike, of types {names}")
            kinds[text] = type(key)
            check_duplicate_keys(item, f"{path}.{text}", what)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_duplicate_keys(item, f"{path}[{index}]", what)
    elif fields := get_fields(value):
        for name, item in fields.items():
            check_duplicate_keys(item, f"{path}.{name}", what)


_CONSTANTS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def name_constants(plain: Any, depth: int) -> Any:
    """Return JSON data with each NaN and infinity as text, as pydantic's ``ser_json_inf_nan="strings"`` writes it."""
    if isinstance(plain, float) and not math.isfinite(plain):
        return _CONSTANTS.get(plain, "NaN")
    if depth <= 0:
        return plain
    if isinstance(plain, dict):
        return {key: name_constants(item, depth - 1) for key, item in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [name_constants(item, depth - 1) for item in plain]
    return plain


_INTEGER_LIMIT = 10**4300
"""By default Python converts no integers of more than 4300 digits to text or back."""


def to_plain_json(value: Any, path: str, what: str, depth: int) -> Any:
    """Return ``value`` as plain JSON data. It walks the value itself, so that an error can name the path."""
    if isinstance(value, str):
        if UNSTORABLE_CHARACTERS.search(value):
            raise NotSerializable(
                what, path, read_refusal(value) or "contains a NUL character or half a surrogate pair"
            )
        return value
    if value is None or isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            raise NotSerializable(what, path, f"is {value}, which JSON does not have")
        if isinstance(value, int) and not -_INTEGER_LIMIT < value < _INTEGER_LIMIT:
            raise NotSerializable(what, path, "is an integer of more than 4300 digits")
        return value
    if not isinstance(value, (Mapping, list, tuple)):
        return _convert_leaf(value, path, what, depth)
    if depth <= 0:
        raise NotSerializable(what, path, "is nested more deeply than durable_max_payload_depth allows")
    if isinstance(value, Mapping):
        return {
            _encode_key(key, path, what): to_plain_json(item, f"{path}.{key}", what, depth - 1)
            for key, item in value.items()
        }
    return [to_plain_json(item, f"{path}[{index}]", what, depth - 1) for index, item in enumerate(value)]


def _convert_leaf(value: Any, path: str, what: str, depth: int) -> Any:
    """Convert a value that only pydantic can write, such as a model, a dataclass, a datetime or a set."""
    if inspect.iscoroutine(value):
        value.close()  # prevents the warning that it was never awaited
        raise NotSerializable(
            what,
            path,
            "is a coroutine, not its result: `await` it. A step takes the async function itself: "
            "step.do('ask', ask, 'why?')",
        )
    if isinstance(value, Iterator):  # a generator would run user code here, outside of its step
        raise NotSerializable(what, path, f"is a {type(value).__name__}, which can be read only once: make it a list")
    try:
        plain = pydantic_core.to_jsonable_python(value, inf_nan_mode="constants", serialize_unknown=False)
    except AUTHOR_CODE_ERRORS as exc:
        if fields := get_fields(value):
            to_plain_json(fields, path, what, depth)  # usually raises with the path of the field that fails
        raise NotSerializable(what, path, f"is a {type(value).__name__}, which has no JSON form") from exc
    return to_plain_json(plain, path, what, depth)


def find_unwritable_part(value: Any, path: str, depth: int) -> tuple[str, Any, int]:
    """Return the path of the first part that pydantic cannot write, the part, and how deep it may be."""
    for suffix, part in get_parts(value).items() if depth > 0 else ():
        try:
            pydantic_core.to_jsonable_python(part, bytes_mode="base64", inf_nan_mode="constants")
        except AUTHOR_CODE_ERRORS:
            return find_unwritable_part(part, f"{path}{suffix}", depth - 1)
    return path, value, depth


def _encode_key(key: Any, path: str, what: str) -> str:
    if isinstance(key, str):
        if UNSTORABLE_CHARACTERS.search(key):
            reason = f"that {lost}" if (lost := read_refusal(key)) else "with a NUL character or half a surrogate pair"
            raise NotSerializable(what, path, f"has a key {reason}")
        return key
    if key is None or isinstance(key, (int, float)):
        return json.dumps(to_plain_json(key, path, what, 0))
    try:
        (text,) = pydantic_core.to_jsonable_python({key: None}, serialize_unknown=False)
    except AUTHOR_CODE_ERRORS as exc:
        raise NotSerializable(what, path, f"has a key of type {type(key).__name__}") from exc
    return _encode_key(text, path, what)
