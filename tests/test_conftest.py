"""What tests/conftest.py changes about the whole run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import celery_durable.doctor
from tests.docs.blocks import ROOT


def test_pytest_does_not_rewrite_modules_of_celery_durable() -> None:
    assert type(celery_durable.doctor.__loader__) is SourceFileLoader


def test_what_is_compiled_is_kept_for_the_processes_that_tests_start() -> None:
    assert not sys.dont_write_bytecode
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


RING = """
import pytest

@pytest.mark.parametrize("number", range(7))
def test_a(number):
    if number == 2:
        pytest.skip("no server")
"""


def run_ring(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of RING in a process of their own."""
    (folder / "test_ring.py").write_text(RING)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["-p", "pytest_timeout", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    env.pop("PYTEST_XDIST_WORKER_COUNT", None)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.gate
def test_the_shards_of_a_run_have_each_test_once(tmp_path: Path) -> None:
    shards = [run_ring(tmp_path, DURABLE_SHARD=f"{number}/3").stdout for number in (1, 2, 3)]
    parts = [re.findall(r"(test_\w+(?:\[\d\])?) (?:PASSED|SKIPPED)", shard) for shard in shards]
    ran = [test for part in parts for test in part]
    assert len(ran) == len(set(ran)) == 7, shards
    assert max(map(len, parts)) < 7
