"""Each stop once, with two calls; `python -m tests.stops` makes a thousand."""

from __future__ import annotations

import pytest

from tests.smoke.proc import RedisServer
from tests.stops.__main__ import main
from tests.support.databases import on_databases
from tests.support.services import missing

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(600)]

database = on_databases("postgresql")


@pytest.mark.usefixtures("store_url")
def test_no_call_follows_one_whose_end_is_unknown_and_each_unknown_end_is_reported() -> None:
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    assert main(["durable", "-n", "18", "--size", "2"]) == 0
