"""Conversion of values of declared types to canonical JSON text and back."""

from __future__ import annotations

import collections
import functools
import inspect
import json
import logging
import math
import re
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pydantic
import pydantic_core

from celery_durable.errors import NotSerializable, PayloadTooLarge
from celery_durable.values.losses import TimeForm, check_kept, get_fields, get_parts, read_refusal
from celery_durable.values.names import UNSTORABLE_CHARACTERS
from celery_durable.values.type_schemas import (
    Parameter,
    TypeSchema,
    UndefinedName,
    build_json_schema,
    build_type_schema,
    read_parameters,
)

logger = logging.getLogger("celery_durable")


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """The largest size of a value as JSON text, in bytes, and its deepest nesting."""

    size_bytes: int = 1024 * 1024
    depth: int = 64


ALREADY_CHECKED_LIMITS = PayloadLimits(2**31, 10_000)
"""For values that were checked against the configured limits before: practically no limit."""


class ValidationFailed(Exception):
    """A value does not fit its declared type. ``problems`` are (path, message) pairs without the value."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = list(problems)
        super().__init__(str(self.problems))


class Codec:
    """Converts values of one declared type (None: any JSON value) to canonical JSON text and back.

    Text from other programs, such as the payload of an event, uses the aliases that a model declares.
    """

    def __init__(self, annotation: Any = None, *, what: str = "A declared type") -> None:
        self._get_annotation: Callable[[], Any] = lambda: annotation
        self._what = what
        self._is_stored_value = False

    @classmethod
    def for_stored_values(cls, get_annotation: Callable[[], Any], *, what: str = "A declared type") -> Codec:
        """Return a codec for text that only celery_durable writes and reads, such as the result of a step.

        It uses the same field names both ways, whatever a model's aliases. ``get_annotation`` is called at the first
        use: the class may be defined later in its module. ``what`` names the type in error messages.
        """
        codec = cls(what=what)
        codec._get_annotation, codec._is_stored_value = get_annotation, True
        return codec

    @property
    def is_typed(self) -> bool:
        """Return whether a type is declared. Raises DefinitionInvalid for one that pydantic cannot read."""
        return self._schema is not None

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The fields of the declared type, such as a model's; none for other types."""
        return () if self.json_schema is None else read_parameters(self.json_schema)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the text that `decode` takes; None if no type is declared, or JSON schema lacks it."""
        return None if self._schema is None else build_json_schema(self._schema.adapter)

    def resolve_type(self, annotation: Any) -> None:
        """Read this type now, or at first use if its class is not defined yet; raises DefinitionInvalid."""
        with suppress(UndefinedName):
            vars(self)["_schema"] = build_type_schema(annotation, self._what)

    def encode(self, value: Any, *, what: str, limits: PayloadLimits) -> str:
        """Return the JSON text of a value. Raises NotSerializable, PayloadTooLarge, which show ``what``."""
        schema = self._schema
        if schema is None or isinstance(value, Iterator):
            return encode(value, what=what, limits=limits)
        text, has_constants = self._dump(schema, value, what, limits)
        if has_constants or schema.may_lose:
            try:
                self._read_back(schema, value, text, what, has_constants=has_constants)
            except ValidationFailed as exc:
                path, problem = exc.problems[0]
                raise NotSerializable(what, path, f"could not be read back: {problem}") from exc
        return text

    def convert(self, value: Any, *, what: str, limits: PayloadLimits) -> tuple[str, Any]:
        """Return the JSON text of a value, and the value that is read from this text.

        Raises NotSerializable, also if the text keeps less than the type promises; PayloadTooLarge; ValidationFailed.
        """
        schema = self._schema
        if schema is None or isinstance(value, Iterator):
            text = encode(value, what=what, limits=limits)
            return text, self.decode(text)
        text, has_constants = self._dump(schema, value, what, limits)
        return text, self._read_back(schema, value, text, what, has_constants=has_constants)

    def _read_back(self, schema: TypeSchema, value: Any, text: str, what: str, *, has_constants: bool) -> Any:
        back = self.decode(text)
        if has_constants or (schema.may_lose and (schema.has_hidden_losses or not _are_equal(value, back))):
            check_kept(value, back, what, has_union=schema.has_union)
        return back

    def _dump(self, schema: TypeSchema, value: Any, what: str, limits: PayloadLimits) -> tuple[str, bool]:
        try:
            plain = schema.dump(value, mode="json")
        except _AUTHOR_CODE_ERRORS as exc:
            path, part, depth = _find_unwritable_part(value, "$", limits.depth)
            _to_plain_json(part, path, what, depth)  # usually raises, with a path inside the part
            raise NotSerializable(what, "$", f"is a {type(value).__name__} whose serializer failed") from exc
        text, has_constants = _encode_plain(plain, limits.depth), False
        if text is None:
            text = _dumps(_to_plain_json(_name_constants(plain, limits.depth), "$", what, limits.depth))
            has_constants = '"NaN"' in text or 'Infinity"' in text
        if _SECRET_MASK in text:
            _check_secrets(schema.dump(value, mode="python"), what, "$")
        _check_text(text, value, what, limits)
        return text, has_constants

    def decode(self, text: str) -> Any:
        """Return the typed value of a JSON text. Raises ValidationFailed."""
        if self._schema is None:
            return json.loads(text)
        names = (
            {"by_alias": self._schema.by_alias, "by_name": not self._schema.by_alias} if self._is_stored_value else {}
        )
        return _validate(self._schema.validator.validate_json, text, **names)

    def check(self, value: Any) -> Any:
        """Return ``value`` as the declared type (a dict becomes its model). Raises ValidationFailed."""
        return value if self._schema is None else _validate(self._schema.validator.validate_python, value)

    @functools.cached_property
    def _schema(self) -> TypeSchema | None:
        try:
            return build_type_schema(self._get_annotation(), self._what)
        except UndefinedName as exc:
            _warn_once(self._what, str(exc))
            return None


# Errors that user code, such as a validator or a serializer, may raise for a value. Not Exception, because Celery
# raises its time limits as Exceptions, and they say nothing about the value.
_AUTHOR_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _are_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except _AUTHOR_CODE_ERRORS:  # by the author's __eq__
        return False


def _validate(validate: Callable[..., Any], value: Any, **names: bool) -> Any:
    try:
        return validate(value, **names)
    except pydantic.ValidationError as exc:
        raise ValidationFailed(_pydantic_problems(exc)) from None  # the text of the original error shows the value
    except _AUTHOR_CODE_ERRORS as exc:
        raise ValidationFailed([("$", f"a validator raised {type(exc).__name__}")]) from exc


def _pydantic_problems(exc: pydantic.ValidationError) -> list[tuple[str, str]]:
    # include_input=False: the message goes to logs and history, the value must not.
    return [
        (
            "$" + "".join(_write_part(part) for part in error["loc"] if part not in _TIME_FORMS),
            "Input has an unknown tag" if error["type"] == "union_tag_invalid" else error["msg"],
        )
        for error in exc.errors(include_url=False, include_input=False, include_context=False)
    ]


_TIME_FORMS = frozenset(TimeForm)


def _write_part(part: int | str) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"


@functools.cache
def _warn_once(what: str, why: str) -> None:
    logger.warning("%s names what is not defined, so its values stay plain JSON data: %s", what, why)


def encode(value: Any, *, what: str, limits: PayloadLimits) -> str:
    """Return canonical JSON text, which every database stores unchanged; raises NotSerializable, PayloadTooLarge."""
    text = _encode_plain(value, limits.depth)
    if text is None:
        text = _dumps(_to_plain_json(value, "$", what, limits.depth))
        if _SECRET_MASK in text:
            _check_secrets(_ANY.to_python(value), what, "$")
    _check_text(text, value, what, limits)
    return text


def _check_text(text: str, value: Any, what: str, limits: PayloadLimits) -> None:
    if _NON_STRING_KEY.search(text):
        _check_duplicate_keys(value, "$", what)
    size = len(text) if text.isascii() else len(text.encode())
    if size > limits.size_bytes:
        raise PayloadTooLarge(what, size, limits.size_bytes)


_SECRET_MASK = "*" * 10
_SECRETS = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)
_ANY = pydantic_core.SchemaSerializer(pydantic_core.core_schema.any_schema())


def _check_secrets(value: Any, what: str, path: str) -> None:
    """Raise NotSerializable for a secret in a dumped value, unless a serializer of its model reveals it."""
    if isinstance(value, _SECRETS):
        kind = next(kind for kind in _SECRETS if isinstance(value, kind))
        raise NotSerializable(what, path, f"is a {kind.__name__}, of which JSON would keep nothing but asterisks")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_secrets(item, what, f"{path}.{key}")
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for index, item in enumerate(value):
            _check_secrets(item, what, f"{path}[{index}]")


_NON_STRING_KEY = re.compile(r'[{,]"(?:-?\d[^"\\]*|true|false|null)":')
"""Matches, in JSON text, a key that may have been a number, a bool or None. Such a key may equal a string key."""


def _check_duplicate_keys(value: Any, path: str, what: str) -> None:
    """Raise NotSerializable if two keys of a mapping are equal as JSON, because only one of them would be stored."""
    if isinstance(value, Mapping):
        kinds: dict[str, type] = {}
        for key, item in value.items():
            text = _encode_key(key, path, what)
            if text in kinds:
                names = " and ".join(sorted((kinds[text].__name__, type(key).__name__)))
                raise NotSerializable(what, f"{path}.{text}", f"has two keys that JSON writes alike, of types {names}")
            kinds[text] = type(key)
            _check_duplicate_keys(item, f"{path}.{text}", what)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_duplicate_keys(item, f"{path}[{index}]", what)
    elif fields := get_fields(value):
        for name, item in fields.items():
            _check_duplicate_keys(item, f"{path}.{name}", what)


def _encode_plain(value: Any, depth: int) -> str | None:
    """Return the JSON text of a value that the json module accepts unchanged, or None for the slow path."""
    try:
        text = _dumps(value)
        if not text.isascii():
            text.encode()  # a lone surrogate fails here
    except (TypeError, ValueError, RecursionError):
        return None
    is_shallow = text.count("[") + text.count("{") <= depth
    return text if is_shallow and "\\u0000" not in text else None


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


_CONSTANTS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _name_constants(plain: Any, depth: int) -> Any:
    """Return JSON data with each NaN and infinity as text, as pydantic's ``ser_json_inf_nan="strings"`` writes it."""
    if isinstance(plain, float) and not math.isfinite(plain):
        return _CONSTANTS.get(plain, "NaN")
    if depth <= 0:
        return plain
    if isinstance(plain, dict):
        return {key: _name_constants(item, depth - 1) for key, item in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [_name_constants(item, depth - 1) for item in plain]
    return plain


_INTEGER_LIMIT = 10**4300
"""By default Python converts no integers of more than 4300 digits to text or back."""


def _to_plain_json(value: Any, path: str, what: str, depth: int) -> Any:
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
            _encode_key(key, path, what): _to_plain_json(item, f"{path}.{key}", what, depth - 1)
            for key, item in value.items()
        }
    return [_to_plain_json(item, f"{path}[{index}]", what, depth - 1) for index, item in enumerate(value)]


