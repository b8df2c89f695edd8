"""Two at once. One transaction holds the instance's lock while the other, on its own connection, waits for it."""

from __future__ import annotations

from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable.errors import Superseded
from celery_durable.model import Claim, InstanceRow, ReleaseOutcome, RunOutcome, RunRef, Status, StepStatus, StepType
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs import claims, holds, leases, limits, releases
from celery_durable.store.runs.claims import ClaimRequest
from celery_durable.store.runs.holds import LimitKey, Waiter
from celery_durable.store.runs.limits import Reply, Request
from celery_durable.values import LimitUse
from tests.store.world import GRACE, LEASE, World, seconds, send_in, step, sweep_in, wait_in, write_in

SERVERS = ["postgresql", "mariadb"]
WAIT = step("approved", StepStatus.WAITING, type=StepType.WAIT, event_type="approval", wake_in=seconds(3600))


def lock(tx: Tx, ref: RunRef) -> InstanceRow:
    return instances.lock(tx, ref.workflow, ref.instance_id)


def claim_in(tx: Tx, ref: RunRef, token: str) -> Claim | None:
    return claims.take_over(tx, ClaimRequest(ref, token=token, task_id="task-2", node="task-2", lease=LEASE))


# --- one limit ------------------------------------------------------------------------------------


def ask(tx: Tx, claim: Claim) -> Reply:
    uses = [LimitUse("stripe", "", "", 1, None)]
    waiter = Waiter(claim.pk, claim.ref.run_number, "charge")
    ((reply,), _) = limits.ask(tx, [Request(waiter, uses, claim.token, is_new=True, resumes=False)])
    return reply


def test_of_two_steps_that_ask_at_once_one_gets_the_limit_and_the_other_waits(world: World) -> None:
    """Both counted before either had committed, and their numbers said nothing about the order (hatchet#4778)."""
    first, second, third = (world.claim(world.create(f"o-{n}")) for n in range(3))
    world.store.transact(lambda tx: ask(tx, second))  # the limit has its row from now on
    world.store.transact(lambda tx: holds.release(tx, second.pk))
    with world.hold_transaction() as tx:
        assert ask(tx, first) == Reply(holds=True)
        asker = world.start_blocked(world.store.transact, lambda tx: ask(tx, third))
    assert asker.result() == Reply(holds=False)
    assert world.store.transact(lambda tx: ask(tx, second)) == Reply(holds=False)
    world.store.transact(lambda tx: holds.release(tx, first.pk))
    granted = world.store.transact(lambda tx: limits.serve(tx, LimitKey("stripe", ""))).granted
    assert [waiter.instance_pk for waiter in granted] == [third.pk]


# --- wait against send_event --------------------------------------------------------------------


