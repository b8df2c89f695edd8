"""What may be done to an instance from outside, under its lock."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import DueRun, Parent, RunOutcome, RunRef, Status, StepStatus, WakeReason
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs import history, runs
from celery_durable.store.runs.claims import RESUMING, STARTING
from tests.store.world import GRACE, World, seconds, step


def _insert(world: World, id: str, **given: Any) -> Any:
    given = {"params": "{}", "queue": "durable", "grace": GRACE, "commit_id": "another"} | given
    return lambda tx: instances.insert(tx, workflow="order", instance_id=id, **given)


# --- insert -------------------------------------------------------------------------------------


def test_a_new_instance_is_due_now_and_swept_after_the_grace_time(world: World) -> None:
    row = world.row(world.create("o-1", queue="slow"))
    assert row == type(row)(
        pk=row.pk,
        workflow="order",
        instance_id="o-1",
        run_number=1,
        status=Status.ACTIVE,
        claim_token=None,
        claim_task_id=None,
        claimed_by=None,
        lease_until=None,
        run_at=world.now,
        next_check_at=world.now + GRACE,
        wake_reason=WakeReason.START,
        priority=STARTING,
        dispatch_count=0,
        crash_count=0,
        pause_requested=False,
        version=1,
        queue="slow",
        created_at=world.now,
        updated_at=world.now,
        sent_at=world.now,
    )


def test_a_new_instance_with_a_start_time_waits_for_it(world: World) -> None:
    row = world.row(world.create(run_at=world.now + seconds(60)))
    assert (row.status, row.run_at, row.next_check_at) == (Status.WAITING, *[world.now + seconds(60)] * 2)


def test_an_instance_remembers_the_step_that_created_it(world: World) -> None:
    world.create("child", parent=Parent(7, 2, "spawn"))
    i = world.store.tables.instance.c
    query = sa.select(i.parent_pk, i.parent_run_number, i.parent_step_key)
    assert world.store.read(lambda tx: tx.execute(query).one()) == (7, 2, "spawn")


def test_a_taken_id_changes_nothing_and_leaves_the_transaction_usable(world: World) -> None:
    world.create("o-1", params='"first"')
    before = world.read_all_rows()

    def work(tx: Any) -> tuple[bool, bool]:
        return _insert(world, "o-1", params='"second"')(tx), _insert(world, "o-2")(tx)

    assert world.store.transact(work) == (False, True)
    after = world.read_all_rows()
    assert after["workflow_instance"][:1] == before["workflow_instance"]
    assert after["workflow_run"][:1] == before["workflow_run"]
    assert world.row(RunRef("order", "o-2", 1)).status is Status.ACTIVE


# --- lock and read ------------------------------------------------------------------------------


def test_the_lock_reads_the_same_row_as_a_plain_read(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    assert world.change(ref, lambda tx, row: row) == world.row(ref)
    assert world.store.transact(lambda tx: instances.find_pk(tx, "order", "o-1")) == world.row(ref).pk


# --- transitions --------------------------------------------------------------------------------


def test_a_resumed_instance_is_due_now_before_new_instances(world: World) -> None:
    ref = world.create(queue="slow")
    world.pause(ref)
    world.advance(60)
    assert world.resume(ref) == DueRun(ref, "slow")
    row = world.row(ref)
    assert (row.status, row.run_at, row.next_check_at) == (Status.ACTIVE, world.now, world.now + GRACE)
    assert (row.wake_reason, row.priority, row.dispatch_count) == (WakeReason.RESUME, RESUMING, 0)
    assert row.updated_at == world.now


def test_terminating_removes_the_claim_and_cancels_open_steps(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.commit(claim, step("done", seq=1))
    world.commit(claim, step("started", StepStatus.PENDING, seq=2))
    world.commit(claim, step("asleep", StepStatus.WAITING, seq=3))
    world.pause(ref)
    world.terminate(ref, reason="wrong customer")
    row = world.row(ref)
    assert (row.status, row.claim_token, row.claimed_by, row.lease_until) == (Status.TERMINATED, None, None, None)
    assert (row.run_at, row.next_check_at, row.pause_requested) == (None, None, False)
    run = world.store.read(lambda tx: history.read_run(tx, claim.pk, 1))
    assert (run.reason, run.completed_at, run.output, run.error_name) == ("wrong customer", world.now, None, None)
    assert [row.status for row in world.steps(claim)] == ["completed", "cancelled", "cancelled"]


@pytest.mark.parametrize("state", ["due", "claimed", "waiting", "paused", "complete", "terminated"])
def test_restarting_begins_another_run_and_keeps_every_row_of_the_last(world: World, state: str) -> None:
    ref = world.create(params='{"n":1}', queue="slow")
    if state != "due":
        claim = world.claim(ref)
        world.commit(claim, step("charge"))
        world.send(ref, "approval", id="e-1")
    match state:
        case "waiting":
            world.wait(claim, event="refusal")
        case "paused":
            world.release(claim)
            world.pause(ref)
        case "complete":
            world.end_run(claim, RunOutcome(Status.COMPLETE, output='"done"'))
        case "terminated":
            world.terminate(ref, reason="by hand")
    before = world.read_all_rows()
    world.advance(60)
    assert world.restart(ref, reason="again") == DueRun(RunRef("order", "o-1", 2), "slow")

    row = world.row(ref)
    assert (row.run_number, row.status, row.wake_reason, row.priority) == (2, Status.ACTIVE, WakeReason.START, STARTING)
    assert (row.run_at, row.next_check_at, row.claim_token) == (world.now, world.now + GRACE, None)
    assert (row.dispatch_count, row.crash_count, row.pause_requested) == (0, 0, False)
    after = world.read_all_rows()
    assert after["workflow_step"] == before["workflow_step"]
    assert after["workflow_event"] == before["workflow_event"]
    first, second = (world.store.read(lambda tx, n=n: history.read_run(tx, row.pk, n)) for n in (1, 2))
    assert (second.params, second.created_at, second.output) == ('{"n":1}', world.now, None)
    if state in ("complete", "terminated"):
        assert after["workflow_run"][:1] == before["workflow_run"]
    else:
        assert (first.reason, first.completed_at) == ("again", world.now)


@pytest.mark.parametrize("end", ["terminate", "restart"])
def test_the_reason_of_a_restart_is_kept_when_the_run_ends_without_one(world: World, end: str) -> None:
    ref = world.create()
    world.restart(ref, reason="the bug is fixed")
    {"terminate": world.terminate, "restart": world.restart}[end](ref)
    assert [history.derive_run_status(world.row(ref), run) for run in _runs(world, ref, 2)] == ["terminated"] * 2
    assert [run.reason for run in _runs(world, ref, 2)] == ["the bug is fixed"] * 2
    other = world.create("o-2")
    world.restart(other, reason="the bug is fixed")
    {"terminate": world.terminate, "restart": world.restart}[end](other, reason="it is not")
    assert [run.reason for run in _runs(world, other, 2)] == ["the bug is fixed", "it is not"]


def _runs(world: World, ref: RunRef, count: int) -> list[Any]:
    pk = world.row(ref).pk
    return [world.store.read(lambda tx, n=n: history.read_run(tx, pk, n)) for n in range(1, count + 1)]


def test_a_run_is_identified_by_the_commit_id_that_started_it(world: World) -> None:
    ref = world.create()
    world.change(ref, lambda tx, row: lifecycle.restart(tx, row, grace=GRACE, commit_id="second", reason=None))
    world.restart(ref)
    found = [
        world.change(ref, lambda tx, row, by=by: runs.find_by_commit(tx, row, commit_id=by))
        for by in ("create-o-1", "second", "another")
    ]
    assert found == [1, 2, None]


def test_an_instance_of_another_transaction_is_not_taken_for_the_own_one(world: World) -> None:
    def insert(commit_id: str) -> bool:
        given = {"workflow": "order", "instance_id": "o-1", "params": "{}", "queue": "durable", "grace": GRACE}
        return world.store.transact(lambda tx: instances.insert(tx, **given, commit_id=commit_id))

    assert (insert("mine"), insert("mine"), insert("another")) == (True, True, False)
    world.restart(RunRef("order", "o-1", 1))
    assert (insert("mine"), insert("another")) == (True, False)
    assert len(world.read_all_rows()["workflow_instance"]) == 1


# --- events -------------------------------------------------------------------------------------


def _events(world: World, ref: RunRef, run: int = 1) -> Any:
    return world.store.read(lambda tx: history.read_events(tx, world.row(ref).pk, run))


def test_events_are_numbered_in_the_order_of_their_acceptance_not_by_the_clock(world: World) -> None:
    ref = world.create()
    world.send(ref, "approval", "1")
    world.advance(-3600)  # the server's clock was set back
    world.send(ref, "approval", "2")
    world.send(ref, "approval", "3")
    events = _events(world, ref)
    assert [event.payload for event in events] == [1, 2, 3]
    assert sorted({event.seq for event in events}) == [event.seq for event in events]


def test_several_events_fit_in_one_transaction_under_one_lock(world: World) -> None:
    ref = world.create()

    def work(tx: Any, row: Any) -> list[bool]:
        sent = [run_events.insert_event(tx, row, type_="a", payload=f"{n}", event_id=f"e-{n}") for n in (1, 2, 1, 3)]
        return [each is not None for each in sent]

    assert world.change(ref, work) == [True, True, False, True]
    assert [event.payload for event in _events(world, ref)] == [1, 2, 3]


def test_an_event_changes_the_version_that_readers_watch(world: World) -> None:
    ref = world.create()
    world.send(ref)
    assert world.row(ref).version == 2


def test_a_wait_is_woken_by_its_event(world: World) -> None:
    ref = world.create()
    world.wait(world.claim(ref), event="approval", for_=3600)
    world.advance(60)
    assert world.send(ref, "approval") is True
    row = world.row(ref)
    assert (row.status, row.run_at, row.next_check_at) == (Status.ACTIVE, world.now, world.now + GRACE)
    assert (row.wake_reason, row.priority) == (WakeReason.EVENT, RESUMING)
    assert world.send(ref, "approval") is False  # due already


def test_a_wait_that_has_expired_is_not_woken(world: World) -> None:
    for late, is_woken in [(3599.999999, True), (3600, False), (3600.5, False)]:
        ref = world.create(f"o-{late}")
        world.wait(world.claim(ref), event="approval", for_=3600)
        world.advance(late)
        assert world.send(ref, "approval") is is_woken, late


def test_an_instance_that_does_not_wait_is_not_woken(world: World) -> None:
    due, claimed, paused = (world.create(name) for name in ("due", "claimed", "paused"))
    world.claim(claimed)
    world.wait(world.claim(paused), event="approval")
    world.pause(paused)
    for ref in (due, claimed, paused):
        before = world.row(ref)
        assert world.send(ref, "approval") is False
        after = world.row(ref)
        assert (after.status, after.run_at, after.next_check_at) == (before.status, before.run_at, before.next_check_at)
