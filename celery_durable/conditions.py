"""Conditions on instances: what `--where` of the command line and the filter of the dashboard say."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from celery_durable import values
from celery_durable.errors import DurationInvalid, ValueRefused
from celery_durable.model import TERMINAL, InstanceSummary, Status

UNFINISHED = frozenset(Status) - TERMINAL
SELECTED_STATUSES: Mapping[str, AbstractSet[Status]] = {
    "pause": UNFINISHED - {Status.PAUSED},
    "resume": {Status.PAUSED},
    "wake": UNFINISHED - {Status.PAUSED},
    "cancel": UNFINISHED,
    "terminate": UNFINISHED,
    "restart": TERMINAL,
    "retry": {Status.ERRORED},
}
"""The statuses of the instances that a command selects, by its name."""
_IF_NAMED: Mapping[str, AbstractSet[Status]] = {"restart": frozenset(Status)}
"""The same, if the condition names a status and that is different."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on instances. All fields that are set must match.

    ``older``: the last change is at least this long ago. ``since``: at most this long ago. ``labels``: all must match.
    ``step``: the key of the step whose failure ended it. ``message``: the first line of its error (`first_line`).
    """

    workflow: str | None = None
    status: Status | None = None
    error: str | None = None
    step: str | None = None
    message: str | None = None
    older: timedelta | None = None
    since: timedelta | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def listed_status(self) -> Status | None:
        """The status by which to list: only errored instances have an error."""
        has_error = any(each is not None for each in (self.error, self.step, self.message))
        return Status.ERRORED if self.status is None and has_error else self.status

    @property
    def is_examined(self) -> bool:
        """Whether each instance must be compared, because lists do not filter by all fields."""
        return any(each is not None for each in (self.error, self.step, self.message, self.older, self.since))

    def matches(self, item: InstanceSummary, now: datetime) -> bool:
        """Return whether an instance with this workflow, listed status and labels matches the other fields."""
        age = now - item.updated_at
        if self.error is not None and (item.error is None or item.error.name != self.error):
            return False
        if self.step is not None and item.failed_step != self.step:
            return False
        if self.message is not None and (item.error is None or first_line(item.error.message) != self.message):
            return False
        return not ((self.older is not None and age < self.older) or (self.since is not None and age > self.since))

    def selects(self, command: str, status: Status) -> bool:
        """Return whether the command changes matching instances with this status."""
        statuses = SELECTED_STATUSES[command]
        return status in (statuses if self.status is None else _IF_NAMED.get(command, statuses))


def first_line(message: str) -> str:
    """Return the first line of an error's message, up to 200 characters."""
    return message[:_MESSAGE_LENGTH].partition("\n")[0].strip()


_MESSAGE_LENGTH = 200
_LABEL = "label."
_KEYS = [each.name for each in fields(Condition) if each.name != "labels"]
_ALLOWED_KEYS = ", ".join(f"{each}=" for each in [*_KEYS, f"{_LABEL}NAME"])


def read_condition(text: str) -> Condition:
    """Read ``key=value`` pairs, separated by spaces; raises ValueRefused."""
    given: dict[str, Any] = {}
    labels: list[str] = []
    try:
        words = shlex.split(text)
    except ValueError as exc:
        raise ValueRefused(f"{text!r} cannot be read: {exc}") from exc
    for word in words:
        key, equals, value = word.partition("=")
        is_label = key.startswith(_LABEL)
        if not equals or not value or not (is_label or key in _KEYS) or key in given:
            raise ValueRefused(f"{word!r} is not one of {_ALLOWED_KEYS}, each once")
        match key:
            case _ if is_label:
                labels.append(word.removeprefix(_LABEL))
            case "status":
                given[key] = _read_status(value)
            case "older" | "since":
                given[key] = read_duration(value)
            case _:
                given[key] = value
    if not given and not labels:
        raise ValueRefused("the condition is empty")
    return Condition(**given, labels=values.parse_labels(labels))


def _read_status(text: str) -> Status:
    try:
        return Status(text)
    except ValueError:
        raise ValueRefused(f"{text!r} is not one of {', '.join(map(repr, map(str, Status)))}") from None


def read_duration(text: str) -> timedelta:
    """Read seconds as a number, or a text such as ``5 minutes``; raises ValueRefused."""
    try:
        seconds: Any = float(text)
    except ValueError:
        seconds = text
    try:
        return values.parse_duration(seconds)
    except (DurationInvalid, OverflowError) as exc:
        raise ValueRefused(str(exc)) from exc
