"""Times, lengths of time and text, for people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from celery_durable.cli.output.console import strip_control_characters
from celery_durable.insight.explain.summaries import Times, iso
from celery_durable.model import format_duration

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_lengths_of_time_have_at_most_two_units() -> None:
    for seconds, text in (
        (-3, "0 ms"), (0, "0 ms"), (0.0123, "12 ms"), (1, "1.0 s"), (9.96, "10.0 s"), (10, "10 s"), (59.4, "59 s"),
        (59.6, "1 min"), (200, "3 min 20 s"), (3600, "1 h"), (3605, "1 h"), (84_000, "23 h 20 min"),
        (86_400 * 3 + 4 * 3600 + 59, "3 d 4 h"), (86_400 * 365, "365 d"),
    ):  # fmt: skip
        assert format_duration(timedelta(seconds=seconds)) == text


def test_instants_are_relative_for_people_and_exact_for_programs() -> None:
    people, programs = Times(NOW, exact=False), Times(NOW, exact=True)
    soon, past = NOW + timedelta(hours=23, minutes=20), NOW - timedelta(minutes=40, seconds=5)
    assert [people.format(instant) for instant in (soon, past, NOW, None)] == [
        "in 23 h 20 min",
        "40 min ago",
        "now",
        "",
    ]
    assert programs.format(past) == "2029-12-31T23:19:55.000Z"
    assert (people.format_in_sentence(soon), programs.format_in_sentence(soon)) == (
        "in 23 h 20 min",
        "at 2030-01-01T23:20:00.000Z",
    )
    assert iso(NOW.astimezone()) == "2030-01-01T00:00:00.000Z"


@given(st.text())
def test_control_characters_are_removed_from_a_text(text: str) -> None:
    shown = strip_control_characters(text)
    assert strip_control_characters(shown) == shown
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 or char in "\u2028\u2029\u202e\u2066" for char in shown)


def test_escape_sequences_go_as_a_whole_and_lines_become_one() -> None:
    assert (
        strip_control_characters("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07\tand\r\nmore\x1b")
        == "red link and more"
    )
