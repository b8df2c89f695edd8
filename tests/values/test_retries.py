from __future__ import annotations

import copy
import functools
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable import LinearStep
from celery_durable.errors import AsyncNotSupported, ConfigInvalid, DurationInvalid
from celery_durable.values import UNSET, Retries, StepConfig, StepPolicy

DEFAULTS = StepPolicy()
YEAR = timedelta(days=365)
ERROR = ValueError("no")


def delay_after(policy: StepPolicy, attempt: int, *, drawn: float = 0.0) -> timedelta:
    return policy.delay_after(attempt, ERROR, draw=lambda: drawn)


def seconds(policy: StepPolicy, attempts: int) -> list[float]:
    return [delay_after(policy, attempt).total_seconds() for attempt in range(1, attempts + 1)]


def test_the_default_is_five_retries_from_ten_seconds_doubling_and_ten_minutes_per_attempt() -> None:
    assert DEFAULTS.max_attempts == 6
    assert DEFAULTS.timeout == timedelta(minutes=10)
    assert DEFAULTS.repeat is False
    assert seconds(DEFAULTS, 5) == [10, 20, 40, 80, 160]


def test_linear_and_constant_delays() -> None:
    assert seconds(DEFAULTS.override_with(StepConfig(Retries(backoff="linear"))), 4) == [10, 20, 30, 40]
    assert seconds(DEFAULTS.override_with(StepConfig(Retries(backoff="constant"))), 4) == [10, 10, 10, 10]


def test_no_delay_grows_beyond_its_cap() -> None:
    assert seconds(DEFAULTS.override_with(StepConfig(Retries(max_delay="45 s"))), 5) == [10, 20, 40, 45, 45]
    assert seconds(DEFAULTS.override_with(StepConfig(Retries(delay="1 h", max_delay="45 s"))), 2) == [45, 45]


def test_a_partial_config_is_laid_over_what_lies_below() -> None:
    workflow = DEFAULTS.override_with(StepConfig(Retries(limit=2, delay="1 s"), timeout="1 min"))
    step = workflow.override_with(StepConfig(Retries(backoff="linear")))
    assert step == StepPolicy(3, timedelta(seconds=1), "linear", None, 0.0, timedelta(minutes=1), repeat=False)
    assert workflow.override_with(None) is workflow
    assert workflow.override_with(StepConfig()) is workflow
    assert workflow.override_with(StepConfig(Retries())) == workflow


def test_none_takes_away_a_limit_that_lies_below() -> None:
    below = DEFAULTS.override_with(StepConfig(Retries(max_delay="1 min")))
    policy = below.override_with(StepConfig(Retries(limit=None, max_delay=None), timeout=None))
    assert (policy.max_attempts, policy.max_delay, policy.timeout) == (None, None, None)


@pytest.mark.parametrize("endless", [None, float("inf"), Retries(limit=None), Retries(limit=float("inf"))])  # type: ignore[arg-type]  # inf is read, not advertised
def test_without_end_is_none_or_infinity(endless: Any) -> None:
    assert DEFAULTS.override_with(StepConfig(retries=endless)).max_attempts is None


@pytest.mark.parametrize(("limit", "attempts"), [(0, 1), (1, 2), (7, 8)])
def test_a_number_is_the_limit_of_retries_after_the_first_attempt(limit: int, attempts: int) -> None:
    assert StepConfig(retries=limit) == StepConfig(retries=Retries(limit=limit))
    assert DEFAULTS.override_with(StepConfig(retries=limit)).max_attempts == attempts


def test_durations_are_read_once() -> None:
    config = StepConfig(Retries(delay="1.5 s", max_delay=90), timeout="1 min")
    assert isinstance(config.retries, Retries)
    assert config.retries.delay == timedelta(seconds=1.5)
    assert config.retries.max_delay == timedelta(seconds=90)
    assert config.timeout == timedelta(minutes=1)


@pytest.mark.parametrize("limit", [-1, 1.5, "3", True, float("nan"), 2**31 - 1])
def test_a_limit_that_is_no_count_or_does_not_fit_its_column_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Retries(limit=limit)
    assert str(refused.value) == (
        f"Setting Retries.limit={limit!r} cannot be used: use a whole number from 0, or None for without end"
    )


def test_an_unknown_backoff_is_refused() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Retries(backoff="quadratic")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "Setting Retries.backoff='quadratic' cannot be used: use one of constant, linear, exponential"
    )


@pytest.mark.parametrize("jitter", [-0.1, 1.1, True, "0.5", float("nan")])
def test_a_jitter_that_is_no_fraction_is_refused(jitter: Any) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Retries(jitter=jitter)
    assert str(refused.value) == f"Setting Retries.jitter={jitter!r} cannot be used: use a number from 0 to 1"


def test_a_backoff_beside_a_function_is_refused() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Retries(delay=lambda attempt, error: attempt, backoff="linear")
    assert str(refused.value) == (
        "Setting Retries.backoff='linear' cannot be used: leave it out, since delay= is a function"
    )


def test_jitter_takes_up_to_its_fraction_off_each_delay_also_off_the_longest() -> None:
    policy = DEFAULTS.override_with(StepConfig(Retries(max_delay="15 s", jitter=0.25)))
    for drawn, expected in ((0.0, [10, 15]), (0.5, [8.75, 13.125]), (1.0, [7.5, 11.25])):
        assert [delay_after(policy, n, drawn=drawn).total_seconds() for n in (1, 2)] == expected


def test_without_jitter_no_random_number_is_drawn() -> None:
    def draw() -> float:
        raise AssertionError("drawn")

    assert DEFAULTS.delay_after(2, ERROR, draw=draw) == timedelta(seconds=20)


