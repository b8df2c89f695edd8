"""Page cursors: whatever comes back is what was written, or refused."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.errors import CursorInvalid
from celery_durable.values import read_cursor, write_cursor


def test_a_cursor_comes_back_as_it_was_written() -> None:
    cursor = write_cursor("steps", 3, "größe/\N{GRINNING FACE}")
    assert read_cursor(cursor, "steps", int, str) == [3, "größe/\N{GRINNING FACE}"]
    assert "=" not in cursor


@pytest.mark.parametrize(
    "content",
    [
        ["steps"],
        ["steps", 1, "k", 2],
        ["events", 1, "k"],
        ["steps", "1", "k"],
        ["steps", True, "k"],
        ["steps", 1.0, "k"],
        ["steps", -1, "k"],
        ["steps", 2**63, "k"],
        ["steps", 10**400, "k"],
        ["steps", 1, 5],
        ["steps", 1, None],
        ["steps", 1, "\x00"],
        {"steps": 1},
        5,
        None,
    ],
    ids=str,
)
def test_what_another_list_would_have_written_is_refused(content: object) -> None:
    cursor = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    with pytest.raises(CursorInvalid):
        read_cursor(cursor, "steps", int, str)


@pytest.mark.parametrize(
    "cursor", ["", "=", "W", "Ä", "\ud800", "a" * 5000, base64.urlsafe_b64encode(b"[" * 3000).decode(), "null", "W10 "]
)
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(CursorInvalid):
        read_cursor(cursor, "steps", int, str)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    with pytest.raises(CursorInvalid):
        read_cursor(text, "steps", int, str)
