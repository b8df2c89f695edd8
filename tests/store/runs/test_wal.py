"""How many bytes a step writes to PostgreSQL's log (WAL): the figure that limits a busy server.

Other sessions of the server write too, and the first change of a page after a checkpoint writes the page. Both only add
bytes, so the smallest of many measurements is that of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.store.lanes.groups import GroupedStep, write_group
from tests.store.world import World, step

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

_TRIES = 300
_PLAIN_INSERT_BYTES = 200
"""Less than a row of this size takes, so that a measurement below it is none."""


def measure(world: World, write: Callable[[int], object], *, steps: int = 1) -> Iterator[int]:
    """Yield the bytes per step of each commit."""
    query = sa.text("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
    with world.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for number in range(_TRIES):
            before = connection.execute(query).scalar_one()
            write(number)
            yield int(connection.execute(query).scalar_one() - before) // steps


def assert_is_at_most(limit: int, found: Iterator[int]) -> None:
    smallest = min(found)
    assert _PLAIN_INSERT_BYTES < smallest <= limit


def trivial(number: int) -> Any:
    return step(f"step {number}", seq=number, result='{"number": 12345}', attempts=1)


def test_a_finished_step_writes_at_most_400_bytes(world: World) -> None:
    claim = world.claim(world.create())
    found = measure(world, lambda number: world.commit(claim, trivial(number), changes_instance=False))
    assert_is_at_most(400, found)


def test_a_step_that_renews_the_lease_writes_at_most_430_bytes(world: World) -> None:
    claim = world.claim(world.create())
    assert_is_at_most(430, measure(world, lambda number: world.commit(claim, trivial(number))))


def test_a_step_in_a_group_writes_at_most_400_bytes(world: World) -> None:
    """The group shares one commit record."""
    claims = [world.claim(world.create(f"o-{index}")) for index in range(10)]

    def write(number: int) -> None:
        group = [GroupedStep(claim, trivial(number)) for claim in claims]
        assert None not in world.store.run_statement(lambda tx: write_group(tx, group))

    assert_is_at_most(400, measure(world, write, steps=10))
