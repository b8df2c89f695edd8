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

@pytest.mark.slow
def test_is_left_out_first():
    pass

@pytest.mark.slow
def test_may_be_left_out():
    pass

@pytest.mark.slow
@pytest.mark.bulk
def test_bulk():
    pass

@pytest.mark.floor
@pytest.mark.parametrize("number", range(3))
def test_floor(number):
    if number == 2:
        pytest.skip("no server")

def test_quick():
    pass
"""


def run_ring(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of RING in a process of their own."""
    (folder / "test_ring.py").write_text(RING)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["-p", "pytest_timeout", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    env.pop("PYTEST_XDIST_WORKER_COUNT", None)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.floor
def test_the_shards_of_a_run_have_each_test_once(tmp_path: Path) -> None:
    shards = [run_ring(tmp_path, DURABLE_SHARD=f"{number}/3").stdout for number in (1, 2, 3)]
    parts = [re.findall(r"(test_\w+(?:\[\d\])?) (?:PASSED|SKIPPED)", shard) for shard in shards]
    ran = [test for part in parts for test in part]
    assert len(ran) == len(set(ran)) == 7, shards
    assert max(map(len, parts)) < 7


def test_the_gate_runs_the_floor_first_and_leaves_out_other_slow_tests_when_its_time_is_over(tmp_path: Path) -> None:
    done = run_ring(tmp_path, DURABLE_SLOW_UNTIL="1")
    outcomes = re.findall(r"(test_\w+(?:\[\d\])?) (PASSED|SKIPPED)", done.stdout)
    assert outcomes == [
        ("test_floor[0]", "PASSED"),
        ("test_floor[1]", "PASSED"),
        ("test_floor[2]", "SKIPPED"),
        ("test_is_left_out_first", "SKIPPED"),
        ("test_may_be_left_out", "SKIPPED"),
        ("test_quick", "PASSED"),
        ("test_bulk", "SKIPPED"),
    ], done.stdout + done.stderr
    assert "2 of 6 (33 %), 2 of 3 of the floor" in done.stdout
