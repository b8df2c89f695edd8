"""Harnesses for the tests of the harness."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_durable.testing import DurableHarness


@pytest.fixture
def make_harness() -> Iterator[Callable[..., DurableHarness]]:
    made: list[DurableHarness] = []

    def make(*workflows: Any, **options: Any) -> DurableHarness:
        made.append(DurableHarness(workflows, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


OPTIONS = ("-p", "no:cacheprovider", "--strict-markers", "-W", "error")
WORKFLOW = """
import pytest
from celery_durable import durable_workflow

@durable_workflow(name="plugged")
def plugged(event, step):
    step.sleep("nap", "3 days")
    return step.do("charge", lambda: "paid")
"""


@pytest.fixture
def run_tests(tmp_path: Path):
    def run(text: str, *args: str, conftest: str = "", finds_plugins: bool = False) -> str:
        """Only with ``finds_plugins`` every installed plugin is imported, which takes more time than most tests."""
        alone = {} if finds_plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        named = [] if finds_plugins else ["-p", "celery_durable.testing.plugin"]
        (tmp_path / "test_shop.py").write_text(WORKFLOW + text)
        (tmp_path / "conftest.py").write_text(conftest)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *named, *OPTIONS, *args],
            cwd=tmp_path,
            env=os.environ | alone | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout + done.stderr

    return run
