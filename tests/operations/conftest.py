from __future__ import annotations

import pytest

from tests.support.databases import on_databases
from tests.support.instances import FlowControl
from tests.support.topics import define_watch
from tests.support.world import World

database = on_databases("sqlite", "postgresql")


@pytest.fixture
def watch(world: World) -> FlowControl:
    return define_watch(world)
