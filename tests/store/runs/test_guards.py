"""A guard that has nothing to change in the instance's row: it locks the row and checks the token (LAW 2)."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_durable.model import Claim, to_us
from celery_durable.store.instances import instances
from celery_durable.store.lanes.steps import WrittenStep
from tests.store.world import World, step


def add_step(world: World, claim: Claim) -> WrittenStep:
    return world.commit(claim, step(), changes_instance=False)


on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def test_it_writes_the_step_and_leaves_the_instances_row_as_it_is(world: World) -> None:
    claim = world.claim(world.create())
    before = world.read_all_rows()["workflow_instance"]
    world.advance(5)
    written = world.commit(claim, step(result="1"), changes_instance=False)
    assert world.read_all_rows()["workflow_instance"] == before
    (row,) = world.steps(claim)
    assert (row, row.created_at, written.pause_requested) == (written.row, world.now, False)


def test_each_step_changes_the_version_tag_all_the_same(world: World) -> None:
    ref = world.create()
    claim, tags = world.claim(ref), []
    for number in range(3):
        world.commit(claim, step(f"step {number}", seq=number + 1), changes_instance=False)
        tags.append(world.store.read(lambda tx: instances.read_with_tag(tx, ref.workflow, ref.instance_id)).tag)
    assert len(set(tags)) == 3


@on_servers
def test_the_time_of_its_step_is_that_after_the_wait(live: World) -> None:
    """LAW 4, also if the transaction that held the lock has changed nothing."""
    ref = live.create()
    claim = live.claim(ref)
    with live.hold_transaction() as tx:
        instances.lock(tx, ref.workflow, ref.instance_id)
        runner = live.start_blocked(add_step, live, claim)
        released_us = tx.execute(sa.select(tx.store.clock())).scalar_one()
    finished_at = runner.result().row.finished_at
    assert finished_at is not None
    assert to_us(finished_at) >= released_us


@on_servers
def test_all_times_of_its_step_are_the_same_moment(live: World) -> None:
    claim = live.claim(live.create())
    for number in range(10):
        live.commit(claim, step(f"step {number}", seq=number + 1), changes_instance=False)
    assert all(row.created_at == row.finished_at for row in live.steps(claim))
