"""Page cursors: whatever comes back is what was written, or refused."""

from __future__ import annotations

import base64
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.errors import CursorInvalid
from celery_durable.values import Cursors

MINE = Cursors("0c58f2f8", ("steps", "order", "o-1", False, ""))


@given(st.lists(st.integers(0, 2**63 - 1) | st.text(st.characters(codec="utf-8"), max_size=256), max_size=5))
def test_a_cursor_comes_back_as_it_was_written(parts: list[int | str]) -> None:
    cursor = MINE.write(*parts)
    assert MINE.read(cursor) == parts
    assert cursor == MINE.write(*parts)
    assert "=" not in cursor


def test_a_cursor_shows_nothing_of_what_it_holds() -> None:
    key = "charge card of eve"
    raw = [base64.urlsafe_b64decode(MINE.write(seq, key) + "==") for seq in (1, 2)]
    assert not any(key.encode()[start : start + 3] in each for each in raw for start in range(len(key) - 2))
    same = sum(a == b for a, b in zip(*raw, strict=True))
    assert same < len(raw[0]) / 4  # two positions have no text in common


@pytest.mark.parametrize(
    "other",
    [
        Cursors("0c58f2f9", MINE.of),
        *(
            dataclasses.replace(MINE, of=of)
            for of in (
                ("events", "order", "o-1", False, ""),
                ("steps", "orders", "o-1", False, ""),
                ("steps", "order", "o-2", False, ""),
                ("steps", "order", "o-1", True, ""),
                ("steps", "order", "o-1", False, "acme"),
                ("steps", "order", "o-1", False),
            )
        ),
    ],
    ids=str,
)
def test_what_another_list_has_written_is_refused(other: Cursors) -> None:
    with pytest.raises(CursorInvalid):
        MINE.read(other.write(1, "k"))


@pytest.mark.parametrize(
    "cursor", ["", "=", "W", "Ä", "\ud800", "a" * 5000, base64.urlsafe_b64encode(b"[" * 3000).decode(), "null", "W10 "]
)
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(CursorInvalid):
        MINE.read(cursor)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    with pytest.raises(CursorInvalid):
        MINE.read(text)


@given(st.data())
def test_a_cursor_that_was_changed_is_refused(data: st.DataObject) -> None:
    raw = bytearray(base64.urlsafe_b64decode(MINE.write(7, "ship it") + "=="))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CursorInvalid):
        MINE.read(base64.urlsafe_b64encode(raw).decode().rstrip("="))
