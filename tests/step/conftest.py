from __future__ import annotations

from typing import Any

import pytest

from tests.support.billing import deploy_billing
from tests.support.databases import on_databases
from tests.support.world import World

database = on_databases("sqlite", "postgresql")


@pytest.fixture
def billing(world: World) -> Any:
    return deploy_billing(world)
