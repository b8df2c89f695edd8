"""The tests find bugs: those that are planted in store and engine, one at a time, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import find, unknown_names

QUICK = "the guard has no fence"
names = [mutant.name for mutant in MUTANTS]


def scored(name: str) -> str:
    command = [sys.executable, "-m", "tests.mutants.score", "--jobs", "1", "--no-control", "--exactly", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=400).stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=names)
def test_the_lines_that_a_mutant_changes_are_there(mutant: Mutant) -> None:
    find(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=names)
def test_the_names_that_a_mutant_uses_exist(mutant: Mutant) -> None:
    """A name that the package no longer has would make the mutant fail by itself, and count as caught."""
    assert not unknown_names(mutant)


def test_mutants_have_names_of_their_own() -> None:
    assert len(set(names)) == len(names) >= 20


@pytest.mark.timeout(300)
def test_a_grave_bug_is_caught() -> None:
    assert "1 of 1 mutants caught" in scored(QUICK)


@pytest.mark.slow
@pytest.mark.floor
@pytest.mark.timeout(450)
@pytest.mark.parametrize("name", [name for name in names if name != QUICK])
def test_every_other_bug_is_caught_too(name: str) -> None:
    told = scored(name)
    if " 1 skipped" in told:
        pytest.skip(told)
    assert "1 of 1 mutants caught" in told
