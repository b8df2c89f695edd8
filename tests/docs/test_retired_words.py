"""Retired words are found in every form that code gives them, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.retired_words import RETIRED, find


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("from celery_durable import teller", "teller"),
        ("Tellers speak", "Tellers"),
        ("the_farewell_of = 1", "farewell"),
        ("class FarewellOf:", "Farewell"),
        ("begin_roll_calls()", "roll_calls"),
        ("a roll call", "roll call"),
        ("a row of ours", "of ours"),
        ("nobody_looks_after()", "looks_after"),
        ("the run is handed on", "handed on"),
    ],
)
def test_a_retired_word_is_found_in_prose_and_in_names(text: str, word: str) -> None:
    assert [found for _, found, _ in find(text)] == [word]


@pytest.mark.parametrize(
    "text", ["a storyteller", "farewelled", "the passages", "RUN_ID", "notify", "recall", "hours", "amended"]
)
def test_another_word_is_not(text: str) -> None:
    found = [word for _, word, _ in find(text)]
    assert found == (["passages"] if "passages" in text else [])


def test_the_line_and_the_replacement_are_told() -> None:
    assert list(find("one\ntwo lineage")) == [(2, "lineage", "ancestry")]


def test_the_check_fails_and_names_the_file(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "page.md").write_text("The teller.\n", encoding="utf-8")
    (tmp_path / "binary.png").write_bytes(b"teller")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    root = Path(__file__).parents[2]
    program = "import sys; sys.path.insert(0, sys.argv[1]); from tests.docs.retired_words import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stdout) == (1, "page.md:1: 'teller' is retired: write 'notify'\n")


def test_no_replacement_is_retired_itself() -> None:
    assert [word for replacement in RETIRED.values() for _, word, _ in find(replacement)] == []
