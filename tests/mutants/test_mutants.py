"""The tests find bugs: those that are planted, one at a time, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import unknown_names

pytestmark = pytest.mark.slow


@pytest.mark.timeout(450)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    assert not unknown_names(mutant), "a name that the package lacks would fail by itself, and count as caught"
    command = [sys.executable, "-m", "tests.mutants.score", "--jobs", "1", "--no-control", "--exactly", mutant.name]
    told = subprocess.run(command, capture_output=True, text=True, timeout=400).stdout
    if " 1 skipped" in told:
        pytest.skip(told)
    assert "1 of 1 mutants caught" in told
