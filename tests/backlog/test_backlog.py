"""The scenarios at sizes that take less than a minute; `python -m tests.backlog` runs all of them in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backlog.figures import Figure
from tests.backlog.plans import dispatcher_plans
from tests.backlog.room import ASIDE, Room
from tests.backlog.scenarios import behind, half
from tests.smoke.proc import RedisServer, postgresql_programs
from tests.support.services import missing

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]
TIMERS = 5
BLOCKS = 1_000


@pytest.fixture(autouse=True)
def programs() -> None:
    if RedisServer.program is None or postgresql_programs() is None:
        missing("a Redis and a PostgreSQL of its own", "their programs are not installed")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with Room(tmp_path / "room") as room:
        yield room


def test_timers_do_not_wait_for_a_full_outbox(room: Room) -> None:
    room.site.beat()
    room.site.worker()
    room.store_messages(100_000)
    for number in range(TIMERS):
        room.site.create("nap", 1.0 + number / 2, id=f"timer-{number}")
    room.wait_for_completed(TIMERS, 90)
    assert room.count("workflow_outbox") > 50_000


@pytest.mark.parametrize("are_sent", [False, True])
def test_nothing_is_read_of_what_waits_for_a_full_queue(room: Room, *, are_sent: bool) -> None:
    room.store_due(100_000, are_sent=are_sent)
    room.fill_queue(ASIDE, 20_000)
    room.site.beat()
    room.site.worker()
    assert room.site.create("nap", 0.5).result("60 seconds") == "rested"
    blocks, _ = dispatcher_plans(room)
    assert 0 < blocks < BLOCKS
    assert room.length(ASIDE) == 20_000


def test_dispatch_messages_behind_those_of_others_are_not_sent_again(tmp_path: Path) -> None:
    figures = figures_of(behind(tmp_path, foreign=1_000, instances=200))
    assert figures["superfluous messages"] <= 20  # a machine that stands still for seconds has a worker hold some


def test_dispatch_messages_that_a_queue_has_lost_are_sent_again_and_no_others(tmp_path: Path) -> None:
    figures = figures_of(half(tmp_path, instances=1_000))
    assert figures["superfluous messages"] <= 100


def figures_of(figures: list[Figure]) -> dict[str, float]:
    return {each.what: each.value for each in figures}
