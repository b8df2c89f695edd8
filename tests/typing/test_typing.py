"""The author API is typed: promises are accepted, and mistakes reported where they are made, by both checkers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
IGNORES = re.compile(r"  # type: ignore.*")

Reports = dict[str, set[int]]
"""By file name, the lines at which something is reported."""


def run_mypy(files: list[Path]) -> Reports:
    command = [sys.executable, "-m", "mypy", "--strict", "--output=json", "--follow-imports=silent"]
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return by_file((item["file"], item["line"]) for item in found if item["severity"] == "error")


def run_pyright(files: list[Path]) -> Reports:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return by_file((item["file"], item["range"]["start"]["line"] + 1) for item in found if item["severity"] == "error")


def by_file(found) -> Reports:
    reports: Reports = {}
    for file, line in found:
        reports.setdefault(Path(file).name, set()).add(line)
    return reports


def planted() -> set[int]:
    lines = (HERE / "mistakes.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if IGNORES.search(line)}


# `make check` has pyright judge these files, too, and mypy only the examples.
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(run_mypy, id="mypy", marks=pytest.mark.gate),
        pytest.param(run_pyright, id="pyright", marks=pytest.mark.slow),
    ],
)
def test_promises_and_examples_are_accepted_and_each_planted_mistake_is_reported(
    check: Callable[[list[Path]], Reports], tmp_path: Path
) -> None:
    bare = tmp_path / "bare_mistakes.py"
    bare.write_text(IGNORES.sub("", (HERE / "mistakes.py").read_text()))
    reports = check([*EXAMPLES, HERE / "promises.py", HERE / "mistakes.py", bare])

    assert min(len(planted()), len(EXAMPLES)) > 3
    assert reports.pop("bare_mistakes.py") == planted(), "a mistake is reported on its line, and nothing else is"
    assert reports.pop("mistakes.py", set()) == set(), "a comment hides another kind of mistake, or none"
    assert reports.pop("promises.py", set()) == set(), "a promise is not accepted"
    assert reports == {}, "an example is not accepted"
