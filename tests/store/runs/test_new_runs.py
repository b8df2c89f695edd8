"""The first claim of a new run reads the run, which then needs no load. `World.claim` compares both."""

from __future__ import annotations

from celery_durable.model import DueRun, NewRun, Origin, RunOutcome, Status
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs import runs
from celery_durable.store.runs.runs import Continuation
from tests.store.world import GRACE, LEASE, World, step


def test_a_claim_reads_a_run_that_no_pass_has_started(world: World) -> None:
    ref = world.create(params='{"a": 1}')
    first = world.claim(ref)
    assert first.new_run == NewRun('{"a": 1}', world.now)
    world.release(first)
    assert world.claim(ref).new_run is None  # a pass has ended
    world.advance(10)
    again = world.restart(ref).ref
    assert world.claim(again).new_run is None  # a restart changes the instance, and only its row is sure to be current
    world.advance(LEASE.total_seconds() + 1)
    taken_over = world.claim(again)
    assert (taken_over.crash_count, taken_over.new_run) == (1, None)


def test_a_claim_does_not_read_a_run_that_has_steps_already(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.commit(claim, step())
    world.advance(LEASE.total_seconds() + 1)
    claim = world.claim(ref)  # its worker has died
    assert (claim.crash_count, claim.new_run) == (1, None)
    world.end_run(claim, RunOutcome(Status.ERRORED))

    def continue_run(tx: Tx) -> DueRun:
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        source = runs.read_source(tx, row)
        kept = tuple(each.step_key for each in source.steps)
        origin, ancestry = Origin(ref.instance_id, 1, None), source.ancestry.for_continuation(1)
        run = Continuation(row.pk, origin, kept, ancestry, row.version)
        return lifecycle.restart(tx, row, grace=GRACE, commit_id="c", reason=None, continuation=run)

    assert world.claim(world.store.transact(continue_run).ref).new_run is None
