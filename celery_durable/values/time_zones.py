"""Datetimes and times as JSON text that keeps their time zone, as RFC 9557 writes it: a suffix with the zone's name.

``2030-03-30T12:00:00+01:00[Europe/Berlin]``. A value that its offset describes has no suffix.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from celery_durable.values.losses import refuse

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
