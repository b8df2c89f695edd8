"""CONTRIBUTING.md and the decisions name rooms and tests that exist, and CONTRIBUTING.md names every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
HEADING = "## I want to change ..."
NO_ROOMS = {"__init__.py", "py.typed", "__pycache__"}

# A path in code quotes that begins with a folder of the project; an anchor or a command is none.
PATH = re.compile(r"`((?:\.github|benchmarks|celery_durable|docs|examples|news|tests)/[\w./-]*)`")


def rows() -> list[tuple[str, list[str], list[str]]]:
    """The table: what one wants to change, the rooms, the tests."""
    _, _, rest = CONTRIBUTING.read_text(encoding="utf-8").partition(f"\n{HEADING}\n")
    section = rest.partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(what, re.findall(r"`([^`]+)`", rooms), re.findall(r"`([^`]+)`", tests)) for what, rooms, tests in cells]


@pytest.mark.parametrize("page", [CONTRIBUTING, *DECISIONS], ids=lambda page: page.name)
def test_the_paths_of_a_page_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_there_are_paths_to_check() -> None:
    assert len(PATH.findall(CONTRIBUTING.read_text(encoding="utf-8"))) > 60
    assert len([page for page in DECISIONS if PATH.search(page.read_text(encoding="utf-8"))]) >= 6


def test_each_row_has_a_room_and_a_test() -> None:
    assert len(rows()) > 20
    for what, rooms, tests in rows():
        assert rooms, what
        assert tests, what
        assert [path for path in tests if not path.startswith("tests/")] == [], what
        assert [path for path in [*rooms, *tests] if not (ROOT / path).exists()] == [], what


def test_each_test_is_collected() -> None:
    for _, _, tests in rows():
        for path in tests:
            found = [ROOT / path] if path.endswith(".py") else [*(ROOT / path).glob("test_*.py")]
            assert found, path
            assert all("\ndef test_" in each.read_text(encoding="utf-8") for each in found), path


def test_every_room_is_in_the_table() -> None:
    there = {path.name for path in (ROOT / "celery_durable").iterdir()} - NO_ROOMS
    named = {room.split("/")[1] for _, rooms, _ in rows() for room in rooms if room.startswith("celery_durable/")}
    assert named == there


def test_every_room_of_tests_is_in_the_table_or_the_text() -> None:
    rooms = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert {room for room in rooms if f"`tests/{room}" not in text} == set()
