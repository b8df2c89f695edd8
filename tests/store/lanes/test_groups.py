"""Groups: the finished steps of several runs, written together without waiting for a lock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy.exc import IntegrityError

from celery_durable.model import Claim
from celery_durable.store.instances import instances
from celery_durable.store.lanes.groups import GroupedStep, write_group
from celery_durable.store.lanes.steps import WrittenStep
from tests.store.world import LEASE, World, step

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def write(world: World, *steps: GroupedStep) -> Sequence[WrittenStep | None]:
    return world.store.run_statement(lambda tx: write_group(tx, steps))


def claim_some(world: World, number: int) -> list[Claim]:
    return [world.claim(world.create(f"o-{index}")) for index in range(number)]


def grouped(claims: Sequence[Claim], **given: object) -> list[GroupedStep]:
    return [GroupedStep(claim, step(result=f'"of {claim.ref.instance_id}"', **given)) for claim in claims]


def test_each_run_gets_its_own_row_with_the_time_of_the_database(world: World) -> None:
    claims = claim_some(world, 3)
    world.advance(5)
    written = write(world, *grouped(claims))
    assert [world.steps(claim) for claim in claims] == [(each.row,) for each in written if each is not None]
    assert [(each.row.result, each.row.created_at) for each in written if each is not None] == [
        (f'"of o-{index}"', world.now) for index in range(3)
    ]


def test_the_rows_are_those_that_single_statements_write(world: World) -> None:
    together, alone = claim_some(world, 2)
    given = {"result": "1", "attempts": 1, "max_attempts": 3, "ran_for": LEASE}
    write(world, GroupedStep(together, step(**given)))
    world.commit(alone, step(**given), changes_instance=False)
    assert world.steps(together) == world.steps(alone)


def test_the_instances_rows_stay_as_they_are(world: World) -> None:
    claims = claim_some(world, 2)
    before = world.read_all_rows()["workflow_instance"]
    world.advance(5)
    write(world, *grouped(claims))
    assert world.read_all_rows()["workflow_instance"] == before


def test_a_lost_claim_is_left_alone_and_the_others_are_written(world: World) -> None:
    lost, held = claim_some(world, 2)
    world.advance(LEASE.total_seconds() + 1)
    taken = world.claim(lost.ref)
    written = write(world, *grouped([lost, held]))
    assert [each is not None for each in written] == [False, True]
    assert world.steps(taken) == ()


def test_a_claim_and_the_one_that_replaced_it_may_be_in_one_group(world: World) -> None:
    [lost] = claim_some(world, 1)
    world.advance(LEASE.total_seconds() + 1)
    held = world.claim(lost.ref)
    written = write(world, *grouped([lost]), *grouped([held]))
    assert [each is not None for each in written] == [False, True]
    assert len(world.steps(held)) == 1


def test_a_row_that_exists_is_left_alone(world: World) -> None:
    """On a database that cannot combine writes, the whole group is."""
    first, second = claim_some(world, 2)
    before = world.commit(first, step(result="1"), changes_instance=False).row
    if world.store.combines_writes:
        assert [each is not None for each in write(world, *grouped([first, second]))] == [False, True]
    else:
        with pytest.raises(IntegrityError):
            write(world, *grouped([first, second]))
        assert world.steps(second) == ()
    assert world.steps(first) == (before,)


def test_it_says_for_which_runs_a_pause_is_requested(world: World) -> None:
    claims = claim_some(world, 2)
    world.pause(claims[1].ref)
    assert [each and each.pause_requested for each in write(world, *grouped(claims))] == [False, True]


@on_servers
def test_a_locked_instance_is_left_alone_without_waiting(world: World) -> None:
    locked, free = claim_some(world, 2)
    with world.hold_transaction() as tx:
        instances.lock(tx, locked.ref.workflow, locked.ref.instance_id)
        written = write(world, *grouped([locked, free]))
    assert [each is not None for each in written] == [False, True]
    assert world.steps(locked) == ()


def test_results_are_written_as_they_are(world: World) -> None:
    texts = ["'\"\\ \N{SNOWMAN}", "%s %% :name", ""]
    claims = claim_some(world, 3)
    write(world, *[GroupedStep(claim, step(result=text)) for claim, text in zip(claims, texts, strict=True)])
    assert [row.result for claim in claims for row in world.steps(claim)] == texts
