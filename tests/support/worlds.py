"""Fixtures of the tests that run the engine in a `World`: every world must leave its database in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.all_operations import Operations
from celery_durable.testing import DurableHarness
from tests.support import invariants
from tests.support.attempts import Bench
from tests.support.flows import flow_of
from tests.support.world import FlowControl, World


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


@pytest.fixture
def order(world: World) -> FlowControl:
    """A workflow that waits for an approval."""
    return flow_of(world, lambda step: step.wait_for_event("approval", "approval").payload)


@pytest.fixture
def others(world: World) -> Operations:
    """The operations of another process, which acts while the outcome of a commit is unknown."""
    return world.new_producer().operations


@pytest.fixture
def make_harness() -> Iterator[Callable[..., DurableHarness]]:
    made: list[DurableHarness] = []

    def make(*workflows: Any, **options: Any) -> DurableHarness:
        made.append(DurableHarness(workflows, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
