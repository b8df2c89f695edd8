"""The configuration of a step: retries, timeout and repetition. Omitted values come from the defaults."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Literal

from celery_durable.errors import ConfigInvalid
from celery_durable.values.annotations import refuse_async
from celery_durable.values.durations import Duration, parse_duration
from celery_durable.values.limits import Limit, check_limits
from celery_durable.values.names import list_fields

Backoff = Literal["constant", "linear", "exponential"]
OnLostStep = Literal["resend", "fail"]
"""What to do if the end of an attempt of a step's function is unknown: call the function again, or fail the step."""
OnCancelStep = Literal["wait", "abandon"]
DelayFunction = Callable[[int, BaseException], Duration]
"""Returns the delay after a failed attempt, from its number and its error."""

_MAX_DURATION = timedelta(days=365)


class _Unset(Enum):  # an enum, so that a copy or a pickle of it is the same object
    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final[Any] = _Unset.UNSET
"""The default of an omitted argument for which None has a meaning of its own."""


@list_fields
@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how soon a failed step is tried again. Omitted values come from the defaults.

    Args:
        limit: The number of retries after the first attempt; None for no limit.
        delay: The time between a failure and the first retry. A number means seconds. Or a function of the number of
            the failed attempt, from 1, and its exception, that returns the delay, for example from a Retry-After. A
            timeout and a Celery task have a `StepFailed` with the name and the message of the error. The function must
            return quickly. If it raises, or returns no valid duration, the step fails with RetryDelayInvalid.
        backoff: How the delay d grows: "constant" d, d, d; "linear" d, 2d, 3d; "exponential" d, 2d, 4d. The delay that
            a function returns does not grow.
        max_delay: The longest delay; None for 365 days.
        jitter: The largest fraction, from 0 to 1, that is taken off each delay at random, so that steps that failed
            together are not retried together. With 0.25, each delay has 75 % to 100 % of its length. 0 by default.

    Raises:
        AsyncNotSupported: ``delay`` is a coroutine function.
        ConfigInvalid: ``limit``, ``backoff`` or ``jitter`` cannot be used.
        DurationInvalid: A duration cannot be read or is longer than 365 days.
    """

    limit: int | None = UNSET
    delay: Duration | DelayFunction = UNSET
    backoff: Backoff = UNSET
    max_delay: Duration | None = UNSET
    jitter: float = UNSET

    def __post_init__(self) -> None:
        if self.limit == math.inf:
            object.__setattr__(self, "limit", None)
        elif self.limit is not UNSET and self.limit is not None and not _is_count(self.limit):
            raise ConfigInvalid("Retries.limit", self.limit, "use a whole number from 0, or None for without end")
        if callable(self.delay):
            refuse_async("The function delay=", self.delay)
        elif self.delay is not UNSET:
            object.__setattr__(self, "delay", parse_duration(self.delay, maximum=_MAX_DURATION))
        if self.backoff is not UNSET and self.backoff not in typing.get_args(Backoff):
            raise ConfigInvalid("Retries.backoff", self.backoff, "use one of constant, linear, exponential")
        if self.backoff is not UNSET and callable(self.delay):
            raise ConfigInvalid("Retries.backoff", self.backoff, "leave it out, since delay= is a function")
        if self.max_delay is not UNSET and self.max_delay is not None:
            object.__setattr__(self, "max_delay", parse_duration(self.max_delay, maximum=_MAX_DURATION))
        if self.jitter is not UNSET and not _is_fraction(self.jitter):
            raise ConfigInvalid("Retries.jitter", self.jitter, "use a number from 0 to 1")


def _is_count(value: object) -> bool:
    """Return whether it is a count that fits the column of attempts after one more is added."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 - 1


