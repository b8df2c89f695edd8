"""Long files and long functions are found, and docstrings and tables do not count."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.sizes import LONGEST_FILE, LONGEST_FUNCTION, complain, count_lines, find_short, measure


def lines(count: int) -> str:
    return "x = 1\n" * count


def function(count: int, *, docstring: int = 0) -> str:
    body = ['    """First.', *["    more"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join(["def f():", *body, *["    pass"] * (count - 1)]) + "\n"


@pytest.mark.parametrize("folder", ["celery_durable", "tests/engine", "benchmarks", "examples"])
def test_a_file_over_the_limit_is_named(folder: str) -> None:
    files = {f"{folder}/fits.py": lines(LONGEST_FILE), f"{folder}/long.py": lines(LONGEST_FILE + 1)}
    assert list(complain(files)) == [f"{folder}/long.py has 401 lines, more than 400: split it by subject"]


def test_a_function_over_the_limit_is_named() -> None:
    files = {
        "celery_durable/fits.py": function(LONGEST_FUNCTION, docstring=30),
        "celery_durable/long.py": function(LONGEST_FUNCTION + 1),
        "tests/test_long.py": function(LONGEST_FUNCTION + 1),
    }
    assert list(complain(files)) == ["celery_durable/long.py: f has 61 lines, more than 60: split it by subject"]


def test_definitions_of_tables_may_be_long() -> None:
    assert list(complain({"celery_durable/store/migrations/versions/0001_first.py": function(300)})) == []
    assert list(complain({"celery_durable/store/schema.py": function(300).replace(" f", " build_tables", 1)})) == []


def test_decorators_and_docstrings_are_not_counted() -> None:
    [node] = ast.parse(f"@decorator(\n    1,\n)\n{function(5, docstring=3)}").body
    assert isinstance(node, ast.FunctionDef)
    assert count_lines(node) == 5


def test_methods_and_inner_functions_are_measured() -> None:
    text = "class C:\n    async def m(self):\n        def inner():\n            pass\n"
    assert [each[:2] for each in measure("celery_durable/c.py", text)] == [
        ("celery_durable/c.py", 4),
        ("celery_durable/c.py: m", 3),
        ("celery_durable/c.py: inner", 2),
    ]


def test_what_is_longer_may_not_grow() -> None:
    longer = {"tests/long.py": 500}
    assert list(complain({"tests/long.py": lines(500)}, longer)) == []
    assert list(complain({"tests/long.py": lines(501)}, longer)) == [
        "tests/long.py has 501 lines, more than 500: split it by subject"
    ]


def test_what_has_become_short_is_to_be_taken_off_the_list() -> None:
    longer = {"tests/long.py": 500, "tests/short.py": 500, "tests/gone.py": 500}
    assert list(find_short({"tests/long.py": lines(401), "tests/short.py": lines(400)}, longer)) == [
        "tests/short.py is short enough now: remove it from LONGER in tests/docs/sizes.py"
    ]


def test_the_check_fails_for_a_long_file_of_the_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "long.py").write_text(lines(401), encoding="utf-8")
    (tmp_path / "tests" / "unknown.py").write_text(lines(401), encoding="utf-8")
    subprocess.run(["git", "add", "tests/long.py"], cwd=tmp_path, check=True)
    program = "import sys; sys.path.insert(0, sys.argv[1]); from tests.docs.sizes import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "tests/long.py has 401 lines, more than 400: split it by subject\n",
        "",
    )
