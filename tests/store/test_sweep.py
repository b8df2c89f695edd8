"""Finding due work: sweep, next_poll, unsend."""

from __future__ import annotations

import pytest

from celery_durable.model import Due, Ref, Status, Wake
from celery_durable.store import claims, instances, sweeps
from celery_durable.store.claims import Ending
from celery_durable.store.engine import Tx
from celery_durable.store.instances import RESUMING, STARTING
from celery_durable.store.sweeps import Redispatch
from tests.store.world import GRACE, LEASE, World, seconds, step, sweep_in


def test_a_sweep_finds_what_nobody_claimed_within_the_grace_time(world: World) -> None:
    ref = world.create(queue="slow")
    assert world.sweep() == []  # its message may still be on the way
    world.advance(2)
    assert world.sweep() == [Due(ref, "slow")]
    row = world.row(ref)
    assert (row.dispatches, row.poll_at) == (1, world.now + seconds(15))
    assert (row.status, row.run_at) == (Status.ACTIVE, world.now - seconds(2))


def test_what_stays_unclaimed_is_offered_again_ever_more_rarely(world: World) -> None:
    ref = world.create()
    world.advance(2)
    gaps = []
    for _ in range(8):
        assert world.sweep() == [Due(ref, "durable")]
        gap = (world.row(ref).poll_at - world.now).total_seconds()
        world.advance(gap - 0.000001)
        assert world.sweep() == []
        world.advance(0.000001)
        gaps.append(gap)
    assert gaps == [15, 30, 60, 120, 240, 480, 600, 600]


def test_the_time_until_the_next_offer_doubles_up_to_the_longest() -> None:
    redispatch = Redispatch(first=seconds(15), longest=seconds(600))
    assert redispatch.after(0) == redispatch.after(1) == seconds(15)
    assert redispatch.after(10**6) == seconds(600)


def test_a_claim_starts_the_count_of_offers_anew(world: World) -> None:
    ref = world.create()
    world.advance(2)
    world.sweep()
    world.release(world.claim(ref))
    assert world.row(ref).dispatches == 0


def test_a_sleeper_is_found_when_its_time_has_come(world: World) -> None:
    ref = world.create()
    world.wait(world.claim(ref), event=None, for_=60)
    world.advance(59)
    assert world.sweep(priority=RESUMING) == []
    world.advance(1)
    assert world.sweep(priority=RESUMING) == [Due(ref, "durable")]


def test_a_sweep_that_comes_too_early_to_a_sleeper_publishes_nothing_and_sets_its_alarm_again(world: World) -> None:
    ref = world.create(run_at=world.now + seconds(60))
    i = world.store.tables.instance
    world.store.transact(lambda tx: tx.execute(i.update().values(poll_at=world.store.runtime.clock())))
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.poll_at, row.dispatches) == (world.now + seconds(60), 0)


