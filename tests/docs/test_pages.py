"""The README and the documentation are true: their code runs, and what is said to come out does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks, page_name

WITH_CODE = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture(scope="module")
def pages() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported everything and forks once for each page."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.docs.run_page", "--serve"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield server
        server.kill()


def run(pages: subprocess.Popen[str], page: Path, folder: Path) -> tuple[int, str, str]:
    """The exit code of a page, its output and its errors."""
    assert pages.stdin is not None
    assert pages.stdout is not None
    pages.stdin.write(f"{page}\t{folder}\n")
    pages.stdin.flush()
    code = int(pages.stdout.readline())
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def page_in_its_ring(page: Path) -> Any:
    """Mark a page that runs workflows once for each place where they can crash: it takes as long as twenty others."""
    is_slow = any("    assert_crash_safe(" in block.text for block in blocks(page, "python"))
    return pytest.param(page, marks=pytest.mark.slow) if is_slow else page


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", [page_in_its_ring(page) for page in WITH_CODE], ids=page_name)
def test_the_code_of_a_page_runs_and_gives_the_values_that_it_says(
    pages: subprocess.Popen[str], page: Path, tmp_path: Path
) -> None:
    exit_code, output, errors = run(pages, page, tmp_path)
    assert exit_code == 0, output + errors
    assert errors == ""
    code = blocks(page, "python")
    assert [line[4:] for line in output.splitlines() if line.startswith("ran ")] == [str(block) for block in code]
    assert f"checked {sum(block.text.count('# -> ') for block in code)} values\n" in output
