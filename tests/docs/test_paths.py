"""CONTRIBUTING.md and the decisions name files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))

# A path in code quotes that begins with a folder of the project; an anchor or a command is none.
PATH = re.compile(r"`((?:\.github|benchmarks|celery_durable|docs|examples|news|tests)/[\w./-]*)`")


@pytest.mark.parametrize("page", [CONTRIBUTING, *DECISIONS], ids=lambda page: page.name)
def test_the_paths_of_a_page_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []
