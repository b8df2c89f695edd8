"""Two operations at once on one instance, each with each other, on the databases that lock rows.

    pytest tests/pairs -k "postgresql and suspend and pause"

The simulation has one writer, so it cannot show how two transactions affect each other. Here one transaction is held
open while it has a lock, and the other one waits for it. `make test` runs a quarter of the combinations once,
the gate the others, and `make test-all` runs each on each database with each kind of hold.
"""

from __future__ import annotations

import pytest

from tests.pairs.environment import Environment
from tests.pairs.matrix import DATABASES, IN_GATE, PAIRS, SMOKE, Pair, run
from tests.rings import wants_slow


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """The database of the case: a pair may be quick on one and slow on the other."""
    name: str = request.param
    return name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make only the items of `make test`, which would drop thousands of others; whoever else asks gets all."""
    pairs = [(name, pair) for name in DATABASES for pair in PAIRS]
    if not wants_slow(metafunc.config):
        pairs = [each for each in pairs if each in SMOKE]
    cases = [pytest.param(name, pair, id=f"{name}-{pair}", marks=marks_of(name, pair)) for name, pair in pairs]
    metafunc.parametrize(("database", "pair"), cases, indirect=["database"])


def marks_of(name: str, pair: Pair) -> tuple[pytest.MarkDecorator, ...]:
    if (name, pair) in SMOKE:
        return ()
    return (pytest.mark.gate,) if (name, pair) in IN_GATE else (pytest.mark.slow,)


def test_two_concurrent_operations_lose_nothing_and_repeat_nothing(environment: Environment, pair: Pair) -> None:
    run(environment, pair)
