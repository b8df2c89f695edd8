"""What a value of a declared type loses as JSON text. Such a value is refused, because nobody would notice."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pydantic

from celery_durable.errors import NotSerializable


def get_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a model or of a dataclass; none for other values."""
    if isinstance(value, pydantic.BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


def get_parts(value: Any) -> dict[str, Any]:
    """Return the items or the fields of a value by the last part of their path, such as ``[0]`` or ``.name``."""
    if isinstance(value, Mapping):
        return {f".{key}": item for key, item in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    return {f".{name}": item for name, item in get_fields(value).items()}


_REFUSED = "\0celery_durable: "


def refuse(reason: str) -> str:
    """Return the text that a serializer writes for a refused value. Pydantic's unions would catch an exception."""
    return f"{_REFUSED}{reason}"


def read_refusal(text: str) -> str | None:
    """Return why a serializer has refused a value, or None for other text."""
    return text.removeprefix(_REFUSED) if text.startswith(_REFUSED) else None


def check_kept(value: Any, back: Any, what: str, *, has_union: bool) -> None:
    """Raise NotSerializable for a value that is read back as less than it was.

    It accepts what the author asks for: an excluded field, a serializer or validator, a conversion to the declared
    type.
    """
    for path, reason in _find_losses(value, back, "$", has_union=has_union):
        raise NotSerializable(what, path, reason)


def _find_losses(value: Any, back: Any, path: str, *, has_union: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and isinstance(back, str) and not math.isfinite(value):
        yield path, f"is {value}, which JSON does not have"
    if type(value) is int and type(back) is float and value != back:
        yield path, "is an integer that a float cannot hold"
    if isinstance(value, re.Pattern) and isinstance(back, re.Pattern) and value.flags != back.flags:
        yield path, "is a pattern with flags: write them into the pattern, such as (?i)"
    if isinstance(value, collections.deque) and isinstance(back, collections.deque) and value.maxlen != back.maxlen:
        yield path, "is a deque with a maxlen: use a deque without, and set it after reading"
    parts, back_parts = get_parts(value), get_parts(back)
    if (fields := get_fields(value)) and (back_fields := get_fields(back)):
        yield from _find_lost_fields(value, fields, back, back_fields, path)
        if has_union and not isinstance(value, type(back)):
            yield (
                path,
                f"is a {type(value).__name__}, and would be read as a {type(back).__name__}: add a discriminator",
            )
    for suffix, item in parts.items():
        if suffix in back_parts:
            yield from _find_losses(item, back_parts[suffix], f"{path}{suffix}", has_union=has_union)


def _find_lost_fields(
    value: Any, fields: dict[str, Any], back: Any, back_fields: dict[str, Any], path: str
) -> Iterator[tuple[str, str]]:
    kind, declared = type(value).__name__, type(back).__name__
    if isinstance(value, type(back)):
        for name in sorted(fields.keys() - back_fields.keys()):
            yield f"{path}.{name}", f"is a field of {kind}, and the declared type is {declared}: declare {kind}"
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if not field.init and field.name in back_fields and fields[field.name] != back_fields[field.name]:
            yield f"{path}.{field.name}", "is a field with init=False, which is not read back"


# Datetimes and times as JSON text that keeps their time zone, as RFC 9557 writes it: a suffix with the zone's name.
#
# ``2030-03-30T12:00:00+01:00[Europe/Berlin]``. A value that its offset describes has no suffix.


_SECOND_OF_TWO = "[_fold=1]"  # RFC 9557 leaves the names that begin with an underscore to private use
_SUFFIXED = re.compile(r"([^\[\]]+)(?:\[([A-Za-z][^\[\]]*)\])?(\[_fold=1\])?")


def write_time_zone(value: Any, write: Callable[[Any], Any]) -> Any:
    """Serialize a datetime or a time. One that its text would not keep becomes text that is refused."""
    text = write(value)
    if not isinstance(text, str) or not isinstance(value, (datetime, time)):
        return text
    zone = value.tzinfo
    if zone is not None and zone.utcoffset(None) is None:  # its offset depends on the date
        if not isinstance(zone, ZoneInfo) or not zone.key:
            kind = type(zone).__name__
            return refuse(f"has a time zone of type {kind} without a name: use zoneinfo.ZoneInfo(name), or UTC")
        text += f"[{zone.key}]"
    elif zone is not None and (value.utcoffset() or timedelta()) % timedelta(minutes=1):
        return refuse("has a UTC offset with seconds, which JSON text would not keep")
    if value.fold and (zone is None or isinstance(value, time)):
        text += _SECOND_OF_TWO
    return text


class TimeForm(enum.StrEnum):
    """How a datetime or a time is given. Pydantic puts it into the location of an error."""

    PLAIN = "\0plain"
    SUFFIXED = "\0suffixed"


def find_time_form(given: Any) -> TimeForm:
    """Return which form a text has; anything but a text is plain."""
    return TimeForm.SUFFIXED if isinstance(given, str) and given.endswith("]") else TimeForm.PLAIN


def read_time_zone(given: str) -> Any:
    """Return the datetime or the time of a text with a suffix, or the text itself, for pydantic to refuse."""
    if (found := _SUFFIXED.fullmatch(given)) is None:
        return given
    text, key, fold = found.groups()
    try:
        value: datetime | time = datetime.fromisoformat(text) if "-" in text[:10] else time.fromisoformat(text)
    except ValueError:
        return given
    if fold:
        value = value.replace(fold=1)
    return value if key is None else _set_zone(value, _find_zone(key))


def _find_zone(key: str) -> ZoneInfo:
    try:
        return ZoneInfo(key)
    except (KeyError, ValueError, OSError):
        raise ValueError("the time zone is unknown here: install the package tzdata, or update it") from None


def _set_zone(value: datetime | time, zone: ZoneInfo) -> datetime | time:
    offset = value.utcoffset()
    if isinstance(value, time) or offset is None:
        return value.replace(tzinfo=zone)
    for fold in (0, 1):
        local = value.replace(tzinfo=zone, fold=fold)
        # Old local times have offsets with seconds, which the text leaves out.
        if abs((local.utcoffset() or timedelta()) - offset) < timedelta(minutes=1):
            return local
    return value.astimezone(zone)  # the rules of the zone have changed, or the text has "Z": the instant counts