def _is_fraction(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


@list_fields
@dataclass(frozen=True, slots=True)
class StepConfig:
    """How a step runs. Omitted values come from the defaults of the function, the workflow or the app, in this order.

    Args:
        retries: A `Retries`, or a number for its limit.
        timeout: The longest time for each attempt; None for no limit. A number means seconds.
        repeat: If True, another call with the same name is a new step, with a number in its key.
        on_lost: What happens if the end of an attempt is unknown, for example because its worker died. "resend": the
            function is called again (the default). "fail": the step fails at once with `StepLost`, and its function is
            not called again in this run unless a person retries it.
        on_cancel: What happens to a function that runs when its run is cancelled. "wait": it ends first (the default).
            "abandon": it is interrupted as by its timeout, and what it has done is unknown.
        limits: The limits that an attempt holds while its function runs. It takes all of them together, or waits.

    Raises:
        ConfigInvalid: ``retries``, ``repeat``, ``on_lost``, ``on_cancel`` or ``limits`` cannot be used.
        DurationInvalid: ``timeout`` cannot be read, or is outside of 1 ms to 365 days.
    """

    retries: Retries | int | None = UNSET
    timeout: Duration | None = UNSET
    repeat: bool = UNSET
    on_lost: OnLostStep = UNSET
    on_cancel: OnCancelStep = UNSET
    limits: Sequence[Limit] = UNSET

    def __post_init__(self) -> None:
        if self.retries is not UNSET and not isinstance(self.retries, Retries):
            object.__setattr__(self, "retries", Retries(limit=self.retries))
        if self.timeout is not UNSET and self.timeout is not None:
            timeout = parse_duration(self.timeout, minimum=timedelta(milliseconds=1), maximum=_MAX_DURATION)
            object.__setattr__(self, "timeout", timeout)
        if self.repeat is not UNSET and not isinstance(self.repeat, bool):
            raise ConfigInvalid("StepConfig.repeat", self.repeat, "use True or False")
        if self.on_lost is not UNSET and self.on_lost not in typing.get_args(OnLostStep):
            hint = 'use "resend" or "fail"; only the tasks of step.task and step.map can be waited for with "wait"'
            raise ConfigInvalid("StepConfig.on_lost", self.on_lost, hint)
        if self.on_cancel is not UNSET and self.on_cancel not in typing.get_args(OnCancelStep):
            raise ConfigInvalid("StepConfig.on_cancel", self.on_cancel, 'use "wait" or "abandon"')
        if self.limits is not UNSET:
            object.__setattr__(self, "limits", check_limits("StepConfig.limits", self.limits))


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """A `StepConfig` in which every value is set. ``max_attempts`` counts the first; None: no limit."""

    max_attempts: int | None = 6
    delay: timedelta | DelayFunction = timedelta(seconds=10)
    backoff: Backoff = "exponential"
    max_delay: timedelta | None = None
    jitter: float = 0.0
    timeout: timedelta | None = timedelta(minutes=10)
    repeat: bool = False
    on_lost: OnLostStep = "resend"
    on_cancel: OnCancelStep = "wait"
    limits: tuple[Limit, ...] = ()

    @property
    def may_repeat(self) -> bool:
        """Whether the function may be called again after an attempt whose end is unknown."""
        return self.on_lost == "resend"

    def override_with(self, config: StepConfig | None) -> StepPolicy:
        """Return a copy in which the values that ``config`` sets replace those of this policy."""
        if config is None:
            return self
        given: dict[str, Any] = {}
        if config.retries is not UNSET:
            given.update(_select_given(config.retries, _RETRY_FIELDS))
            if "limit" in given:
                limit = given.pop("limit")
                given["max_attempts"] = None if limit is None else limit + 1
        given.update(_select_given(config, ("timeout", "repeat", "on_lost", "on_cancel", "limits")))
        return dataclasses.replace(self, **given) if given else self

    def delay_after(self, failed_attempt: int, error: BaseException, *, draw: Callable[[], float]) -> timedelta:
        """Return the delay after this failed attempt, from 1; raises what the author's function raises.

        ``draw``: returns a random number from 0 to 1. It is called only if the policy has a jitter.
        """
        delay = self._full_delay(failed_attempt, error)
        return delay * (1 - self.jitter * draw()) if self.jitter else delay

    def _full_delay(self, failed_attempt: int, error: BaseException) -> timedelta:
        longest = _MAX_DURATION if self.max_delay is None else self.max_delay
        if callable(self.delay):
            return min(parse_duration(self.delay(failed_attempt, error)), longest)
        factor = {"constant": 1, "linear": failed_attempt, "exponential": 1 << min(failed_attempt - 1, 62)}[
            self.backoff
        ]
        if self.delay and factor > longest / self.delay:  # compared before the multiplication, which may overflow
            return longest
        return self.delay * factor


_RETRY_FIELDS = [field.name for field in dataclasses.fields(Retries)]


def _select_given(config: object, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not UNSET}
