"""The world of an engine test; every world must leave its database in order.

Tests of modules in `SAME_ON_SERVERS` run on PostgreSQL and MariaDB only in the slow ring: they are about what the
engine decides, with one writer at a time, and `tests/store` tests every statement that they use on all databases.
What two transactions do to each other, what a lost connection or a cut commit does, and how workers die stays on the
servers in `make test`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.engine import invariants
from tests.engine.attempts import Bench
from tests.engine.world import World

HERE = Path(__file__).parent
SAME_ON_SERVERS = {
    "attempt_contract", "branches", "create", "event_payloads", "events", "forks",
    "handles", "interventions", "labels", "lifecycle", "linear", "linear_answers", "linear_deploys",
    "linear_interventions", "logs", "own_ends", "publish", "reading", "releases",
    "retries", "rewinding", "run_retries", "sleeps", "step_labels", "step_names", "step_results", "step_sends",
    "steps", "suspension", "tasks", "timeouts", "topic_waits", "topics", "workers",
}  # fmt: skip
"""The names behind `test_` of modules whose tests say the same on every database."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    same = [
        item for item in items if item.path.parent == HERE and item.path.stem.removeprefix("test_") in SAME_ON_SERVERS
    ]
    on_sqlite = {_function_of(item) for item in same if _database_of(item) == "sqlite"}
    for item in same:
        if _database_of(item) != "sqlite" and _function_of(item) in on_sqlite:
            item.add_marker(pytest.mark.slow)


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _database_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return str(call.params.get("database", "sqlite")) if call else "sqlite"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """Engine tests run on two databases; the store's own run on all, as do those marked `everywhere` here."""
    return request.param


@pytest.fixture
def make_world(store_url: str, inspector: sa.Engine | None) -> Iterator[Callable[..., World]]:
    """A world with settings of its own."""
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        worlds.append(World(store_url, **settings))
        worlds[-1].inspector = inspector
        return worlds[-1]

    yield make
    try:
        for world in worlds:
            invariants.check(world)
    finally:
        for world in worlds:
            world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def make_bench(world: World) -> Iterator[Callable[..., Bench]]:
    """A workflow of either kind whose body does what the test says; see `Bench`."""
    benches: list[Bench] = []

    def make(*args: Any, **options: Any) -> Bench:
        benches.append(Bench(world, *args, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.finish()