def test_a_live_claim_is_looked_at_again_when_it_ends(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(20)
    world.store.transact(lambda tx: claims.renew(tx, [claim], lease=LEASE))
    world.advance(15)  # past the end of the lease as it was claimed, which is when the sweep looks
    before = world.row(ref)
    assert world.sweep() == []
    after = world.row(ref)
    assert after.poll_at == before.lease_until == world.now + seconds(15)
    assert (after.claim_token, after.crash_count, after.version) == (claim.token, 0, before.version)


def test_an_expired_claim_is_released_as_a_crash(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(30)
    before = world.row(ref)
    assert world.sweep() == [Due(ref, "durable")]
    row = world.row(ref)
    assert (row.claim_token, row.claimed_by, row.lease_until) == (None, None, None)
    assert (row.status, row.crash_count, row.wake, row.dispatches) == (Status.ACTIVE, 1, Wake.RETRY, 1)
    assert (row.run_at, row.poll_at) == (world.now, world.now + seconds(15))
    assert (row.version, row.updated_at) == (before.version + 1, world.now)
    assert world.claim(ref).crash_count == 1


def test_an_instance_that_crashed_before_rests_before_it_is_published(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(30)
    world.claim(ref)  # taken over: one crash
    world.advance(30)
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.crash_count, row.run_at, row.poll_at) == (2, *[world.now + seconds(1)] * 2)
    assert world.try_claim(ref) is None
    world.advance(1)
    assert world.sweep() == [Due(ref, "durable")]
    assert world.claim(ref).crash_count == 2


def test_an_expired_claim_that_was_asked_to_pause_leaves_the_instance_paused(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.pause(ref)
    world.advance(30)
    before = world.row(ref)
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.status, row.poll_at, row.pause_requested, row.crash_count) == (Status.PAUSED, None, False, 1)
    assert (row.version, row.updated_at) == (before.version + 1, world.now)


def test_after_an_outage_a_sweep_expires_no_claim(world: World) -> None:
    claimed, waiting = world.create("claimed"), world.create("waiting")
    claim = world.claim(claimed)
    world.advance(3600)
    assert world.sweep(may_expire=False) == [Due(waiting, "durable")]
    row = world.row(claimed)
    assert (row.claim_token, row.crash_count, row.poll_at) == (claim.token, 0, world.now + LEASE / 3)
    world.commit(claim, step())  # the heartbeat that the outage held up


def test_a_claim_that_stays_expired_for_a_lease_is_released_by_a_sweep_that_knows_of_no_outage(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(30)
    for _ in range(2):
        assert world.sweep(may_expire=False) == []
        world.advance(10)
    world.store.transact(lambda tx: claims.renew(tx, [claim], lease=LEASE))
    assert world.sweep(may_expire=False) == []
    world.advance(30)
    for _ in range(3):  # the count began anew
        assert world.sweep(may_expire=False) == []
        assert world.row(ref).claim_token == claim.token
        world.advance(10)
    assert world.sweep(may_expire=False) == [Due(ref, "durable")]
    assert world.row(ref).crash_count == 1


def test_a_sweep_leaves_the_queues_alone_that_it_is_told_to(world: World) -> None:
    full, other = world.create("full", queue="full"), world.create("other", queue="other")
    world.claim(world.create("claimed", queue="full"))
    world.advance(30)
    before = world.row(full)
    found = world.store.transact(lambda tx: sweep_in(tx, priority=STARTING, limit=9, without=["full", "x"]))
    assert found == ([Due(other, "other")], 1)
    assert world.row(full) == before
    assert {due.ref.instance_id for due in world.sweep()} == {"full", "claimed"}


@pytest.mark.parametrize("state", ["paused", "complete", "terminated"])
def test_what_is_at_rest_costs_a_sweep_nothing(world: World, state: str) -> None:
    ref = world.create()
    match state:
        case "paused":
            world.pause(ref)
        case "complete":
            world.settle(world.claim(ref), Ending(Status.COMPLETE, output="1"))
        case _:
            world.terminate(ref)
    world.advance(86400)
    assert [world.store.transact(lambda tx, p=p: sweep_in(tx, priority=p, limit=9)) for p in (0, 1)] == [([], 0)] * 2


def test_a_sweep_looks_at_one_priority(world: World) -> None:
    started, resumed = world.create("started"), world.create("resumed")
    world.release(world.claim(resumed))
    world.advance(2)
    assert world.sweep(priority=RESUMING) == [Due(resumed, "durable")]
    assert world.sweep(priority=STARTING) == [Due(started, "durable")]


def test_a_sweep_takes_up_to_its_limit_oldest_first(world: World) -> None:
    refs = []
    for n in range(5):
        refs.append(world.create(f"o-{n}"))
        world.advance(1)
    world.advance(2)
    publish, looked_at = world.store.transact(lambda tx: sweep_in(tx, priority=STARTING, limit=3))
    assert (publish, looked_at) == ([Due(ref, "durable") for ref in refs[:3]], 3)
    assert world.sweep() == [Due(ref, "durable") for ref in refs[3:]]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_two_sweeps_at_once_take_different_instances(world: World) -> None:
    refs = {world.create(f"o-{n}") for n in range(6)}
    world.advance(2)
    with world.store.engine.begin() as first, world.store.engine.begin() as second:
        taken = [sweep_in(Tx(conn, world.store), priority=STARTING, limit=3)[0] for conn in (first, second)]
    assert [len(dues) for dues in taken] == [3, 3]
    assert {due.ref for dues in taken for due in dues} == refs


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_sweep_passes_over_an_instance_that_somebody_works_on(world: World) -> None:
    busy, idle = world.create("busy"), world.create("idle")
    world.advance(2)
    with world.store.engine.begin() as connection:
        claims.claim(Tx(connection, world.store), busy, token="t", claimed_by="task-1", lease=LEASE)
        assert world.sweep() == [Due(idle, "durable")]


# --- next_poll ----------------------------------------------------------------------------------


def test_the_next_poll_is_the_earliest_of_all(world: World) -> None:
    def next_poll() -> object:
        return world.store.read(sweeps.next_poll)

    assert next_poll() == (None, world.now)
    world.create("o-1", run_at=world.now + seconds(60))
    assert next_poll() == (world.now + seconds(60), world.now)
    world.release(world.claim(world.create("o-2")))
    assert next_poll() == (world.now + GRACE, world.now)
    world.create("o-3", run_at=world.now + seconds(1))
    assert next_poll() == (world.now + seconds(1), world.now)


# --- unsend -------------------------------------------------------------------------------------


def _unsend(world: World, *refs: Ref) -> None:
    dues = [Due(ref, "durable") for ref in refs]
    world.store.transact(lambda tx: sweeps.unsend(tx, dues, delay=seconds(1)))


def test_what_the_broker_did_not_take_is_offered_again_soon(world: World) -> None:
    ref = world.create()
    world.advance(2)
    for _ in range(3):
        assert world.sweep() == [Due(ref, "durable")]
        _unsend(world, ref)
        row = world.row(ref)
        assert (row.dispatches, row.poll_at) == (0, world.now + seconds(1))
        world.advance(1)


def test_what_was_claimed_in_spite_of_the_broker_is_left_alone(world: World) -> None:
    claimed, paused, asleep = (world.create(name) for name in ("claimed", "paused", "asleep"))
    world.claim(claimed)
    world.pause(paused)
    world.wait(world.claim(asleep), event=None, for_=86400)
    before = world.everything()
    _unsend(world, claimed, paused, asleep)
    assert world.everything() == before


def test_a_run_that_was_restarted_meanwhile_is_left_alone(world: World) -> None:
    ref = world.create()
    world.restart(ref)
    before = world.everything()
    _unsend(world, ref)
    assert world.everything() == before


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_what_somebody_has_locked_is_neither_waited_for_nor_changed(world: World) -> None:
    free, busy = world.create("free"), world.create("busy")
    world.advance(2)
    assert len(world.sweep()) == 2
    before = world.row(busy)
    with world.holding() as tx:
        instances.lock(tx, busy.workflow, busy.instance_id)
        _unsend(world, busy, free)
    assert (world.row(free).dispatches, world.row(free).poll_at) == (0, world.now + seconds(1))
    assert world.row(busy) == before
