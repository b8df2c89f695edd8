"""Dead workers: their claims are released at once, and repeated crashes delay the instance."""

from __future__ import annotations

from datetime import timedelta

from celery_durable.model import (
    DueRun,
    ErrorInfo,
    RunRef,
    Status,
    WakeReason,
    crash_delay,
)
from celery_durable.store.runs import attempts, sweeps
from tests.store.world import GRACE, World, seconds


def _release_dead(world: World, ref: RunRef, task_id: str = "task-1") -> DueRun | None:
    return world.store.transact(lambda tx: sweeps.release_dead_claim(tx, ref, task_id=task_id, grace=GRACE))


def test_the_claim_of_a_dead_task_is_released_at_once_and_counts_a_crash(world: World) -> None:
    ref = world.create(queue="slow")
    world.claim(ref, by="task-1 host-1")
    assert _release_dead(world, ref) == DueRun(ref, "slow")
    row = world.row(ref)
    assert (row.claim_token, row.claimed_by, row.lease_until, row.crash_count) == (None, None, None, 1)
    assert (row.status, row.run_at, row.wake_reason) == (Status.ACTIVE, world.now, WakeReason.RETRY)
    assert row.next_check_at == world.now + GRACE  # its message is on the way
    assert world.sweep() == []
    assert world.claim(ref).crash_count == 1


def test_the_record_of_a_dead_process_says_how_it_died_and_which_step_it_recorded_last(world: World) -> None:
    ref = world.create()
    world.claim(ref, by="task-1 host-1")
    died = "Worker exited prematurely: signal 9 (SIGKILL) Job: 7."
    world.store.transact(lambda tx: sweeps.release_dead_claim(tx, ref, task_id="task-1", grace=GRACE, died=died))
    (found,) = world.store.read(lambda tx: attempts.read(tx, world.row(ref).pk, 1))
    assert found.error == ErrorInfo("WorkerLostError", f"The worker's process died: {died} It recorded no step.")


def test_only_the_claim_of_the_dead_task_itself_is_released(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref, by="task-10 host-1")
    assert _release_dead(world, ref, "task-1") is None
    assert world.row(ref).claim_token == claim.token


def test_a_dead_task_that_had_released_its_claim_releases_nothing(world: World) -> None:
    ref = world.create()
    world.release(world.claim(ref))
    before = world.read_all_rows()
    assert _release_dead(world, ref) is None
    assert world.read_all_rows() == before


def test_a_dead_task_with_a_pause_request_leaves_its_instance_paused(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.pause(ref)
    assert _release_dead(world, ref) is None
    row = world.row(ref)
    assert (row.status, row.next_check_at, row.pause_requested) == (Status.PAUSED, None, False)


def test_repeated_crashes_delay_an_instance_longer(world: World) -> None:
    ref = world.create()
    for crash, rest in enumerate([0, 1, 2, 4], start=1):
        world.claim(ref)
        assert (_release_dead(world, ref) is not None) is (rest == 0)
        row = world.row(ref)
        looked_at = world.now + (seconds(rest) if rest else GRACE)
        assert (row.crash_count, row.run_at, row.next_check_at) == (crash, world.now + seconds(rest), looked_at)
        world.advance(rest)


def test_the_delay_after_crashes_doubles_up_to_a_minute() -> None:
    delays = [crash_delay(count) // timedelta(seconds=1) for count in range(10)]
    assert delays == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert crash_delay(10**6) == timedelta(minutes=1)
