"""Promises under load and failure that an engine of this kind once broke, each as its smoke tests found it."""

from __future__ import annotations

from datetime import timedelta

from celery_durable import (
    EventTimeout,
    Retries,
    Step,
    StepConfig,
    StepMaxAttemptsExceeded,
    StepTx,
    WorkflowEvent,
)
from celery_durable.testing import START
from tests.support.databases import on_databases
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


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