def test_a_wait_that_comes_second_finds_the_event(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        assert send_in(tx, ref) is False
        runner = world.start_blocked(world.wait, claim)
    assert runner.result() is ReleaseOutcome.DUE
    assert world.try_claim(ref) is not None


def test_an_event_that_comes_second_finds_the_wait(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        assert wait_in(tx, claim, WAIT) is ReleaseOutcome.WAITING
        sender = world.start_blocked(world.send, ref)
    assert sender.result() is True
    assert world.try_claim(ref) is not None


def test_no_wake_up_is_ever_lost(live: World) -> None:
    """Both start at the same time, whichever wins: afterwards the instance is due and the event there."""
    for n in range(25):
        ref = live.create(f"o-{n}")
        claim = live.claim(ref)
        gate = Barrier(2)

        def at_once(work: Any, *args: Any, gate: Barrier = gate) -> Any:
            gate.wait()
            return work(*args)

        runner = live.start(at_once, live.wait, claim)
        sender = live.start(at_once, live.send, ref)
        assert {runner.result(), sender.result()} in ({ReleaseOutcome.DUE, False}, {ReleaseOutcome.WAITING, True})
        assert live.try_claim(ref) is not None


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_no_wake_up_is_lost_in_a_repeatable_read_session(world: World) -> None:
    """MariaDB's default isolation: what the caller's session read first is what it goes on seeing."""
    ref = world.create()
    claim = world.claim(ref)
    engine = sa.create_engine(world.store.engine.url)  # the application's own, as it came
    with Session(engine) as session:
        step_table = world.store.tables.step
        assert session.execute(sa.select(step_table)).all() == []
        assert world.wait(claim) is ReleaseOutcome.WAITING
        assert session.execute(sa.select(step_table)).all() == []  # the past indeed
        assert send_in(world.store.join(session), ref) is True
        session.commit()
    engine.dispose()
    assert world.try_claim(ref) is not None


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("meanwhile", ["wait", "event"])
def test_a_repeatable_read_session_gets_a_serialization_error(world: World, meanwhile: str) -> None:
    ref = world.create()
    claim = world.claim(ref)
    engine = sa.create_engine(world.store.engine.url, isolation_level="REPEATABLE READ")
    with Session(engine) as session:
        session.execute(sa.select(world.store.tables.instance)).all()
        if meanwhile == "wait":
            world.wait(claim)
        else:
            world.send(ref, "refusal")
        with pytest.raises(sa.exc.OperationalError, match="could not serialize access due to concurrent update"):
            send_in(world.store.join(session), ref)
    engine.dispose()


def test_two_senders_of_one_event_id_add_one_event(world: World) -> None:
    ref = world.create()
    with world.hold_transaction() as tx:
        send_in(tx, ref, id="e-1")
        rival = world.start_blocked(world.send, ref, "approval", "{}", "e-1")
    rival.result()
    assert len(world.read_all_rows()["workflow_event"]) == 1


def test_events_are_numbered_in_the_order_of_their_locks(world: World) -> None:
    ref = world.create()
    with world.hold_transaction() as tx:
        send_in(tx, ref, payload='"first"')
        rival = world.start_blocked(world.send, ref, "approval", '"second"')
        send_in(tx, ref, payload='"still first"')
    rival.result()
    e = world.store.tables.event.c
    query = sa.select(e.payload).order_by(e.seq)
    assert world.store.read(lambda tx: tx.execute(query).scalars().all()) == ['"first"', '"still first"', '"second"']


# --- pause against the runner -------------------------------------------------------------------


def test_a_step_commit_after_a_pause_reads_the_request(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        lifecycle.pause(tx, lock(tx, ref))
        runner = world.start_blocked(world.commit, claim, step())
    assert runner.result().pause_requested is True
    assert [row.step_key for row in world.steps(claim)] == ["charge"]


def test_a_pause_after_a_step_commit_finds_the_claim(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        write_in(tx, claim, step())
        rival = world.start_blocked(world.pause, ref)
    rival.result()
    row = world.row(ref)
    assert (row.status, row.pause_requested, row.claim_token) == (Status.ACTIVE, True, claim.token)
    assert world.release(claim) is ReleaseOutcome.PAUSED


def test_a_pause_after_the_release_takes_effect_at_once(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        wait_in(tx, claim, WAIT)
        rival = world.start_blocked(world.pause, ref)
    rival.result()
    row = world.row(ref)
    assert (row.status, row.next_check_at, row.pause_requested) == (Status.PAUSED, None, False)


def test_a_release_after_a_pause_obeys_it(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        lifecycle.pause(tx, lock(tx, ref))
        runner = world.start_blocked(world.wait, claim)
    assert runner.result() is ReleaseOutcome.PAUSED


# --- restart, terminate and the end against the runner ------------------------------------------


def _restart(tx: Tx, ref: RunRef) -> None:
    lifecycle.restart(tx, lock(tx, ref), grace=GRACE, commit_id="restart", reason=None)


def _terminate(tx: Tx, ref: RunRef) -> None:
    lifecycle.terminate(tx, lock(tx, ref), reason=None)


@pytest.mark.parametrize("end", [_restart, _terminate], ids=["restart", "terminate"])
@pytest.mark.parametrize("form", ["plain", "in order", "end"])
def test_a_step_commit_after_the_end_writes_nothing(world: World, end: Any, form: str) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        end(tx, ref)
        runner = {
            "plain": lambda: world.start_blocked(world.commit, claim, step()),
            "in order": lambda: world.start_blocked(world.write, claim, step()),
            "end": lambda: world.start_blocked(world.end_run, claim, RunOutcome(Status.COMPLETE, output="1")),
        }[form]()
    with pytest.raises(Superseded):
        runner.result()
    assert world.read_all_rows()["workflow_step"] == []
    assert world.row(ref).status in (Status.ACTIVE, Status.TERMINATED)


def test_a_restart_after_a_step_commit_leaves_the_step_to_the_old_run(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        write_in(tx, claim, step())
        rival = world.start_blocked(world.restart, ref)
    assert rival.result().ref.run_number == 2
    assert [row.step_key for row in world.steps(claim)] == ["charge"]
    assert world.steps(world.claim(rival.result().ref)) == ()


def test_a_sender_that_waited_for_the_lock_sees_the_end(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        releases.end_run(tx, claim, RunOutcome(Status.COMPLETE, output="1"))
        sender = world.start_blocked(world.change, ref, lambda tx, row: row.status)
    assert sender.result() is Status.COMPLETE


# --- claims -------------------------------------------------------------------------------------


def test_of_two_messages_at_once_one_gets_the_claim(world: World) -> None:
    ref = world.create()
    with world.hold_transaction() as tx:
        assert claim_in(tx, ref, "mine") is not None
        rival = world.start_blocked(world.try_claim, ref)
    assert rival.result() is None
    assert world.row(ref).claim_token == "mine"


def test_a_message_that_waited_for_a_claim_that_failed_gets_it(world: World) -> None:
    ref = world.create()
    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        claim_in(Tx(connection, world.store), ref, "never committed")
        rival = world.start_blocked(world.try_claim, ref)
        transaction.rollback()
    assert rival.result() is not None


@pytest.mark.parametrize("end", ["commits", "rolls back"])
def test_find_claim_waits_for_a_transaction_that_may_still_commit(world: World, end: str) -> None:
    ref = world.create()

    def find(tx: Tx) -> Claim | None:
        return claims.find_claim(tx, ref, token="in doubt", lease=LEASE)

    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        made = claim_in(Tx(connection, world.store), ref, "in doubt")
        looking = world.start_blocked(world.store.transact, find)
        transaction.commit() if end == "commits" else transaction.rollback()
    assert made is not None
    assert looking.result() == (replace(made, new_run=None) if end == "commits" else None)


def test_of_two_takeovers_of_an_expired_claim_one_succeeds(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(31)
    with world.hold_transaction() as tx:
        assert claim_in(tx, ref, "mine") is not None
        rival = world.start_blocked(world.try_claim, ref)
    assert rival.result() is None
    assert world.row(ref).crash_count == 1


def test_an_expired_claim_that_writes_first_keeps_its_instance(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(31)
    with world.hold_transaction() as tx:
        write_in(tx, claim, step())
        rival = world.start_blocked(world.try_claim, ref)
    assert rival.result() is None
    assert world.sweep() == []
    row = world.row(ref)
    assert (row.claim_token, row.crash_count) == (claim.token, 0)


@pytest.mark.parametrize("rival", ["claim", "sweep"])
def test_an_expired_claim_that_writes_second_has_lost_it(world: World, rival: str) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(31)
    with world.hold_transaction() as tx:
        if rival == "claim":
            assert claim_in(tx, ref, "mine") is not None
        else:
            assert sweep_in(tx, priority=claims.STARTING, limit=10)[1] == 1
        runner = world.start_blocked(world.commit, claim, step())
    with pytest.raises(Superseded):
        runner.result()
    assert world.read_all_rows()["workflow_step"] == []


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_sweep_does_not_expire_a_claim_that_is_writing(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(31)
    with world.hold_transaction() as tx:
        write_in(tx, claim, step())
        assert world.sweep() == []
    assert world.row(ref).claim_token == claim.token


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_renewing_skips_locked_rows_and_returns_them_as_held_but_not_renewed(world: World) -> None:
    busy, idle = world.claim(world.create("busy")), world.claim(world.create("idle"))
    world.advance(10)
    with world.hold_transaction() as tx:
        lock(tx, busy.ref)
        found = world.store.transact(lambda tx: leases.renew(tx, [busy, idle], lease=LEASE))
    assert (found.renewed, found.held) == ({idle.token}, {busy.token, idle.token})
    assert world.row(busy.ref).lease_until == world.now + seconds(20)
    assert world.row(idle.ref).lease_until == world.now + seconds(30)


# --- create -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_of_two_creations_of_one_id_the_second_waits_for_the_first(world: World, first: str) -> None:
    given = {"workflow": "order", "instance_id": "o-1", "queue": "durable", "grace": GRACE}

    def create(tx: Tx, params: str) -> bool:
        return instances.insert(tx, params=params, commit_id=f"commit-{params}", **given)

    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        assert create(Tx(connection, world.store), "1") is True
        rival = world.start_blocked(world.store.transact, lambda tx: create(tx, "2"))
        transaction.commit() if first == "commits" else transaction.rollback()
    assert rival.result() is (first == "rolls back")
    loaded = world.load(world.claim(RunRef("order", "o-1", 1)))
    assert loaded.params == ("1" if first == "commits" else "2")
