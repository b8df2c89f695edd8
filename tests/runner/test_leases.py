"""Whose lease is renewed: of authors whatever they do. What is believed of a lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import Superseded
from celery_durable.model import Claim, from_us
from celery_durable.runner.lease import Lease
from celery_durable.runner.lease_renewer import LeaseRenewer
from celery_durable.store.engine import Store
from celery_durable.store.instances import instances
from celery_durable.testing import Clock, HarnessRuntime
from tests.store.world import LEASE
from tests.store.world import World as Rows
from tests.support.flows import flow_of
from tests.support.world import Instance, Worker, World, on_one_database

SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"
servers_only = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
LEASE_SECONDS = LEASE.total_seconds()
assert LEASE_SECONDS == 30


def look(worker: Worker) -> None:
    """What the renewer does every third of a lease."""
    worker.runner._renewer._renew_all()


# --- the step that runs now ----------------------------------------------------------------------


def test_a_renewal_records_the_step_that_runs_now(world: World) -> None:
    seen: list[tuple[Any, ...]] = []

    def record_row() -> None:
        row = instance.row
        seen.append((row.running_step_key, row.running_attempt, row.running_since))

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("long report", StepConfig(retries=Retries(limit=1, delay=0)), report)
        look(world.worker)
        record_row()

    def report() -> None:
        record_row()
        started_at = world.now_us
        world.clock.advance(7)
        look(world.worker)
        record_row()
        assert seen[-1][2] == started_at
        if len(seen) < 4:
            raise OSError("no paper")

    instance = order.create()
    world.run_until_idle()
    world.clock.advance(60)  # the failed attempt is repeated
    world.run_until_idle()
    assert instance.status == "complete"
    names = [(step_key, attempt) for step_key, attempt, _ in seen]
    nothing = (None, None)
    assert names == [nothing, ("long report", 1), nothing, ("long report", 2), nothing]


def test_the_next_claim_forgets_the_step_that_ran_before(world: World) -> None:
    dying, heir = world.new_worker(), world.new_worker()

    instance = flow_of(world, lambda step: step.do("long report", lambda: look(dying))).create()
    dying.runtime.crash_at = "after-body"
    dying.advance(instance.ref)
    assert (instance.row.running_step_key, instance.row.running_attempt) == ("long report", 1)
    world.clock.advance(LEASE_SECONDS + 1)
    heir.runtime.at["claimed"] = lambda: claimed.append(instance.row.running_step_key)
    claimed: list[str | None] = []
    assert heir.advance(instance.ref) == "complete"
    assert claimed == [None]


# --- authors, who may take as long as they like -------------------------------------------------


def long(world: World, worker: Worker, instance: Callable[[], Instance]) -> None:
    """Three leases' time, while which the renewer looks as often as it does."""
    for _ in range(9):
        world.clock.advance(10)
        look(worker)
        lease = instance().row
        assert lease.claim_token is not None
        assert from_us(lease.lease_until) > world.now


@pytest.mark.parametrize("where", ["function", "body", "branch"])
def test_an_authors_code_may_take_any_time_within_one_attempt(make_world: Callable[..., World], where: str) -> None:
    world = make_world(pass_seconds=600)
    worker, ran = world.new_worker(), []

    def work(*at: str) -> None:
        ran.append(at)
        if where in at:
            long(world, worker, lambda: instance)

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.do("first", lambda: work("body"))
        if where == "function":
            long(world, worker, lambda: instance)
        step.gather(step.submit("one", lambda: work("branch")), step.submit("two", lambda: None))
        return "done"

    instance = order.create()
    assert instance.advance(worker) == "complete"
    assert ran == [("body",), ("branch",)]
    assert instance.lines() == []


@servers_only
def test_an_authors_transaction_may_take_any_time_within_one_attempt(make_world: Callable[..., World]) -> None:
    world = make_world(pass_seconds=600)
    worker, ran = world.new_worker(), []

    def body(tx: StepTx) -> None:
        ran.append(tx.attempt)
        tx.mutate(lambda _: long(world, worker, lambda: instance))

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.do("mutates", body)
        return "done"

    instance = order.create()
    assert instance.advance(worker) == "complete"
    assert ran == [1]


