"""What is stuck is named within two clicks from the first page, in a browser, and so is its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.stuck.reading import read_world
from tests.dashboard.stuck.situations import SITUATIONS, Situation, open_world
from tests.smoke.proc import RedisServer
from tests.support.services import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
def test_the_pages_name_the_cause_and_the_remedy(chromium: Any, tmp_path: Path, situation: Situation) -> None:
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    with open_world(tmp_path) as world:
        situation.plant(world)
        pages, is_shown = read_world(chromium, world, situation.shows)
    assert is_shown, pages["home.txt"]
