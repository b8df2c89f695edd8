"""Finding due work: sweep, the agenda, undo_dispatch."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import sqlalchemy as sa

from celery_durable.model import DueRun, RunOutcome, Status, WakeReason, to_us
from celery_durable.redispatch import QueueProgress
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances
from celery_durable.store.runs import claims, leases, schedule
from celery_durable.store.runs.claims import RESUMING, STARTING, ClaimRequest
from celery_durable.store.runs.schedule import QueueAgenda
from tests.store.world import GRACE, LEASE, REDISPATCH, World, seconds, step, sweep_in


def test_a_dispatch_message_is_not_resent_while_nothing_is_known_about_its_queue(world: World) -> None:
    """The longest queue in the world gets no second copy: the first waits in it."""
    ref = world.create(queue="slow")
    sent_at = world.now
    assert world.sweep() == []
    world.advance(2)
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.dispatch_count, row.sent_at, row.next_check_at) == (0, sent_at, sent_at + REDISPATCH.longest)
    world.advance(597.999999)
    assert (world.sweep(), world.take_lost_runs("slow")) == ([], [])
    world.advance(0.000001)
    assert world.sweep() == [DueRun(ref, "slow")]
    row = world.row(ref)
    assert (row.dispatch_count, row.sent_at, row.next_check_at) == (1, world.now, world.now + REDISPATCH.longest)
    assert (row.status, row.run_at) == (Status.ACTIVE, sent_at)


def test_a_dispatch_message_is_lost_if_a_later_one_was_claimed(world: World) -> None:
    early = world.create("early")
    world.advance(1)
    late = world.create("late")
    assert world.take_lost_runs(claimed=world.row(early).sent_at) == []
    assert world.take_lost_runs(claimed=world.row(late).sent_at) == [DueRun(early, "durable")]
    assert world.take_lost_runs(claimed=world.row(late).sent_at) == []  # its copy is under way
    assert (world.row(early).dispatch_count, world.row(early).sent_at) == (1, world.now)


def test_a_dispatch_message_is_lost_after_five_seconds_if_its_queue_was_empty_since(world: World) -> None:
    ref = world.create()
    world.advance(4.999999)
    assert world.take_lost_runs(empty=world.now - seconds(4.999999)) == []  # at the moment at which it was sent
    assert world.take_lost_runs(empty=world.now) == []
    world.advance(0.000001)
    assert world.take_lost_runs(empty=world.now - seconds(3)) == [DueRun(ref, "durable")]


def test_a_row_of_an_empty_queue_is_checked_again_when_its_message_counts_as_lost(world: World) -> None:
    """Where no thread looks all the time: a task of beat, a test that moves its clock."""
    ref = world.create()
    world.advance(2)
    assert world.sweep(progress=QueueProgress(empty_lately=world.now)) == []
    assert world.row(ref).next_check_at == world.now + seconds(3)
    empty_at = world.now
    world.advance(3)
    assert world.sweep(progress=QueueProgress(empty=empty_at)) == [DueRun(ref, "durable")]


def test_an_empty_queue_proves_a_loss_after_ever_longer_times(world: World) -> None:
    """A worker that prefetches without a limit has emptied the queue, and is busy."""
    ref = world.create()
    gaps = []
    for _ in range(9):
        started = world.now
        while not world.take_lost_runs(empty=world.now):
            world.advance(5)
        gaps.append((world.now - started).total_seconds())
    assert gaps == [5, 5, 10, 20, 40, 80, 160, 320, 600]
    assert world.row(ref).dispatch_count == 9


def test_only_dispatch_messages_of_due_unclaimed_runs_can_be_lost(world: World) -> None:
    world.claim(world.create("claimed"))
    world.wait(world.claim(world.create("asleep")), event=None, for_=86400)
    world.pause(world.create("paused"))
    world.end_run(world.claim(world.create("complete")), RunOutcome(Status.COMPLETE, output="1"))
    world.terminate(world.create("terminated"))
    world.undo_dispatch(world.create("not sent"))
    world.create("elsewhere", queue="elsewhere")
    due = world.create("due")
    world.advance(3600)
    assert world.take_lost_runs(claimed=world.now, empty=world.now) == [DueRun(due, "durable")]


def test_lost_dispatch_messages_are_found_oldest_first_up_to_the_limit(world: World) -> None:
    refs = []
    for number in range(4):
        refs.append(world.create(f"o-{number}"))
        world.advance(1)
    assert world.take_lost_runs(limit=3, claimed=world.now) == [DueRun(ref, "durable") for ref in refs[:3]]
    assert world.take_lost_runs(limit=3, claimed=world.now) == [DueRun(refs[3], "durable")]


_MINUTES = st.integers(0, 700)


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    sent_messages=st.lists(st.tuples(_MINUTES, st.integers(0, 14)), min_size=1, max_size=8),
    claimed=st.none() | _MINUTES,
    empty=st.none() | _MINUTES,
)
def test_the_statement_finds_the_same_messages_as_the_python_rule(
    world: World, sent_messages: list[tuple[int, int]], claimed: int | None, empty: int | None
) -> None:
    now, i = world.now, world.store.tables.instance
    known = {"claimed": claimed, "empty": empty}
    progress = {name: None if age is None else now - seconds(age) for name, age in known.items()}
    with world.store.engine.begin() as connection:
        connection.execute(sa.delete(i))
    for number, (age, dispatch_count) in enumerate(sent_messages):
        ref = world.create(f"o-{number}")
        sent = {"sent_at": to_us(now - seconds(age)), "dispatch_count": dispatch_count}
        with world.store.engine.begin() as connection:
            connection.execute(sa.update(i).where(i.c.instance_id == ref.instance_id).values(**sent))
    with world.store.engine.begin() as connection:
        connection.execute(sa.delete(world.store.tables.run))
    rule = QueueProgress(**progress)
    lost = {
        f"o-{number}"
        for number, (age, dispatch_count) in enumerate(sent_messages)
        if REDISPATCH.is_lost(now - seconds(age), dispatch_count, rule, now)
    }
    assert {due.ref.instance_id for due in world.take_lost_runs(**progress)} == lost


def test_a_due_run_without_a_dispatch_message_is_published_at_once(world: World) -> None:
    ref = world.create()
    world.undo_dispatch(ref)
    assert world.sweep() == [DueRun(ref, "durable")]


def test_a_claim_resets_the_count_of_dispatches(world: World) -> None:
    ref = world.create()
    world.undo_dispatch(ref)
    world.sweep()
    world.release(world.claim(ref))
    assert (world.row(ref).dispatch_count, world.row(ref).sent_at) == (0, world.now)


def test_a_suspended_run_is_found_when_its_timer_is_due(world: World) -> None:
    ref = world.create()
    world.wait(world.claim(ref), event=None, for_=60)
    world.advance(59)
    assert world.sweep(priority=RESUMING) == []
    world.advance(1)
    assert world.sweep(priority=RESUMING) == [DueRun(ref, "durable")]


def test_a_sweep_before_a_run_is_due_publishes_nothing_and_postpones_it(world: World) -> None:
    ref = world.create(run_at=world.now + seconds(60))
    i = world.store.tables.instance
    world.store.transact(lambda tx: tx.execute(i.update().values(next_check_at=world.store.runtime.clock())))
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.next_check_at, row.dispatch_count) == (world.now + seconds(60), 0)


def test_a_live_claim_is_checked_again_when_its_lease_ends(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(20)
    world.store.transact(lambda tx: leases.renew(tx, [claim], lease=LEASE))
    world.advance(15)  # past the end of the lease as it was claimed, which is when the sweep looks
    before = world.row(ref)
    assert world.sweep() == []
    after = world.row(ref)
    assert after.next_check_at == before.lease_until == world.now + seconds(15)
    assert (after.claim_token, after.crash_count, after.version) == (claim.token, 0, before.version)


def test_an_expired_claim_is_released_as_a_crash(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(30)
    before = world.row(ref)
    assert world.sweep() == [DueRun(ref, "durable")]
    row = world.row(ref)
    assert (row.claim_token, row.claimed_by, row.lease_until) == (None, None, None)
    assert (row.status, row.crash_count, row.wake_reason, row.dispatch_count) == (Status.ACTIVE, 1, WakeReason.RETRY, 1)
    assert (row.run_at, row.sent_at, row.next_check_at) == (world.now, world.now, world.now + REDISPATCH.longest)
    assert (row.version, row.updated_at) == (before.version + 1, world.now)
    assert world.claim(ref).crash_count == 1


def test_a_run_that_crashed_before_is_published_after_a_delay(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(30)
    world.claim(ref)  # taken over: one crash
    world.advance(30)
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.crash_count, row.run_at, row.next_check_at) == (2, *[world.now + seconds(1)] * 2)
    assert world.try_claim(ref) is None
    world.advance(1)
    assert world.sweep() == [DueRun(ref, "durable")]
    assert world.claim(ref).crash_count == 2


def test_an_expired_claim_with_a_pause_request_leaves_the_instance_paused(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.pause(ref)
    world.advance(30)
    before = world.row(ref)
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.status, row.next_check_at, row.pause_requested, row.crash_count) == (Status.PAUSED, None, False, 1)
    assert (row.version, row.updated_at) == (before.version + 1, world.now)


def test_a_sweep_after_an_outage_releases_no_expired_claim(world: World) -> None:
    claimed, waiting = world.create("claimed"), world.create("waiting")
    claim = world.claim(claimed)
    world.undo_dispatch(waiting)
    world.advance(3600)
    assert world.sweep(may_expire=False) == [DueRun(waiting, "durable")]
    row = world.row(claimed)
    assert (row.claim_token, row.crash_count, row.next_check_at) == (claim.token, 0, world.now + LEASE / 3)
    world.commit(claim, step())  # the heartbeat that the outage held up


def test_a_claim_that_stays_expired_for_one_lease_is_released_even_after_an_outage(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(30)
    for _ in range(2):
        assert world.sweep(may_expire=False) == []
        world.advance(10)
    world.store.transact(lambda tx: leases.renew(tx, [claim], lease=LEASE))
    assert world.sweep(may_expire=False) == []
    world.advance(30)
    for _ in range(3):  # the count began anew
        assert world.sweep(may_expire=False) == []
        assert world.row(ref).claim_token == claim.token
        world.advance(10)
    assert world.sweep(may_expire=False) == [DueRun(ref, "durable")]
    assert world.row(ref).crash_count == 1


def test_a_sweep_of_one_queue_leaves_the_others_alone(world: World) -> None:
    full, other = world.create("full", queue="full"), world.create("other", queue="other")
    world.claim(world.create("claimed", queue="full"))
    world.advance(3600)
    before = world.row(full)
    found = world.store.transact(lambda tx: sweep_in(tx, queue="other", priority=STARTING, limit=9))
    assert found == ([DueRun(other, "other")], 1)
    assert world.row(full) == before
    assert {due.ref.instance_id for due in world.sweep()} == {"full", "claimed"}


def test_a_sweep_reads_no_rows_without_work(world: World) -> None:
    world.pause(world.create("paused"))
    world.end_run(world.claim(world.create("complete")), RunOutcome(Status.COMPLETE, output="1"))
    world.terminate(world.create("terminated"))
    world.advance(86400)
    assert [world.store.transact(lambda tx, p=p: sweep_in(tx, priority=p, limit=9)) for p in (0, 1)] == [([], 0)] * 2


def test_a_sweep_reads_one_priority(world: World) -> None:
    started, resumed = world.create("started"), world.create("resumed")
    world.release(world.claim(resumed))
    world.advance(3600)
    assert world.sweep(priority=RESUMING) == [DueRun(resumed, "durable")]
    assert world.sweep(priority=STARTING) == [DueRun(started, "durable")]


def test_a_sweep_takes_up_to_its_limit_oldest_first(world: World) -> None:
    refs = []
    for n in range(5):
        refs.append(world.create(f"o-{n}"))
        world.advance(1)
    world.advance(3600)
    publish, looked_at = world.store.transact(lambda tx: sweep_in(tx, priority=STARTING, limit=3))
    assert (publish, looked_at) == ([DueRun(ref, "durable") for ref in refs[:3]], 3)
    assert world.sweep() == [DueRun(ref, "durable") for ref in refs[3:]]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_two_sweeps_at_once_take_different_instances(world: World) -> None:
    refs = {world.create(f"o-{n}") for n in range(6)}
    world.advance(3600)
    with world.store.engine.begin() as first, world.store.engine.begin() as second:
        taken = [sweep_in(Tx(conn, world.store), priority=STARTING, limit=3)[0] for conn in (first, second)]
    assert [len(due_runs) for due_runs in taken] == [3, 3]
    assert {due.ref for due_runs in taken for due in due_runs} == refs


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_sweep_skips_a_locked_instance(world: World) -> None:
    busy, idle = world.create("busy"), world.create("idle")
    world.advance(3600)
    with world.store.engine.begin() as connection:
        request = ClaimRequest(busy, token="t", task_id="task-1", node="task-1", lease=LEASE)
        claims.claim(Tx(connection, world.store), request)
        assert world.sweep() == [DueRun(idle, "durable")]


# --- the next due time ----------------------------------------------------------------------------------


def test_the_next_poll_is_the_earliest_of_all(world: World) -> None:
    def read_next() -> object:
        return world.store.read(schedule.read).next_at

    assert read_next() is None
    world.create("o-1", run_at=world.now + seconds(60))
    assert read_next() == world.now + seconds(60)
    world.release(world.claim(world.create("o-2")))
    assert read_next() == world.now + GRACE
    world.create("o-3", run_at=world.now + seconds(1))
    assert read_next() == world.now + seconds(1)


def test_the_agenda_names_each_queue_with_its_earliest_work(world: World) -> None:
    now = world.now
    world.create("due", queue="b", run_at=now + seconds(9))
    world.create("sooner", queue="b", run_at=now + seconds(5))
    world.release(world.claim(world.create("resumed", queue="b")))
    world.create("sent", queue="c")
    world.end_run(world.claim(world.create("over", queue="d")), RunOutcome(Status.COMPLETE, output="1"))
    world.terminate(world.create("terminated", queue="d"))
    world.pause(world.create("paused", queue="d"))
    world.wait(world.claim(world.create("asleep", queue="e")), for_=60)
    unknown = world.create("unknown", queue="f")
    world.store.transact(lambda tx: claims.postpone(tx, unknown, delay=seconds(6)))
    found = world.store.read(schedule.read)
    assert (found.now, found.next_emission_at, found.next_outbox_at) == (now, None, None)
    assert found.queues == {
        "b": QueueAgenda({RESUMING: now + GRACE, STARTING: now + seconds(5)}, oldest_sent_at=now),
        "c": QueueAgenda({STARTING: now + GRACE}, oldest_sent_at=now),
        "e": QueueAgenda({RESUMING: now + seconds(60)}),
        "f": QueueAgenda({STARTING: now + seconds(6)}),
    }
    assert (found.queues_by_due_time(STARTING), found.next_at) == (["c", "b", "f"], now + GRACE)


# --- undo_dispatch ------------------------------------------------------------------------------


def test_messages_that_the_broker_did_not_accept_are_offered_again_soon(world: World) -> None:
    ref = world.create()
    for _ in range(3):
        world.undo_dispatch(ref, delay=1)
        row = world.row(ref)
        assert (row.dispatch_count, row.sent_at, row.next_check_at) == (0, None, world.now + seconds(1))
        assert world.sweep() == []
        world.advance(1)
        assert world.sweep() == [DueRun(ref, "durable")]


def test_undo_dispatch_does_not_change_claimed_runs(world: World) -> None:
    claimed, paused, asleep = (world.create(name) for name in ("claimed", "paused", "asleep"))
    world.claim(claimed)
    world.pause(paused)
    world.wait(world.claim(asleep), event=None, for_=86400)
    before = world.read_all_rows()
    world.undo_dispatch(claimed, paused, asleep, delay=1)
    assert world.read_all_rows() == before


def test_undo_dispatch_does_not_change_a_restarted_run(world: World) -> None:
    ref = world.create()
    world.restart(ref)
    before = world.read_all_rows()
    world.undo_dispatch(ref, delay=1)
    assert world.read_all_rows() == before


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_undo_dispatch_skips_locked_rows(world: World) -> None:
    free, busy = world.create("free"), world.create("busy")
    world.advance(3600)
    assert len(world.sweep()) == 2
    before = world.row(busy)
    with world.hold_transaction() as tx:
        instances.lock(tx, busy.workflow, busy.instance_id)
        world.undo_dispatch(busy, free, delay=1)
    assert (world.row(free).dispatch_count, world.row(free).next_check_at) == (0, world.now + seconds(1))
    assert world.row(busy) == before
