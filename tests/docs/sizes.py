"""Checks that no file and no function becomes too long to read: `make check` runs it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST_FILE = 600
LONGEST_FUNCTION = 60
FOLDERS = ["celery_durable", "tests", "benchmarks", "examples"]
PACKAGE = "celery_durable/"
"""Where functions are measured: a test that tells a long story may be long."""
TABLES = ("celery_durable/store/migrations/versions/", "celery_durable/store/schema/tables.py: build_tables")


def measure(name: str, text: str) -> Iterator[tuple[str, int, int]]:
    """A file and its functions: what it is, its lines, the limit."""
    yield name, len(text.splitlines()), LONGEST_FILE
    if not name.startswith(PACKAGE):
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


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "--", *FOLDERS], capture_output=True, encoding="utf-8", check=True)
    paths = [Path(name) for name in listed.stdout.splitlines() if name.endswith(".py")]
    too_long = [
        f"{what} has {lines} lines, more than {limit}: split it by subject"
        for path in paths
        if path.is_file()
        for what, lines, limit in measure(path.as_posix(), path.read_text(encoding="utf-8"))
        if lines > limit and not what.startswith(TABLES)
    ]
    print(*too_long, sep="\n", end="\n" if too_long else "")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
