from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_durable.errors import DurationInvalid, InstantInvalid
from celery_durable.errors.base import format_limit
from celery_durable.model import duration_us, from_us, to_us
from celery_durable.values import parse_duration, to_utc

REMEDY = 'Write a timedelta, seconds as a number, or text such as "10 seconds", "1.5 h", "3 days".'
UNITS = {
    timedelta(milliseconds=1): ("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"),
    timedelta(seconds=1): ("s", "sec", "secs", "second", "seconds"),
    timedelta(minutes=1): ("m", "min", "mins", "minute", "minutes"),
    timedelta(hours=1): ("h", "hr", "hrs", "hour", "hours"),
    timedelta(days=1): ("d", "day", "days"),
    timedelta(weeks=1): ("w", "wk", "wks", "week", "weeks"),
}


@pytest.mark.parametrize(("length", "spellings"), UNITS.items())
def test_every_spelling_of_a_unit_is_read_in_every_case_and_spacing(
    length: timedelta, spellings: tuple[str, ...]
) -> None:
    cases = {each for unit in spellings for each in (unit, unit.upper(), unit.capitalize())}
    texts = [form.format(case) for case in cases for form in ("3{}", "3 {}", " 3  {} ", "+3 {}", "3\n{}")]
    assert {text: parse_duration(text) for text in texts} == dict.fromkeys(texts, 3 * length)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5 h", timedelta(minutes=90)),
        (".5 s", timedelta(milliseconds=500)),
        ("1h30m", timedelta(minutes=90)),
        ("1 hour, 2 minutes", timedelta(minutes=62)),
        ("1w 2d 3h 4m 5s 6ms", timedelta(weeks=1, days=2, hours=3, minutes=4, seconds=5, milliseconds=6)),
        ("0 s", timedelta(0)),
    ],
)
def test_fractions_and_several_units_are_read(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, timedelta(0)), (90, timedelta(seconds=90)), (0.25, timedelta(milliseconds=250)), (timedelta(3), timedelta(3))],
)
def test_a_bare_number_is_seconds_and_a_timedelta_is_itself(value: float | timedelta, expected: timedelta) -> None:
    assert parse_duration(value) == expected


NO_DURATIONS = (
    "", " ", "10", "1.5", "+5", "1e3", "1_000", "1e3 s", "10 fortnights", "10 s x", "s", "inf", "nan s", "1,5 h",
    "1.1.1 s", "... s", "5. s", "1:30", "01:30:00", "1h 2", "1h -5m", "5 m 1 h", "1h 1h", "|5 s", "+-5 s",
    "\N{ARABIC-INDIC DIGIT THREE} s", "10 \N{MICRO SIGN}s", "P1D", "1 hour and 2 minutes",
)  # fmt: skip


def test_text_that_is_not_numbers_with_known_units_is_refused() -> None:
    reason = "a unit is unknown, missing or out of order"
    for text in NO_DURATIONS:
        with pytest.raises(DurationInvalid) as refused:
            parse_duration(text)
        assert str(refused.value) == f"Duration {text!r} cannot be used: {reason}. {REMEDY}"


@pytest.mark.parametrize(
    "text", ["1 month", "3 MONTHS", "1mo", "2 mths", "1 y", "1y2d", "1 d 1 y", "5 years", "1.5yrs"]
)
def test_months_and_years_are_refused_because_their_length_is_a_guess(text: str) -> None:
    with pytest.raises(DurationInvalid) as refused:
        parse_duration(text)
    reason = "months and years have no fixed length; write days"
    assert str(refused.value) == f"Duration {text!r} cannot be used: {reason}. {REMEDY}"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (True, "bool is no duration"),
        (None, "NoneType is no duration"),
        (b"1 s", "bytes is no duration"),
        ([1], "list is no duration"),
        (float("nan"), "it is not a number"),
        (float("inf"), "it is too long"),
        (1e300, "it is too long"),
        (-1, "it is shorter than 0 s"),
        ("-5 s", "it is shorter than 0 s"),
        (timedelta(microseconds=-1), "it is shorter than 0 s"),
    ],
)
def test_what_is_no_length_of_time_is_refused_with_the_reason(value: object, reason: str) -> None:
    with pytest.raises(DurationInvalid) as refused:
        parse_duration(value)  # type: ignore[arg-type]  # what mypy would have caught
    assert str(refused.value) == f"Duration {value!r} cannot be used: {reason}. {REMEDY}"


