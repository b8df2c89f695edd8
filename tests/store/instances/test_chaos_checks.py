"""What a chaos run asks of the tables."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import sqlalchemy as sa

from celery_durable.model import DueRun, RunOutcome, Status, StepStatus, StepType
from celery_durable.store.instances import chaos_checks
from celery_durable.store.instances.chaos_checks import HeldClaim
from tests.store.world import LEASE, World, seconds, step


def find_held_claims(world: World, node: str) -> list[HeldClaim]:
    return world.store.read(lambda tx: chaos_checks.find_held_claims(tx, node, lease=LEASE))


def test_only_the_claims_of_the_node_are_found(world: World) -> None:
    mine, other = world.create("o-1"), world.create("o-2")
    world.create("o-3")
    claim = world.claim(mine, by="task-1 chaos-1@here")
    world.claim(other, by="task-2 other-chaos-1@here")
    assert find_held_claims(world, "chaos-1@here") == [HeldClaim(claim.pk, mine, 0, world.now)]
    world.end_run(claim, RunOutcome(Status.COMPLETE, output="1"))
    assert find_held_claims(world, "chaos-1@here") == []


def test_runs_that_are_claimed_or_due_soon_are_found_with_their_queue(world: World) -> None:
    due, claimed, over = world.create("o-1", queue="slow"), world.create("o-2"), world.create("o-3")
    pk = world.claim(claimed).pk
    world.end_run(world.claim(over), RunOutcome(Status.COMPLETE, output="1"))
    found = world.store.read(lambda tx: chaos_checks.find_due_soon(tx, within=seconds(60), limit=10))
    assert found == {world.row(due).pk: DueRun(due, "slow"), pk: DueRun(claimed, "durable")}


def test_progress_is_the_first_record_after_the_given_time(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.commit(claim, step("before"))
    held = HeldClaim(claim.pk, ref, 0, world.now)
    progress = partial(chaos_checks.find_progress_after, held=held)
    world.advance(1)
    assert world.store.read(progress) is None
    began = world.now
    world.commit(claim, step("wait", StepStatus.WAITING, seq=2, type=StepType.SLEEP, wake_in=seconds(9)))
    world.advance(1)
    world.commit(claim, step("after", seq=3))
    assert world.store.read(progress) == began


def test_counts_include_only_the_given_instances_and_the_time_since(world: World) -> None:
    first, second = world.create("o-1"), world.create("o-2")
    world.create("o-3")
    claim = world.claim(first)
    world.commit(claim, step("before"))
    world.advance(1)
    since = world.now
    world.commit(claim, step("after", seq=2))
    world.end_run(claim, RunOutcome(Status.COMPLETE, output="1"))
    pks = [world.row(first).pk, world.row(second).pk]
    found = world.store.read(lambda tx: chaos_checks.count_progress(tx, pks, since=since))
    assert found == (Counter(complete=1, active=1), 1)


CONTRADICTIONS = [
    ({"lease_until": 1}, "an incomplete claim"),
    (
        {"status": "waiting", "claim_token": "t", "claim_task_id": "me", "claimed_by": "me", "lease_until": 1},
        "claimed while waiting",
    ),
    ({"next_check_at": None}, "active, but no sweep will find it"),
    ({"status": "terminated", "run_at": None}, "terminated, but its run ended at None"),
    ({"status": "paused", "output": "1"}, "paused, with an output"),
    ({"status": "paused", "error_name": "ValueError"}, "paused, with the error ValueError"),
]


def test_each_contradiction_is_a_sentence(world: World) -> None:
    world.create("untouched")
    for number, (changes, sentence) in enumerate(CONTRADICTIONS):
        ref = world.create(f"o-{number}")
        pk = world.row(ref).pk
        look = partial(chaos_checks.find_contradictions, pks=[pk])
        assert world.store.read(look) == []
        change(world, pk, changes)
        assert world.store.read(look) == [f"order/{ref.instance_id}: {sentence}"]


def change(world: World, pk: int, changes: dict[str, Any]) -> None:
    t = world.store.tables
    of_run = {key: changes[key] for key in ("output", "error_name") if key in changes}
    of_instance = {"status": "active"} | {key: value for key, value in changes.items() if key not in of_run}
    with world.store.engine.begin() as connection:
        connection.execute(sa.update(t.instance).where(t.instance.c.id == pk).values(**of_instance))
        if of_run:
            connection.execute(sa.update(t.run).where(t.run.c.instance_pk == pk).values(**of_run))


def test_each_contradiction_between_steps_is_a_sentence(world: World) -> None:
    claim = world.claim(world.create())
    world.commit(claim, step("a", attempts=3, max_attempts=2))
    world.commit(claim, step("b"))
    assert world.store.read(partial(chaos_checks.find_contradictions, pks=[claim.pk])) == [
        f"instance {claim.pk}: two steps are number 1",
        f"instance {claim.pk}: step 'a' has more attempts than it may",
    ]
