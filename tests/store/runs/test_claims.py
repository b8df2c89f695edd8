"""Claims: claim, guard, suspend, release, end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_durable.errors import Superseded
from celery_durable.model import (
    Claim,
    LogLevel,
    LogLine,
    NewRun,
    OpenWait,
    ReleaseOutcome,
    RunOutcome,
    Status,
    StepStatus,
    TaskSendingStep,
    WakeReason,
)
from celery_durable.remote.maps import ItemsNeedPass
from celery_durable.store.events import run_events
from celery_durable.store.runs import claims, history, items, outputs, releases
from tests.store.world import GRACE, LEASE, World, seconds, step

# --- claim --------------------------------------------------------------------------------------


def test_a_due_run_can_be_claimed(world: World) -> None:
    ref = world.create(queue="slow")
    claim = world.claim(ref, by="task-7 host-1")
    assert claim == Claim(
        pk=world.row(ref).pk,
        ref=ref,
        token=claim.token,
        queue="slow",
        crash_count=0,
        created_at=world.now,
        claimed_at=world.now,
        run_at=world.now,
        sent_at=world.now,
        new_run=NewRun("{}", world.now),
    )
    row = world.row(ref)
    assert (row.status, row.claim_token, row.claim_task_id, row.claimed_by) == (
        Status.ACTIVE,
        claim.token,
        "task-7",
        "host-1",
    )
    assert row.lease_until == row.next_check_at == world.now + LEASE
    assert (row.dispatch_count, row.version) == (0, 2)


def test_a_waiting_run_can_be_claimed_when_its_time_has_come(world: World) -> None:
    ref = world.create()
    assert world.wait(world.claim(ref), for_=60) is ReleaseOutcome.WAITING
    world.advance(59)
    assert world.try_claim(ref) is None
    world.advance(1)
    assert world.claim(ref).crash_count == 0
    assert world.row(ref).status is Status.ACTIVE


def test_an_instance_with_a_pause_request_cannot_be_taken_over(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.pause(ref)
    world.advance(31)  # its worker died before it paused the instance
    assert world.try_claim(ref) is None


def test_taking_over_an_expired_claim_counts_a_crash(world: World) -> None:
    ref = world.create()
    first = world.claim(ref)
    world.advance(30)
    second = world.claim(ref)
    assert second.crash_count == 1
    assert second.token != first.token
    world.advance(30)
    assert world.claim(ref).crash_count == 2


def test_a_claim_can_be_found_by_its_token(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)

    def find(token: str) -> Claim | None:
        return world.store.transact(lambda tx: claims.find_claim(tx, ref, token=token, lease=LEASE))

    assert find(claim.token) == replace(claim, new_run=None)  # it is loaded then
    assert find("another") is None


def test_a_run_of_an_unknown_workflow_is_postponed(world: World) -> None:
    ref = world.create()
    world.store.transact(lambda tx: claims.postpone(tx, ref, delay=seconds(5)))
    assert world.row(ref).next_check_at == world.now + seconds(5)


def test_a_late_postponement_does_not_move_the_timer_of_a_suspended_run(world: World) -> None:
    ref = world.create()
    world.wait(world.claim(ref), for_=86400)
    world.store.transact(lambda tx: claims.postpone(tx, ref, delay=seconds(5)))
    assert world.row(ref).next_check_at == world.now + seconds(86400)


# --- guard --------------------------------------------------------------------------------------


def test_the_guard_renews_the_lease_and_resets_the_crash_count(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(30)
    claim = world.claim(ref)
    version = world.row(ref).version
    world.advance(10)
    guarded = world.store.transact(lambda tx: claims.guard(tx, claim, lease=LEASE))
    assert guarded == claims.GuardResult(now=world.now, pause_requested=False)
    row = world.row(ref)
    assert row.lease_until == world.now + LEASE
    assert (row.crash_count, row.version) == (0, version + 1)


def test_only_progress_resets_the_crash_count(world: World) -> None:
    refs = {status: world.create(status) for status in StepStatus}
    for ref in refs.values():
        world.claim(ref)
    world.advance(30)
    for status, ref in refs.items():
        world.commit(world.claim(ref), step("charge", status))
    crashes = {status: world.row(ref).crash_count for status, ref in refs.items()}
    assert crashes == dict.fromkeys(StepStatus, 0) | {StepStatus.PENDING: 1, StepStatus.RUNNING: 1}


def test_the_guard_returns_a_pause_request(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.pause(ref)
    assert world.store.transact(lambda tx: claims.guard(tx, claim, lease=LEASE)).pause_requested is True


def test_an_expired_claim_that_was_not_taken_over_may_still_write(world: World) -> None:
    claim = world.claim(world.create())
    world.advance(3600)
    world.commit(claim, step())
    assert [row.step_key for row in world.steps(claim)] == ["charge"]


def _mark_log(world: World, claim: Claim) -> None:
    line = LogLine(LogLevel.INFO, "workflow", "late", None, None, None, is_replay=False)

    def work(tx: Any) -> None:
        outputs.write_logs(tx, claim, claims.guard(tx, claim, lease=LEASE), [line], remaining=10)

    world.store.transact(work)


LATE_WRITES: dict[str, Callable[[World, Claim], Any]] = {
    "guard": lambda w, c: w.store.transact(lambda tx: claims.guard(tx, c, lease=LEASE)),
    "new step": lambda w, c: w.commit(c, step("late")),
    "new step alone": lambda w, c: w.commit(c, step("late"), changes_instance=False),
    "step again": lambda w, c: w.commit(c, step("charge", replaces="commit-charge", result="2")),
    "several steps": lambda w, c: w.write(c, step("late"), step("later", seq=2)),
    "log": _mark_log,
    "wait": lambda w, c: w.wait(c, "late"),
    "suspend": lambda w, c: w.suspend(c, OpenWait(w.now + seconds(9))),
    "release": lambda w, c: w.release(c),
    "end": lambda w, c: w.end_run(c, RunOutcome(Status.COMPLETE, output="1")),
}


@pytest.mark.parametrize("loss", ["taken over", "restarted", "terminated", "released by the sweep"])
def test_a_superseded_worker_changes_nothing(world: World, loss: str) -> None:
    ref = world.create()
    slow = world.claim(ref)
    world.commit(slow, step("charge", result="1"))
    world.advance(31)
    match loss:
        case "taken over":
            world.claim(ref)
        case "restarted":
            world.restart(ref)
        case "terminated":
            world.terminate(ref)
        case _:
            assert world.sweep()
    before = world.read_all_rows()
    for name, late_write in LATE_WRITES.items():
        with pytest.raises(Superseded) as caught:
            late_write(world, slow)
        assert str(caught.value) == "order/o-1#1"
        assert world.read_all_rows() == before, name


def test_is_held_is_true_until_the_claim_is_lost(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    assert world.store.transact(lambda tx: claims.is_held(tx, claim)) is True
    world.restart(ref)
    assert world.store.transact(lambda tx: claims.is_held(tx, claim)) is False


# --- suspend and release ------------------------------------------------------------------------


def test_a_suspended_instance_sleeps_until_the_earliest_of_its_waits(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    later, sooner = OpenWait(world.now + seconds(90), "approval"), OpenWait(world.now + seconds(60))
    assert world.suspend(claim, later, sooner) is ReleaseOutcome.WAITING
    row = world.row(ref)
    assert row.run_at == row.next_check_at == world.now + seconds(60)
    assert (row.status, row.claim_token, row.claimed_by, row.lease_until) == (Status.WAITING, None, None, None)
    assert (row.wake_reason, row.priority, row.dispatch_count) == (WakeReason.TIMER, claims.RESUMING, 0)


def test_a_wait_that_is_over_already_leaves_the_instance_due(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    assert world.suspend(claim, OpenWait(world.now + seconds(60)), OpenWait(world.now)) is ReleaseOutcome.DUE
    row = world.row(ref)
    assert (row.status, row.run_at, row.next_check_at) == (Status.ACTIVE, world.now, world.now + GRACE)


def test_an_event_sent_before_the_suspension_leaves_the_instance_due(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    assert world.send(ref, "approval") is False  # the instance does not wait yet
    assert world.wait(claim, event="approval") is ReleaseOutcome.DUE
    assert world.try_claim(ref) is not None


@pytest.mark.parametrize(("bodies", "after"), [([], ReleaseOutcome.DUE), (["[]"], ReleaseOutcome.WAITING)])
def test_a_wait_for_a_map_checks_its_items_under_the_lock(
    world: World, bodies: list[str], after: ReleaseOutcome
) -> None:
    ref = world.create()
    claim = world.claim(ref)
    map_step = TaskSendingStep(
        ref.workflow, ref.instance_id, claim.pk, ref.run_number, "m", seconds(60), max_concurrency=0
    )
    world.store.transact(lambda tx: items.start_map(tx, map_step, bodies, now=world.now))
    assert world.suspend(claim, OpenWait(world.now + seconds(60), condition=ItemsNeedPass(map_step))) is after


@pytest.mark.parametrize("other", ["another type", "consumed", "too late"])
def test_an_event_that_does_not_match_the_wait_does_not_wake_the_instance(world: World, other: str) -> None:
    ref = world.create()
    claim = world.claim(ref)
    deadline = world.now + seconds(60)
    if other == "too late":
        world.advance(61)
        world.send(ref, "approval")
        world.store.runtime.advance(-61)
    else:
        world.send(ref, "refusal" if other == "another type" else "approval")
    if other == "consumed":
        _consume_oldest(world, claim, key="other wait")
    assert world.suspend(claim, OpenWait(deadline, "approval")) is ReleaseOutcome.WAITING


def _consume_oldest(world: World, claim: Claim, *, key: str) -> None:
    def work(tx: Any) -> None:
        guarded = claims.guard(tx, claim, lease=LEASE)
        event = run_events.find_oldest_event(tx, claim, "approval", key=key, deadline=world.now)
        assert event is not None
        run_events.consume(tx, claim, guarded, event, key=key)

    world.store.transact(work)


@pytest.mark.parametrize("release", ["suspend", "release"])
def test_a_release_turns_a_pause_request_into_a_pause(world: World, release: str) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.pause(ref)
    assert world.row(ref).status is Status.ACTIVE
    after = world.wait(claim) if release == "suspend" else world.release(claim)
    assert after is ReleaseOutcome.PAUSED
    row = world.row(ref)
    assert (row.status, row.next_check_at, row.pause_requested, row.claim_token) == (Status.PAUSED, None, False, None)


def test_a_released_instance_is_due_at_once_and_counts_no_crash(world: World) -> None:
    ref = world.create()
    assert world.release(world.claim(ref)) is ReleaseOutcome.DUE
    row = world.row(ref)
    assert (row.status, row.run_at, row.next_check_at) == (Status.ACTIVE, world.now, world.now + GRACE)
    assert (row.wake_reason, row.priority) == (WakeReason.RESUME, claims.RESUMING)
    assert world.claim(ref).crash_count == 0


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run_outcome",
    [
        RunOutcome(Status.COMPLETE, output='{"total":3}'),
        RunOutcome(Status.ERRORED, error_name="ValueError", error_message="no such order"),
    ],
    ids=lambda run_outcome: run_outcome.status,
)
def test_ending_a_run_records_the_outcome_and_releases_the_instance(world: World, run_outcome: RunOutcome) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(5)
    world.end_run(claim, run_outcome)
    row = world.row(ref)
    assert (row.status, row.run_at, row.next_check_at) == (run_outcome.status, None, None)
    assert (row.claim_token, row.claimed_by, row.lease_until) == (None, None, None)
    run = world.store.read(lambda tx: history.read_run(tx, claim.pk, 1))
    assert (run.output, run.error_name, run.error_message) == (
        run_outcome.output,
        run_outcome.error_name,
        run_outcome.error_message,
    )
    assert (run.started_at, run.completed_at) == (claim.claimed_at, world.now)


def test_the_end_of_a_run_overrides_a_pause_request(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.pause(ref)
    world.end_run(claim, RunOutcome(Status.COMPLETE, output="1"))
    row = world.row(ref)
    assert (row.status, row.pause_requested) == (Status.COMPLETE, False)


def test_the_start_of_a_run_is_recorded_once(world: World) -> None:
    ref = world.create()
    first = world.claim(ref)
    world.store.transact(lambda tx: releases.mark_started(tx, first))
    world.wait(first, event=None, for_=60)
    world.advance(60)
    second = world.claim(ref)
    world.store.transact(lambda tx: releases.mark_started(tx, second))
    world.end_run(second, RunOutcome(Status.COMPLETE, output="1"))
    run = world.store.read(lambda tx: history.read_run(tx, first.pk, 1))
    assert run.started_at == first.claimed_at