@servers_only
def test_the_commit_of_an_authors_session_is_no_standing_still(make_world: Callable[..., World]) -> None:
    world = make_world(pass_seconds=600)
    worker, ran = world.new_worker(), []

    def body(tx: StepTx) -> None:
        ran.append(tx.attempt)
        tx.session.connection()
        worker.runtime.at["before-commit"] = slowly

    def slowly() -> None:
        for _ in range(4):
            world.clock.advance(10)
            look(worker)  # finds the row locked, by us

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.do("writes", body)
        step.do("goes on", lambda: ran.append("more"))
        return "done"

    instance = order.create()
    assert instance.advance(worker) == "complete"
    assert (ran, instance.lines()) == ([1, "more"], [])


# --- what is believed of a lease ----------------------------------------------------------------


class Held:
    """A claim, the lease on it, and the process that holds both."""

    def __init__(self, url: str) -> None:
        self.clock = Clock()
        self.runtime = HarnessRuntime(self.clock, name="holder")
        self.store = Store(url, runtime=self.runtime)
        self.rows = Rows(self.store)
        self.claim: Claim = self.rows.claim(self.rows.create())
        self.lease = Lease(self.claim, LEASE, self.runtime, requested_at=self.runtime.monotonic())
        self.renewer = LeaseRenewer(self.store, LEASE, self.runtime)

    @property
    def left(self) -> timedelta:
        """How much longer the database takes the lease for good."""
        row = self.store.read(lambda tx: instances.read(tx, self.claim.ref.workflow, self.claim.ref.instance_id))
        assert row.lease_until is not None
        return row.lease_until - self.clock.now


@pytest.fixture
def held(store_url: str) -> Iterator[Held]:
    held = Held(store_url)
    yield held
    held.rows.close()
    held.store.close()


def test_a_lease_is_renewed_every_third_of_its_length(held: Held) -> None:
    """One renewal may fail, or find the row locked, and the next, and the lease holds all the same."""
    with held.renewer.hold(held.lease):
        held.lease.enter_user_code("body")
        for _ in range(12):
            held.clock.advance(9.9)
            assert held.left > LEASE * 0.6


@on_one_database
def test_a_body_that_begins_after_the_cancel_was_noticed_is_ended_too(held: Held) -> None:
    ended = []
    held.lease.call_if_cancelled("early", lambda: ended.append("early"))
    held.lease.call_if_cancelled("withdrawn", lambda: ended.append("withdrawn"))
    held.lease.call_if_cancelled("withdrawn", None)
    held.lease.cancel()
    held.lease.call_if_cancelled("late", lambda: ended.append("late"))
    assert ended == ["early", "late"]


@on_one_database
@pytest.mark.parametrize("renews", ["the renewer", "the pass"])
def test_a_renewal_counts_from_before_it_was_asked_for(held: Held, renews: str) -> None:
    """The database's lease begins with the statement, however late its answer comes."""
    if renews == "the pass":
        held.clock.advance(28)  # or it would not make sure of the lease
    held.runtime.at["before-commit"] = lambda: held.clock.advance(20)
    if renews == "the pass":
        held.lease.ensure_held(held.store)
    else:
        held.renewer._renew({held.claim.token: held.lease})
    held.clock.advance(6.9)
    assert held.lease.is_valid
    held.clock.advance(0.2)
    assert not held.lease.is_valid


@on_one_database
def test_a_boundary_renews_the_lease_from_before_it_was_asked_for(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    ran: list[Any] = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("first", lambda: None)
        if not fast.runtime.passed:
            world.advance(11)
            assert fast.advance(instance.ref) == "complete"
        step.do("second", lambda: ran.append(len(fast.runtime.passed) > 0))

    instance = order.create()
    crashed = world.new_worker()
    crashed.runtime.crash_at = "claimed"
    crashed.advance(instance.ref)
    world.advance(
        LEASE_SECONDS + 1
    )  # its lease has expired, and the first commit of the next claim resets the count of crashes
    slow.runtime.at["after-body"] = lambda: slow.runtime.at.update({"after-commit": lambda: world.advance(20)})
    assert slow.advance(instance.ref) == SUPERSEDED
    assert len(ran) == 1


def test_a_worker_that_knows_its_lease_is_lost_begins_no_body(world: World) -> None:
    """Long before it would have ended by the clock."""
    worker, ran = world.new_worker(), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("first", lambda: ran.append("first"))
        if len(ran) == 1:
            instance.restart()
            look(worker)
        step.do("second", lambda: ran.append("second"))

    instance = order.create()
    assert worker.advance(instance.ref) == SUPERSEDED
    assert ran == ["first"]


def test_a_lease_that_is_lost_cannot_be_made_sure_of(held: Held) -> None:
    held.lease.is_lost = True
    assert not held.lease.is_valid
    with pytest.raises(Superseded):
        held.lease.ensure_held(held.store)