def test_a_function_gives_the_delay_which_does_not_grow_but_is_capped() -> None:
    class RateLimited(Exception):
        def __init__(self, retry_after: str) -> None:
            self.retry_after = retry_after

    policy = DEFAULTS.override_with(StepConfig(Retries(delay=lambda n, error: error.retry_after, max_delay="1 min")))  # type: ignore[attr-defined]
    delays = [policy.delay_after(n, RateLimited(f"{n * 20} s"), draw=lambda: 0.5) for n in (1, 2, 3, 4)]
    assert [each.total_seconds() for each in delays] == [20, 40, 60, 60]
    halved = policy.override_with(StepConfig(Retries(jitter=1)))
    assert halved.delay_after(1, RateLimited("20 s"), draw=lambda: 0.5).total_seconds() == 10


@pytest.mark.parametrize("given", [-1, "soon", None, True])
def test_a_function_that_returns_no_duration_raises(given: Any) -> None:
    policy = DEFAULTS.override_with(StepConfig(Retries(delay=lambda attempt, error: given)))
    with pytest.raises(DurationInvalid):
        delay_after(policy, 1)


async def wait(attempt: int, error: BaseException) -> int:
    return 1


@pytest.mark.parametrize("make", [Retries, functools.partial(LinearStep, "PAY")])
def test_an_async_function_for_the_delay_is_refused_where_it_is_declared(make: Any) -> None:
    with pytest.raises(AsyncNotSupported) as refused:
        make(delay=wait)
    assert str(refused.value).startswith("The function delay= 'wait' is an async function")


def test_repeat_is_yes_or_no() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        StepConfig(repeat=3)  # type: ignore[arg-type]
    assert str(refused.value) == "Setting StepConfig.repeat=3 cannot be used: use True or False"


def test_an_unknown_way_to_take_a_cancel_is_refused() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        StepConfig(on_cancel="stop")  # type: ignore[arg-type]
    assert str(refused.value) == 'Setting StepConfig.on_cancel=\'stop\' cannot be used: use "wait" or "abandon"'


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retries(delay="-1 s"),
        lambda: Retries(delay="366 days"),
        lambda: Retries(max_delay="366 days"),
        lambda: StepConfig(timeout=0),
        lambda: StepConfig(timeout="366 days"),
        lambda: StepConfig(timeout="soon"),
    ],
)
def test_a_duration_out_of_range_is_refused(make: Any) -> None:
    with pytest.raises(DurationInvalid):
        make()


def test_a_copied_config_still_leaves_out_what_it_left_out() -> None:
    config = StepConfig(Retries(limit=2))
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.timeout is UNSET
        assert DEFAULTS.override_with(twin) == DEFAULTS.override_with(config)
    assert repr(Retries()) == "Retries(limit=UNSET, delay=UNSET, backoff=UNSET, max_delay=UNSET, jitter=UNSET)"


spans = st.timedeltas(min_value=timedelta(0), max_value=YEAR)


@given(
    delay=spans,
    backoff=st.sampled_from(["constant", "linear", "exponential"]),
    max_delay=st.none() | spans,
    attempt=st.integers(1, 2**31) | st.integers(10**20, 10**400),
)
def test_a_delay_never_overflows_shrinks_or_exceeds_its_cap(
    delay: timedelta, backoff: Any, max_delay: timedelta | None, attempt: int
) -> None:
    policy = DEFAULTS.override_with(StepConfig(Retries(delay=delay, backoff=backoff, max_delay=max_delay)))
    longest = YEAR if max_delay is None else max_delay
    now, later = delay_after(policy, attempt), delay_after(policy, attempt + 1)
    assert min(delay, longest) <= now <= later <= longest


@given(delay=st.timedeltas(timedelta(0), timedelta(days=1)), attempt=st.integers(1, 12))
def test_a_delay_is_exact_as_long_as_it_is_not_capped(delay: timedelta, attempt: int) -> None:
    factors = {"constant": 1, "linear": attempt, "exponential": 2 ** (attempt - 1)}
    for backoff, factor in factors.items():
        policy = DEFAULTS.override_with(StepConfig(Retries(delay=delay, backoff=backoff)))  # type: ignore[arg-type]
        assert delay_after(policy, attempt) == min(delay * factor, YEAR)


configs = st.builds(
    StepConfig,
    retries=st.just(UNSET)
    | st.builds(
        Retries,
        limit=st.just(UNSET) | st.none() | st.integers(0, 9),
        delay=st.just(UNSET) | spans,
        backoff=st.just(UNSET) | st.sampled_from(["constant", "linear", "exponential"]),
        max_delay=st.just(UNSET) | st.none() | spans,
        jitter=st.just(UNSET) | st.floats(0, 1),
    ),
    timeout=st.just(UNSET) | st.none() | st.timedeltas(timedelta(seconds=1), YEAR),
    repeat=st.just(UNSET) | st.booleans(),
)


@given(st.lists(configs, max_size=4))
def test_each_field_comes_from_the_topmost_config_that_gives_it(layers: list[StepConfig]) -> None:
    policy = DEFAULTS
    for config in layers:
        policy = policy.override_with(config)
    for name in ("limit", "delay", "backoff", "max_delay", "jitter", "timeout", "repeat"):
        said = [
            getattr(holder, name)
            for config in layers
            if (holder := config if name in ("timeout", "repeat") else config.retries) is not UNSET
            and getattr(holder, name) is not UNSET
        ]
        assert value_of(policy, name) == ([value_of(DEFAULTS, name), *said][-1])


def value_of(policy: StepPolicy, name: str) -> Any:
    if name != "limit":
        return getattr(policy, name)
    return None if policy.max_attempts is None else policy.max_attempts - 1
