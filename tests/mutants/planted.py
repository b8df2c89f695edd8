"""A pytest plugin, ``-p tests.mutants.planted``, that plants the mutant of ``DURABLE_MUTANT`` before the tests."""

from __future__ import annotations

import os

from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import plant


def pytest_configure() -> None:
    name = os.environ["DURABLE_MUTANT"]
    if name:
        plant(next(mutant for mutant in MUTANTS if mutant.name == name))
