"""Conversion of values of declared types to canonical JSON text and back."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pydantic
import pydantic_core

from celery_durable.errors import NotSerializable, PayloadTooLarge
from celery_durable.values.losses import TimeForm, check_kept
from celery_durable.values.plain_json import (
    AUTHOR_CODE_ERRORS,
    check_duplicate_keys,
    check_secrets,
    find_unwritable_part,
    name_constants,
    to_plain_json,
)
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
        except AUTHOR_CODE_ERRORS as exc:
            path, part, depth = find_unwritable_part(value, "$", limits.depth)
            to_plain_json(part, path, what, depth)  # usually raises, with a path inside the part
            raise NotSerializable(what, "$", f"is a {type(value).__name__} whose serializer failed") from exc
        text, has_constants = _encode_plain(plain, limits.depth), False
        if text is None:
            text = _dumps(to_plain_json(name_constants(plain, limits.depth), "$", what, limits.depth))
            has_constants = '"NaN"' in text or 'Infinity"' in text
        if _SECRET_MASK in text:
            check_secrets(schema.dump(value, mode="python"), what, "$")
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


def _are_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except AUTHOR_CODE_ERRORS:  # by the author's __eq__
        return False


def _validate(validate: Callable[..., Any], value: Any, **names: bool) -> Any:
    try:
        return validate(value, **names)
    except pydantic.ValidationError as exc:
        raise ValidationFailed(_pydantic_problems(exc)) from None  # the text of the original error shows the value
    except AUTHOR_CODE_ERRORS as exc:
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
        text = _dumps(to_plain_json(value, "$", what, limits.depth))
        if _SECRET_MASK in text:
            check_secrets(_ANY.to_python(value), what, "$")
    _check_text(text, value, what, limits)
    return text


_SECRET_MASK = "*" * 10
_ANY = pydantic_core.SchemaSerializer(pydantic_core.core_schema.any_schema())
_NON_STRING_KEY = re.compile(r'[{,]"(?:-?\d[^"\\]*|true|false|null)":')
"""Matches, in JSON text, a key that may have been a number, a bool or None. Such a key may equal a string key."""


def _check_text(text: str, value: Any, what: str, limits: PayloadLimits) -> None:
    if _NON_STRING_KEY.search(text):
        check_duplicate_keys(value, "$", what)
    size = len(text) if text.isascii() else len(text.encode())
    if size > limits.size_bytes:
        raise PayloadTooLarge(what, size, limits.size_bytes)


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
