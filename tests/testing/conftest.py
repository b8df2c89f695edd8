"""Harnesses for the tests of the harness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OPTIONS = ("-p", "no:cacheprovider", "--strict-markers", "-W", "error")
WORKFLOW = """
import pytest
from celery_durable import durable_workflow

@durable_workflow(name="plugged")
def plugged(event, step):
    step.sleep("nap", "3 days")
    return step.do("charge", lambda: "paid")
"""


@pytest.fixture(scope="session")
def sessions() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what sessions import, and forks once for each session."""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.testing.sessions"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield server
        server.kill()


@pytest.fixture
def run_tests(tmp_path: Path, sessions: subprocess.Popen[str]):
    def run(text: str, *args: str, conftest: str = "") -> str:
        write_project(tmp_path, text, conftest)
        assert sessions.stdin is not None
        assert sessions.stdout is not None
        output = tmp_path / "output"
        words = ["-p", "celery_durable.testing.plugin", *OPTIONS, *args]
        sessions.stdin.write(json.dumps([words, str(tmp_path), str(output)]) + "\n")
        sessions.stdin.flush()
        assert int(sessions.stdout.readline()) in {0, 1, 5}  # pytest has run tests, or found none
        return output.read_text()

    return run


@pytest.fixture
def run_tests_in_new_interpreter(tmp_path: Path):
    def run(text: str, *args: str, conftest: str = "") -> str:
        """Every installed plugin is imported, as in the projects of users. It takes more time than most tests."""
        write_project(tmp_path, text, conftest)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *args],
            cwd=tmp_path,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout + done.stderr

    return run


def write_project(folder: Path, text: str, conftest: str) -> None:
    (folder / "test_shop.py").write_text(WORKFLOW + text)
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\n")