def test_a_number_too_long_to_print_is_refused_like_any_other() -> None:
    with pytest.raises(DurationInvalid) as refused:
        parse_duration(10**5000)
    assert str(refused.value) == f"Duration <int> cannot be used: it is too long. {REMEDY}"


def test_a_range_includes_both_its_ends() -> None:
    bounds = {"minimum": timedelta(seconds=1), "maximum": timedelta(days=365)}
    assert parse_duration(1, **bounds) == timedelta(seconds=1)
    assert parse_duration("365 days", **bounds) == timedelta(days=365)
    with pytest.raises(DurationInvalid) as too_short:
        parse_duration("999 ms", **bounds)
    with pytest.raises(DurationInvalid) as too_long:
        parse_duration("366 days", **bounds)
    assert str(too_short.value) == f"Duration '999 ms' cannot be used: it is shorter than 1 s. {REMEDY}"
    assert str(too_long.value) == (f"Duration '366 days' cannot be used: it is longer than 365 d. {REMEDY}")


@given(st.text(alphabet="0123456789 .,:+-smhdwyoe\n", max_size=40) | st.text(max_size=40))
@example("1w" + " " * 40 + "!")
def test_any_text_is_either_a_duration_or_refused_by_name(text: str) -> None:
    try:
        assert parse_duration(text) >= timedelta(0)
    except DurationInvalid as refused:
        assert refused.value == text


@given(
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from(range(len(UNITS)))), min_size=1, unique_by=lambda p: p[1]),
    st.data(),
)
def test_a_text_means_the_sum_of_its_parts(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    lengths = list(UNITS)
    words, total = [], timedelta(0)
    for count, place in sorted(parts, key=lambda part: -part[1]):
        unit = data.draw(st.sampled_from(UNITS[lengths[place]]))
        words.append(f"{count}{data.draw(st.sampled_from(['', ' ']))}{unit}")
        total += count * lengths[place]
    assert parse_duration(data.draw(st.sampled_from([" ", ", "])).join(words)) == total


# --- instants -----------------------------------------------------------------------------------


@given(st.datetimes(min_value=datetime(2, 1, 1), max_value=datetime(9998, 12, 31), timezones=st.timezones()))
def test_an_instant_with_a_zone_becomes_the_same_instant_in_utc(instant: datetime) -> None:
    found = to_utc(instant, "run_at")
    assert (found, found.tzinfo) == (instant.astimezone(UTC), UTC)


def test_an_hour_that_occurs_twice_keeps_its_fold() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    first, second = (to_utc(datetime(2030, 10, 27, 2, 30, tzinfo=berlin, fold=fold), "run_at") for fold in (0, 1))
    assert second - first == timedelta(hours=1)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2030, 1, 1),
        datetime(2030, 1, 1).date(),
        "2030-01-01T00:00:00Z",
        1893456000,
        None,
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),
    ],
)
def test_what_is_no_instant_or_has_no_zone_is_refused(value: object) -> None:
    with pytest.raises(InstantInvalid) as refused:
        to_utc(value, "run_at")
    shown = repr(value)
    assert str(refused.value) == (
        f"run_at={shown if len(shown) <= 120 else shown[:117] + '...'} cannot be used: write a datetime of the years "
        "1 to 9999 with a time zone, such as datetime(2030, 1, 31, 8, 0, tzinfo=UTC)."
    )


@given(st.datetimes(timezones=st.just(UTC)))
def test_an_instant_is_stored_to_the_microsecond(instant: datetime) -> None:
    assert from_us(to_us(instant)) == instant


@given(st.timedeltas())
def test_a_length_of_time_is_stored_to_the_microsecond(span: timedelta) -> None:
    assert timedelta(microseconds=duration_us(span)) == span


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(0), "0 s"),
        (timedelta(microseconds=700), "0.7 ms"),
        (timedelta(seconds=1.25), "1.25 s"),
        (timedelta(seconds=3630), "1 h 30 s"),
        (timedelta(days=365), "365 d"),
    ],
)
def test_limits_are_written_exactly(length: timedelta, text: str) -> None:
    assert format_limit(length) == text


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=36_500)))
def test_limits_can_be_given_as_they_are_written(length: timedelta) -> None:
    assert parse_duration(format_limit(length)) == length
