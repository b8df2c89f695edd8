"""Two operations at once on one instance, each with each other, on the databases that lock rows.

    pytest tests/pairs -k "postgresql and suspend and pause"

The simulation has one writer, so it cannot show how two transactions affect each other. Here one transaction is held
open while it has a lock, and the other one waits for it. `make test` runs each combination once, `make test-all` runs
it on each database with each kind of hold.
"""

from __future__ import annotations

import pytest

from tests.pairs.environment import Environment
from tests.pairs.matrix import DATABASES, PAIRS, SMOKE, Pair, run

ONLY_SLOW = (pytest.mark.slow, pytest.mark.bulk)
CASES = [
    pytest.param(name, pair, id=f"{name}-{pair}", marks=() if (name, pair) in SMOKE else ONLY_SLOW)
    for name in DATABASES
    for pair in PAIRS
]


@pytest.mark.parametrize(("database", "pair"), CASES, indirect=["database"])
def test_two_concurrent_operations_lose_nothing_and_repeat_nothing(environment: Environment, pair: Pair) -> None:
    run(environment, pair)
