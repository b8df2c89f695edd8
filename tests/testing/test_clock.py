"""The clock moves when it is told to, and only forward."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from celery_durable.errors import DurationInvalid, InstantInvalid
from celery_durable.testing import START, Clock, HarnessMisuse


@pytest.mark.parametrize("span", ["3 days", timedelta(days=3), 3 * 86400])
def test_a_clock_moves_on_by_a_duration(span) -> None:
    clock = Clock()
    clock.advance(span)
    assert clock.now == START + timedelta(days=3)
    assert clock.now.tzinfo is UTC


def test_a_clock_moves_on_to_an_instant() -> None:
    clock = Clock(datetime(2026, 5, 1, tzinfo=UTC))
    clock.set_to(datetime(2026, 5, 2, tzinfo=UTC))
    assert repr(clock) == "<Clock 2026-05-02 00:00:00.000000 UTC>"


def test_time_does_not_run_back() -> None:
    clock = Clock()
    with pytest.raises(HarnessMisuse) as caught:
        clock.set_to(START - timedelta(seconds=1))
    assert str(caught.value) == (
        "The clock shows 2030-01-01 00:00:00+00:00, and time does not run back to 2029-12-31 23:59:59+00:00."
    )
    with pytest.raises(DurationInvalid):
        clock.advance(-1)
    with pytest.raises(InstantInvalid):
        clock.set_to(datetime(2031, 1, 1))
    assert clock.now == START


def test_what_is_to_be_called_later_is_called_at_its_time_and_in_order() -> None:
    clock, seen = Clock(), []
    clock.call_after(timedelta(seconds=20), lambda: seen.append(("late", clock.now)))
    clock.call_after(timedelta(seconds=10), lambda: seen.append(("early", clock.now)))
    clock.advance(9)
    assert seen == []
    clock.advance(11)
    assert seen == [("early", START + timedelta(seconds=10)), ("late", START + timedelta(seconds=20))]
    assert clock.now == START + timedelta(seconds=20)
