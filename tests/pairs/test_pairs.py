"""Two operations at once on one instance, every one with every other, on the databases that lock rows.

    pytest tests/pairs -k "postgresql and suspend and pause"

The simulation has one writer, so that it cannot see what two transactions do to each other: here one of them is held
open while it has a lock, and the other one meets it. `make test` plays each meeting once, `make test-all` all of them.
"""

from __future__ import annotations

import pytest

from tests.pairs.matrix import DATABASES, PAIRS, SMOKE, Pair, play
from tests.pairs.stage import Stage

ONLY_SLOW = (pytest.mark.slow, pytest.mark.bulk)
CASES = [
    pytest.param(name, pair, id=f"{name}-{pair}", marks=() if (name, pair) in SMOKE else ONLY_SLOW)
    for name in DATABASES
    for pair in PAIRS
]


@pytest.mark.parametrize(("database", "pair"), CASES, indirect=["database"])
def test_whatever_meets_nothing_is_lost_and_nothing_is_done_twice(stage: Stage, pair: Pair) -> None:
    play(stage, pair)
