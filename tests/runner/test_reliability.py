"""Promises under load and failure that an engine of this kind once broke, each as its smoke tests found it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import (
    CreateOptions,
    EventTimeout,
    Retries,
    Step,
    StepConfig,
    StepMaxAttemptsExceeded,
    StepTx,
    WorkflowEvent,
)
from celery_durable.testing import START
from tests.support.world import SerializationFailure, World, insert_name

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


@everywhere
def test_batch_create_returns_without_awaiting_any_runner(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        ran.append(event.instance_id)

    ids = [f"o-{n}" for n in range(20)]
    assert world.operations.create.batch("order", [CreateOptions(id=id_) for id_ in ids]) == ids
    assert ran == []
    world.run_until_idle()
    assert ran == ids


@everywhere
def test_an_instance_nobody_claims_is_claimable_whatever_an_old_lease_says(world: World) -> None:
    """There the lease of a finished claim outlived it; here a released row has none, and none is asked for."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: 1)
        step.sleep("rest", 1)  # far less than the lease of the pass that falls asleep here
        return "done"

    instance = order.run()
    assert (instance.row.lease_until, instance.row.claim_token) == (None, None)
    world.run_after(1)
    assert instance.output == "done"


@everywhere
def test_a_renewal_that_lost_the_race_changes_nothing(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if slow.runtime.passed.count("claimed") and not fast.runtime.passed:
            slow.runtime.suspend()
            world.advance(31)
            assert fast.advance(instance.ref).startswith("waiting")
            row = instance.row
            slow.runner._renewer._renew(dict(slow.runner._renewer._leases))  # the heartbeat that comes too late
            assert instance.row == row
        step.sleep("rest", 60)

    instance = order.create()
    assert slow.advance(instance.ref).startswith("superseded")
    assert instance.status == "waiting"


@everywhere
def test_attempts_never_exceed_their_maximum_also_when_workers_overtake_each_other(world: World) -> None:
    attempts = []

    def work(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        world.advance(31)  # longer than the lease: the next worker takes over while this one is at it
        world.new_worker().advance(instance.ref)
        raise ValueError("late")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("work", StepConfig(retries=Retries(limit=2, delay=0)), work)
        except StepMaxAttemptsExceeded as exc:
            return [exc.error_name, exc.attempts]

    instance = order.create()
    world.worker.advance(instance.ref)
    world.run_until_idle()
    assert instance.output == ["StepMaxAttemptsExceeded", 3]
    assert attempts == [1, 2, 3]
    assert (instance.step("work").attempts, instance.step("work").max_attempts) == (3, 3)


@everywhere
def test_wait_for_event_has_a_hard_timeout(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            return step.wait_for_event("approval", "approval", timeout=60).payload
        except EventTimeout as exc:
            return exc.error_message

    instance = order.run()
    world.advance(61)
    instance.send("approval", "late")
    world.run_until_idle()
    assert instance.output == "No event 'approval' came within 1 min"
    assert instance.statuses() == {"approval": "errored"}
    assert instance.events() == [("approval", "late", None)]


@everywhere
def test_wait_for_event_takes_an_event_from_before_its_deadline_however_late_it_looks(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.wait_for_event("approval", "approval", timeout=60).payload

    instance = order.run()
    world.advance(60)
    instance.send("approval", "in time")
    world.messages.clear()  # the wake-up is lost, and all workers are away
    world.run_after(timedelta(days=7))
    assert instance.output == "in time"


@everywhere
def test_no_clock_but_the_databases_decides(world: World) -> None:
    """A worker whose own clock is a year off retries, sleeps and times out when the database says so."""
    worker = world.new_worker()
    worker.runtime.monotonic = lambda: world.now_us / 1e6 - 365 * 86_400

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", StepConfig(retries=Retries(limit=1, delay=10)), lambda tx: 1 / (tx.attempt - 1))
        step.sleep("rest", 20)
        try:
            step.wait_for_event("approval", "approval", timeout=30)
        except EventTimeout:
            return step.now().isoformat()

    instance = order.run()
    for seconds in (10, 20, 30):
        assert instance.run_at == world.now + timedelta(seconds=seconds)
        world.run_after(seconds)
    assert instance.output == (START + timedelta(seconds=60)).isoformat()
    assert [step.finished_at for step in instance.steps()] == [
        START + timedelta(seconds=10),
        START + timedelta(seconds=30),
        START + timedelta(seconds=60),
    ]


@everywhere
def test_the_second_page_of_a_list_and_of_a_log_follows_the_first(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in "01234":
            step.log.info(n)

    for n in range(5):
        order.run(id=f"o-{n}")
    first = world.operations.queries.list("order", limit=3)
    second = world.operations.queries.list("order", limit=3, cursor=first.cursor)
    assert [item.id for item in (*first.items, *second.items)] == ["o-4", "o-3", "o-2", "o-1", "o-0"]
    page = world.operations.history.logs("order", "o-0", limit=3)
    rest = world.operations.history.logs("order", "o-0", limit=3, after_id=page[-1].id)
    assert [line.message for line in (*page, *rest)] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("times", [1, 3])
@everywhere
def test_a_serialization_failure_repeats_the_commit_and_not_the_body(world: World, times: int) -> None:
    bodies, mutations = [], []

    def fail_first(session) -> None:
        mutations.append(1)
        if len(mutations) <= times:
            raise sa.exc.OperationalError("UPDATE ...", {}, SerializationFailure("could not serialize access"))
        insert_name("written")(session)

    def work(tx: StepTx) -> str:
        bodies.append(1)
        tx.mutate(fail_first)
        return "worked"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", work)

    instance = order.run()
    assert instance.output == "worked"
    assert (len(bodies), len(mutations), instance.step("work").attempts) == (1, times + 1, 1)
    assert world.names() == ["written"]


@everywhere
def test_a_serialization_failure_in_a_session_runs_the_body_again_as_the_same_attempt(world: World) -> None:
    attempts = []

    def work(tx: StepTx) -> str:
        attempts.append(tx.attempt)
        insert_name("written")(tx.session)
        if len(attempts) < 3:
            raise sa.exc.OperationalError("UPDATE ...", {}, SerializationFailure("could not serialize access"))
        return "worked"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", work)

    assert order.run().output == "worked"
    assert attempts == [1, 1, 1]
    assert world.names() == ["written"]
