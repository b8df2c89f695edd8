"""The pictures of the documentation are drawn from their sources, and pages show them."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from tests.docs.blocks import PAGES
from tests.docs.pictures import FOLDER, draw, find_bars, read_events

SOURCES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_picture_is_what_its_source_draws(source) -> None:
    """``make pictures`` draws it."""
    drawn = draw(source)
    assert source.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    ET.fromstring(drawn)


def test_every_picture_has_a_source_and_a_page_that_describes_it() -> None:
    shown = {
        (page.parent / target).resolve(): words
        for page in PAGES
        for words, target in re.findall(r"!\[(.*?)\]\((\S+?\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert set(FOLDER.glob("*.svg")) == {source.with_suffix(".svg") for source in SOURCES}
    assert set(shown) == {source.with_suffix(".svg") for source in SOURCES}
    assert all(len(words) > 30 for words in shown.values())


def test_the_timeline_of_the_demo_shows_the_killed_attempt_and_its_repetition() -> None:
    bars = find_bars(read_events((FOLDER / "demo.txt").read_text(encoding="utf-8")))
    first, second = (bar for bar in bars if bar.row == "charge card")
    killed, other = (bar for bar in bars if bar.row.startswith("worker"))
    assert first.end == killed.end <= other.begin <= second.begin
    assert [bar.row for bar in bars][2:] == [
        "record order", "charge card", "charge card", "ask for approval", "wait for approval", "mark shipped",
        "tell customer",
    ]  # fmt: skip
