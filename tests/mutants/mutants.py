"""All bugs to be planted, gathered from ``rooms``: a file for each room of the package.

A mutant is caught by the simulation, or where it lies in code that only servers reach, or that the simulation cannot
tell from the right one, by a test that is named with it. It stands with the room of its first edit, and with the
runner if it changes the runner at all.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.rooms import (
    operations,
    package,
    runner_commits,
    runner_passes,
    store_answers,
    store_database,
    store_runs,
    tasks,
)

MUTANTS: tuple[Mutant, ...] = (
    *runner_commits.MUTANTS,
    *runner_passes.MUTANTS,
    *store_runs.MUTANTS,
    *store_answers.MUTANTS,
    *store_database.MUTANTS,
    *tasks.MUTANTS,
    *operations.MUTANTS,
    *package.MUTANTS,
)
