"""The README and the documentation are true: their code runs, and what is said to come out does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_gives_the_values_that_it_says(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.docs.run_page", str(page), str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    code = blocks(page, "python")
    assert [line[4:] for line in done.stdout.splitlines() if line.startswith("ran ")] == [str(block) for block in code]
    assert f"checked {sum(block.text.count('# -> ') for block in code)} values\n" in done.stdout


def test_there_is_code_to_run() -> None:
    assert {page.name for page in PAGES if blocks(page, "python")} >= {
        "README.md", "quickstart.md", "concepts.md", "testing.md", "operations.md",
    }  # fmt: skip
