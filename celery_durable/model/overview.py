"""What operators read across all instances: counts, overdue runs, and steps that wait for an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery_durable.model.rows import RunRef
from celery_durable.model.states import Status


@dataclass(frozen=True, slots=True)
class Count:
    """A number of rows. If it is not exact, there are at least so many: the read has examined as many as it may."""

    number: int
    is_exact: bool = True

    def __str__(self) -> str:
        return str(self.number) if self.is_exact else f"{self.number}+"


@dataclass(frozen=True, slots=True)
class EventWait:
    """A step that waits for an event."""

    ref: RunRef
    status: Status
    step: str
    event_type: str
    since: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Overdue:
    """The number of runs that are due and unclaimed, and since when the oldest of them is."""

    count: Count
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class RowLocker:
    """The database session that holds the lock of a row. ``state``: as the server names it."""

    pid: int
    state: str
    age: timedelta
    """How long its transaction has lasted."""
    end: str
    """A command that ends the session."""


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """A queue in which tasks of steps wait. ``is_consumed``: whether a worker with Durable consumes it."""

    age: timedelta
    """For how long the oldest of these tasks has waited."""
    count: int
    is_consumed: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of instances as (workflow, status, count) without zeros, and the overdue runs."""

    counts: Sequence[tuple[str, Status, Count]]
    overdue: Overdue
