from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_durable.store.engine import Store
from tests.store.world import World


@pytest.fixture
def world(clocked_store: Store) -> Iterator[World]:
    """A world with a clock that only the test moves."""
    world = World(clocked_store)
    yield world
    world.close()


@pytest.fixture
def live(store: Store) -> Iterator[World]:
    """A world with the database's own clock."""
    world = World(store)
    yield world
    world.close()