def _convert_leaf(value: Any, path: str, what: str, depth: int) -> Any:
    """Convert a value that only pydantic can write, such as a model, a dataclass, a datetime or a set."""
    if inspect.iscoroutine(value):
        value.close()  # prevents the warning that it was never awaited
        raise NotSerializable(
            what, path, "is a coroutine, not its result: use asyncio.run(...), or `await` in async code"
        )
    if isinstance(value, Iterator):  # a generator would run user code here, outside of its step
        raise NotSerializable(what, path, f"is a {type(value).__name__}, which can be read only once: make it a list")
    try:
        plain = pydantic_core.to_jsonable_python(value, inf_nan_mode="constants", serialize_unknown=False)
    except _AUTHOR_CODE_ERRORS as exc:
        if fields := get_fields(value):
            _to_plain_json(fields, path, what, depth)  # usually raises with the path of the field that fails
        raise NotSerializable(what, path, f"is a {type(value).__name__}, which has no JSON form") from exc
    return _to_plain_json(plain, path, what, depth)


def _find_unwritable_part(value: Any, path: str, depth: int) -> tuple[str, Any, int]:
    """Return the path of the first part that pydantic cannot write, the part, and how deep it may be."""
    for suffix, part in get_parts(value).items() if depth > 0 else ():
        try:
            pydantic_core.to_jsonable_python(part, bytes_mode="base64", inf_nan_mode="constants")
        except _AUTHOR_CODE_ERRORS:
            return _find_unwritable_part(part, f"{path}{suffix}", depth - 1)
    return path, value, depth


def _encode_key(key: Any, path: str, what: str) -> str:
    if isinstance(key, str):
        if UNSTORABLE_CHARACTERS.search(key):
            reason = f"that {lost}" if (lost := read_refusal(key)) else "with a NUL character or half a surrogate pair"
            raise NotSerializable(what, path, f"has a key {reason}")
        return key
    if key is None or isinstance(key, (int, float)):
        return _dumps(_to_plain_json(key, path, what, 0))
    try:
        (text,) = pydantic_core.to_jsonable_python({key: None}, serialize_unknown=False)
    except _AUTHOR_CODE_ERRORS as exc:
        raise NotSerializable(what, path, f"has a key of type {type(key).__name__}") from exc
    return _encode_key(text, path, what)
