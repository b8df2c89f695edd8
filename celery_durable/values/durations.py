"""Parsing of the durations and points in time that callers pass in."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytimeparse2

from celery_durable.errors import DurationInvalid, InstantInvalid
from celery_durable.errors.base import format_limit

Duration = timedelta | str | int | float
"""A timedelta, a number of seconds, or text such as "10 seconds", "1.5 h", "3 days"."""

# pytimeparse2 alone reads "1.1.1 s" as zero, and accepts "1e3" and "+5" without a unit.
_SPAN_TEXT = re.compile(r"[+-]? ?(?:(?:\d+(?:\.\d+)?|\.\d+) ?[a-z]+ ?)+", re.IGNORECASE | re.ASCII)
_VAGUE_UNIT = re.compile(r"\d ?(?:y|mo|mt)", re.IGNORECASE)


def parse_duration(
    value: Duration,
    *,
    minimum: timedelta = timedelta(0),
    maximum: timedelta | None = None,
    setting: str | None = None,
) -> timedelta:
    """Return a duration as a timedelta. A number means seconds.

    Raises DurationInvalid outside of the bounds, and for months and years. ``setting`` names that of the maximum.
    """
    span = _read_duration(value)
    if span < minimum:
        raise DurationInvalid(value, f"it is shorter than {format_limit(minimum)}")
    if maximum is not None and span > maximum:
        longest = format_limit(maximum) + (f" ({setting})" if setting else "")
        raise DurationInvalid(value, f"it is longer than {longest}")
    return span


def parse_pause(value: Duration, *, maximum: timedelta, minimum: timedelta = timedelta(0)) -> timedelta:
    """Return the duration of a sleep, a wait or a delay, as `parse_duration` does, up to the limit of the settings."""
    return parse_duration(value, minimum=minimum, maximum=maximum, setting="durable_max_sleep_seconds")


def _read_duration(value: Duration) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DurationInvalid(value, f"{type(value).__name__} is no duration")
    try:
        return _read_text(value) if isinstance(value, str) else timedelta(seconds=value)
    except OverflowError as exc:
        raise DurationInvalid(value, "it is too long") from exc
    except ValueError as exc:
        raise DurationInvalid(value, "it is not a number") from exc


def _read_text(value: str) -> timedelta:
    text = " ".join(value.replace(",", " ").split())
    if _VAGUE_UNIT.search(text):
        raise DurationInvalid(value, "months and years have no fixed length; write days")
    seconds = _parse(text) if _SPAN_TEXT.fullmatch(text) else None
    if seconds is None:
        raise DurationInvalid(value, "a unit is unknown, missing or out of order")
    return timedelta(seconds=seconds)


_parse: Callable[[str], float | None] = pytimeparse2.parse


def to_utc(value: object, what: str) -> datetime:
    """Return an aware datetime in UTC. Raises InstantInvalid for a naive one; ``what`` names the argument."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InstantInvalid(what, value)
    try:
        return value.astimezone(UTC)
    except OverflowError as exc:  # in UTC it would be in the year 0 or 10000
        raise InstantInvalid(what, value) from exc
