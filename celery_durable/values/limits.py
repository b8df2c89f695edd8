"""Limits that steps share: how many run at once, and how many start in a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from celery_durable.errors import ConfigInvalid, LimitConflict, LimitKeyInvalid
from celery_durable.values.annotations import refuse_async
from celery_durable.values.names import check_identifier, list_fields

_UNITS = {"second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000, "day": 86_400_000_000}
_RATE_REMEDY = 'use text such as "90 per second"; the units are second, minute, hour and day'
_MAX_AT_ONCE, _MAX_KEY = 2**31 - 1, 255

KeyFunction = Callable[[Any], str | int]
"""Takes the `WorkflowEvent` of a run and returns a text or a whole number."""


class LimitUse(NamedTuple):
    """What a step asks of one limit. ``key`` and ``fair_key`` are empty without the functions for them."""

    name: str
    key: str
    fair_key: str
    at_once: int | None
    rate: str | None


@list_fields
@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """A limit that all steps with it share, in all processes of the database.

    Args:
        name: The limit's name, unique in the database.
        at_once: How many steps hold it at the same time; None for no limit.
        rate: How many steps start in a time, such as "90 per second". The units are second, minute, hour and day. A
            tenth of a second's worth may start at the same moment.
        by: A function of the run's `WorkflowEvent`: each value that it returns has a limit of its own.
        fair: A function of the run's `WorkflowEvent`: while steps wait, the values that it returns take turns.

    Raises:
        AsyncNotSupported: ``by`` or ``fair`` is a coroutine function.
        ConfigInvalid: An argument cannot be used, or neither ``at_once`` nor ``rate`` is given.
        LimitConflict: A module of this process defines a limit of this name with other numbers.
        NameInvalid: The name breaks the rules.
    """

    name: str
    at_once: int | None = None
    rate: str | None = None
    by: KeyFunction | None = None
    fair: KeyFunction | None = None

    def __post_init__(self) -> None:
        check_identifier("Limit name", self.name, 100)
        check_numbers(self.at_once, self.rate)
        if self.at_once is None and self.rate is None:
            raise ConfigInvalid("Limit.at_once", None, "give at_once=, rate=, or both")
        options: list[tuple[str, Any]] = [("by", self.by), ("fair", self.fair)]
        for option, function in options:
            if function is None:
                continue
            if not callable(function):
                remedy = "use a function of the event, such as lambda event: event.payload['tenant']"
                raise ConfigInvalid(f"Limit.{option}", function, remedy)
            refuse_async(f"The function {option}=", function)
        _check_conflict(self, sys._getframe(3))  # noqa: SLF001  # as namedtuple does

    def use(self, event: Any) -> LimitUse:
        """Return what a step of the run with this event asks of the limit; raises LimitKeyInvalid."""
        return LimitUse(
            self.name, self._call("by", self.by, event), self._call("fair", self.fair, event), self.at_once, self.rate
        )

    def _call(self, option: str, function: KeyFunction | None, event: Any) -> str:
        if function is None:
            return ""
        value = function(event)
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_KEY or "\x00" in text:
            raise LimitKeyInvalid(self.name, option, value)
        return text


_of_modules: dict[str, tuple[Limit, tuple[str, int]]] = {}
"""The limits that modules of this process define, not in a function, by name, and where."""


def _check_conflict(limit: Limit, frame: FrameType) -> None:
    """Compare a new limit with that of its name which a module defines. A module that is loaded again replaces it."""
    place = frame.f_code.co_filename, frame.f_lineno
    known, known_place = _of_modules.get(limit.name, (limit, place))
    if place != known_place and (known.at_once, known.rate) != (limit.at_once, limit.rate):
        raise LimitConflict(limit.name, _describe(known), _describe(limit))
    if frame.f_code.co_name == "<module>":
        _of_modules[limit.name] = limit, place


def _describe(limit: Limit) -> str:
    return f"at_once={limit.at_once!r}, rate={limit.rate!r}"


def check_numbers(at_once: Any, rate: Any) -> None:
    """Check the numbers of a limit; raises ConfigInvalid."""
    is_count = isinstance(at_once, int) and not isinstance(at_once, bool) and 1 <= at_once <= _MAX_AT_ONCE
    if at_once is not None and not is_count:
        raise ConfigInvalid("Limit.at_once", at_once, "use a whole number from 1")
    if rate is not None:
        rate_interval_us(rate)


def rate_interval_us(rate: Any) -> int:
    """Return the microseconds between two starts at a rate; raises ConfigInvalid."""
    words = rate.split() if isinstance(rate, str) and len(rate) <= 64 else ()
    if len(words) != 3 or words[1] != "per" or words[2] not in _UNITS or not words[0].isdecimal():
        raise ConfigInvalid("Limit.rate", rate, _RATE_REMEDY)
    count, unit_us = int(words[0]), _UNITS[words[2]]
    if not 1 <= count <= unit_us:
        raise ConfigInvalid("Limit.rate", rate, "use a whole number from 1, and at most one million per second")
    return unit_us // count


def check_limits(setting: str, limits: object) -> tuple[Limit, ...]:
    """Return the limits of a step or a workflow, in the order in which they are taken; raises ConfigInvalid."""
    if not isinstance(limits, Sequence) or not all(isinstance(limit, Limit) for limit in limits):
        raise ConfigInvalid(setting, limits, "use a list of Limit objects, such as [Limit('stripe', at_once=20)]")
    names = [limit.name for limit in limits]
    if len(set(names)) < len(names):
        raise ConfigInvalid(setting, names, "name each limit once")
    return tuple(sorted(limits, key=lambda limit: limit.name))
