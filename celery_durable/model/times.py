"""Conversion of points in time and durations to and from their stored form, and to text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def from_us(us: int) -> datetime:
    """Return the time that is ``us`` microseconds after the epoch, the stored form."""
    return EPOCH + timedelta(microseconds=us)


def from_us_or_none(us: int | None) -> datetime | None:
    """Return the time that `from_us` returns. None stays None."""
    return None if us is None else from_us(us)


def to_us(instant: datetime) -> int:
    """Return the microseconds since the epoch. The result is exact, because no float is used."""
    return (instant - EPOCH) // _MICROSECOND


def duration_us(length: timedelta) -> int:
    """Return a duration in microseconds."""
    return length // _MICROSECOND


def iso(instant: datetime) -> str:
    """Return ISO 8601 text in UTC, with milliseconds."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def format_duration(length: timedelta, *, units: int = 2) -> str:
    """Return a duration as text in at most ``units`` units: ``12 ms``, ``1.2 s``, ``23 h 20 min``."""
    seconds = length.total_seconds()
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))} ms"
    if seconds < 10 and units > 1:
        return f"{seconds:.1f} s"
    left, parts = round(seconds), list[str]()
    for unit, size in _UNITS:
        count, rest = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
            left = rest
        if len(parts) == units:
            break
    return " ".join(part for part in parts if part)
