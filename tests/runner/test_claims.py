"""Two workers never work on one instance, and one whose lease has ended changes nothing."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa

from celery_durable import Step, WorkflowEvent
from tests.support.flows import flow_of
from tests.support.world import World

NOT_DUE = "noop: not due, or claimed by another worker"
SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"
SECONDS = 10


def test_two_workers_never_work_on_one_instance(world: World) -> None:
    seen = []
    one, two = world.new_worker(), world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(two.advance(instance.ref))
        step.do("work", lambda: seen.append(two.advance(instance.ref)))
        return "done"

    instance = order.create()
    assert one.advance(instance.ref) == "complete"
    assert seen == [NOT_DUE, NOT_DUE]
    assert instance.statuses() == {"work": "completed"}


def test_two_workers_at_the_same_moment_are_one(world: World) -> None:
    ran = []
    order = flow_of(world, lambda step: step.do("work", lambda: ran.append(threading.get_ident()) or "worked"))
    for number in range(5):
        instance = order.create(id=f"i-{number}")
        ref, start, said = instance.ref, threading.Barrier(2), []

        def go(worker, ref=ref, start=start, said=said) -> None:
            start.wait(SECONDS)
            said.append(worker.advance(ref))

        workers = [world.new_worker() for _ in range(2)]
        threads = [threading.Thread(target=go, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert sorted(said) == ["complete", NOT_DUE]
        assert len(ran) == number + 1
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("end", ["return", "raise", "sleep", "wait", "fail"])
def test_a_worker_that_overslept_between_steps_ends_nothing(world: World, end: str) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    passes = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        passes.append(1)
        if len(passes) == 1:
            slow.runtime.suspend()
            world.advance(31)
            fast.advance(instance.ref)
            match end:
                case "return":
                    return "slow"
                case "raise":
                    raise ValueError("slow")
                case "sleep":
                    step.sleep("slow", 60)
                case "wait":
                    step.wait_for_event("slow", "slow")
                case "fail":
                    step.do("slow", lambda: 1 / 0)
        return "fast"

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert instance.output == "fast"
    assert instance.statuses() == {}


def test_a_worker_that_sees_its_lease_has_ended_begins_no_body(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    passes, ran = [], []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        passes.append(1)
        if len(passes) == 1:
            world.advance(31)
            assert fast.advance(instance.ref) == "complete"
        step.do("work", lambda: ran.append(len(passes)))

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert ran == [2]
    assert instance.status == "complete"


def test_a_worker_whose_lease_has_ended_goes_on_when_nobody_took_over(world: World) -> None:
    passes = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        passes.append(1)
        world.advance(31)
        return step.do("work", lambda: "worked")

    instance = order.create()
    assert instance.advance() == "complete"
    assert len(passes) == 1


def test_a_body_that_outlasts_its_lease_keeps_it_by_heartbeats(make_world) -> None:
    world = make_world(lease_seconds=0.06)
    one, two = world.new_worker(), world.new_worker()
    said = []

    def lease() -> int:
        return instance.row.lease_until

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            for _ in range(3):
                before, give_up = lease(), threading.Event()
                world.advance(0.05)
                while lease() == before:  # a keeper renews every 0.02 s of real time
                    give_up.wait(0.005)
                said.append(two.advance(instance.ref))
            return "worked"

        return step.do("work", work)

    instance = order.create()
    assert one.advance(instance.ref) == "complete"
    assert said == [NOT_DUE] * 3
    assert instance.step("work").attempts == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_renewal_that_was_skipped_does_not_make_a_worker_believe_in_its_lease(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if not fast.runtime.passed:
            i = world.store.tables.instance
            with world.store.engine.begin() as other_connection:
                other_connection.execute(sa.select(i.c.id).with_for_update())
                world.advance(20)
                slow.runner._renewer._renew(dict(slow.runner._renewer._leases))  # a heartbeat that finds the row locked
            world.advance(11)
            assert fast.advance(instance.ref) == "complete"
        step.do("work", lambda: ran.append(1))

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert ran == [1]
