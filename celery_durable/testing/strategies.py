"""Strategies for hypothesis: values, names and durations that workflows accept, and schedules of faults.

    @given(params=strategies.json_values())
    def test_an_order_is_crash_safe(params): ...

This module needs hypothesis, which no extra of this package installs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, get_args

from hypothesis import strategies as st

from celery_durable.testing.crash_runs import CrashSchedule, Deliveries

__all__ = [
    "crash_schedules",
    "durations",
    "event_types",
    "instance_ids",
    "json_values",
    "step_names",
    "topics",
]

_LARGEST_EXACT_INTEGER = 2**53
_YEAR = timedelta(days=365)


def json_values(*, max_leaves: int = 10) -> st.SearchStrategy[Any]:
    """Values that parameters, results and payloads may have, and that come back unchanged.

    Args:
        max_leaves: The largest number of numbers, texts and the like in one value.
    """
    numbers = st.integers(-_LARGEST_EXACT_INTEGER, _LARGEST_EXACT_INTEGER) | st.floats(
        allow_nan=False, allow_infinity=False
    )
    leaves = st.none() | st.booleans() | numbers | _text()
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.dictionaries(_text(max_size=20), inner), max_leaves=max_leaves
    )


def step_names() -> st.SearchStrategy[str]:
    """Names of steps: text without control characters."""
    return st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=256)


def instance_ids() -> st.SearchStrategy[str]:
    """Ids of instances, of up to 100 characters."""
    return st.from_regex(r"[a-zA-Z0-9_][a-zA-Z0-9_-]{0,99}", fullmatch=True)


def event_types() -> st.SearchStrategy[str]:
    """Types of events."""
    return st.from_regex(r"[a-zA-Z0-9_][a-zA-Z0-9_-]{0,99}", fullmatch=True)


def topics() -> st.SearchStrategy[str]:
    """Topics of emissions."""
    return st.from_regex(r"[a-zA-Z0-9_][a-zA-Z0-9_.:/-]{0,99}", fullmatch=True)


def durations(*, minimum: timedelta = timedelta(seconds=1), maximum: timedelta = _YEAR) -> st.SearchStrategy[timedelta]:
    """Durations of sleeps and timeouts, in whole seconds.

    Args:
        minimum: The shortest. A wait takes a second at least.
        maximum: The longest. ``durable_max_sleep_seconds`` is a year by default.
    """
    seconds = st.integers(int(minimum.total_seconds()), int(maximum.total_seconds()))
    return seconds.map(lambda each: timedelta(seconds=each))


def crash_schedules(checkpoints: int, *, max_crashes: int = 3) -> st.SearchStrategy[CrashSchedule]:
    """Schedules of faults, for ``replay`` of `assert_crash_safe`. They shrink to few and early faults.

    Runners die, and messages come twice, at once or never. No runner freezes.

    Args:
        checkpoints: The number of places where a runner can die, from the `CrashReport` of the workflow.
        max_crashes: The largest number of runners that die one after the other.
    """
    places = st.integers(0, max(checkpoints - 1, 0))
    return st.builds(
        CrashSchedule,
        crashes=st.lists(places, max_size=max_crashes).map(tuple),
        deliveries=st.sampled_from(get_args(Deliveries)),
        seed=st.integers(0, 2**16),
    )


def _text(*, max_size: int = 100) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=max_size)
