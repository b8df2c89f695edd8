"""Checks that no file and no function becomes too long to read: `make check` runs it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
FILES = ("celery_durable/", "tests/", "benchmarks/", "examples/")
FUNCTIONS = ("celery_durable/",)
"""Where functions are measured: a test that tells a long story may be long."""
TABLE_DEFINITIONS = ("celery_durable/store/migrations/versions/", "celery_durable/store/schema.py: build_tables")
LONGER: Mapping[str, int] = {}
"""What is longer, and how long it may be until it is split. Do not add to it, and lower its numbers."""


def measure(name: str, text: str) -> Iterator[tuple[str, int, int]]:
    """A file and its functions: what it is, its lines, the limit."""
    yield name, len(text.splitlines()), LONGEST_FILE
    if not name.startswith(FUNCTIONS):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{name}: {node.name}", count_lines(node), LONGEST_FUNCTION


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function from its `def`, without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return lines - (docstring.end_lineno - docstring.lineno + 1)


def complain(files: Mapping[str, str], longer: Mapping[str, int] = LONGER) -> Iterator[str]:
    """What is too long in these files, given the text of each."""
    for name, text in files.items():
        for what, lines, limit in measure(name, text):
            allowed = max(limit, longer.get(what, 0))
            if lines > allowed and not what.startswith(TABLE_DEFINITIONS):
                yield f"{what} has {lines} lines, more than {allowed}: split it by subject"


def find_short(files: Mapping[str, str], longer: Mapping[str, int] = LONGER) -> Iterator[str]:
    """What is allowed to be longer and no longer needs it."""
    too_long = {what for name, text in files.items() for what, lines, limit in measure(name, text) if lines > limit}
    for what in longer:
        if what not in too_long and what.partition(":")[0] in files:
            yield f"{what} is short enough now: remove it from LONGER in tests/docs/sizes.py"


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, encoding="utf-8", check=True).stdout
    paths = [Path(name) for name in listed.splitlines() if name.startswith(FILES)]
    files = {path.as_posix(): path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    complaints = list(complain(files))
    for line in [*complaints, *find_short(files)]:
        print(line)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
