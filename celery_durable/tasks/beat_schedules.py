"""The scheduled time of what beat sends, by which two beats give an instance the same id.

Beat passes it on in neither the message nor the call of ``apply_async`` (celery/celery#6974).
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.schedules import crontab, schedule

_PLACEHOLDER = re.compile(r"\{scheduled(?::([^{}]*))?\}")
_UTC_FORMAT = "%Y%m%dT%H%M%SZ"
_HOURS_SEARCHED = 24 * 366 * 9
"""Between two 29ths of February lie up to eight years."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An entry of beat's schedule that is being sent. ``at``: when it was due; None for an unknown kind of schedule."""

    entry: str
    at: datetime | None


current_occurrence: ContextVar[Occurrence | None] = ContextVar("celery_durable_occurrence", default=None)
"""The entry that beat sends on this thread, if its task is ours."""


def note_occurrences(scheduler: Any, task: str) -> None:
    """Have a scheduler of beat set `current_occurrence` while it sends an entry of ``task``.

    The method of this one object is replaced: any class may be the scheduler's. Other tasks pass through it unchanged.
    """
    send = scheduler.apply_async

    def apply_async(entry: Any, *args: Any, **kwargs: Any) -> Any:
        if entry.task != task:
            return send(entry, *args, **kwargs)
        token = current_occurrence.set(Occurrence(str(entry.name), find_last_due(entry.schedule)))
        try:
            return send(entry, *args, **kwargs)
        finally:
            current_occurrence.reset(token)

    scheduler.apply_async = apply_async


def find_last_due(of: Any) -> datetime | None:
    """Return when a schedule of a known kind was last due, the same on every machine: intervals count from 1970."""
    is_crontab, is_interval = isinstance(of, crontab), isinstance(of, schedule)
    if not (is_crontab or is_interval):
        return None
    now: datetime = of.maybe_make_aware(of.now()).astimezone(of.tz)
    if is_crontab:
        return _find_last_match(of, now)
    length = of.run_every.total_seconds()
    return datetime.fromtimestamp(now.timestamp() // length * length, of.tz)


def _find_last_match(of: Any, now: datetime) -> datetime | None:
    """Go back from ``now`` by minutes, and by hours that cannot match; in UTC, where each minute is unique."""
    instant = now.astimezone(UTC).replace(second=0, microsecond=0)
    first = instant - timedelta(hours=_HOURS_SEARCHED)
    while instant > first:
        local = instant.astimezone(now.tzinfo)
        is_in_hour = (
            local.month in of.month_of_year
            and local.day in of.day_of_month
            and local.isoweekday() % 7 in of.day_of_week
            and local.hour in of.hour
        )
        if is_in_hour and local.minute in of.minute:
            return local
        instant -= timedelta(minutes=1 if is_in_hour else local.minute + 1)
    return None


def fill_in_template(template: str, occurrence: Occurrence | None, now: datetime) -> str:
    """Replace ``{scheduled}`` or ``{scheduled:%Y-%m-%d}`` by the scheduled time, or ``now`` if it is unknown."""
    at = now if occurrence is None or occurrence.at is None else occurrence.at

    def format_time(match: re.Match[str]) -> str:
        return at.strftime(match[1]) if match[1] else at.astimezone(UTC).strftime(_UTC_FORMAT)

    return _PLACEHOLDER.sub(format_time, template)
