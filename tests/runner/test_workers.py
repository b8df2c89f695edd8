"""Workers against each other and against time: claims, leases, messages of every kind, handing on."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, StepConfig, WorkflowEvent
from celery_durable.definitions import Registry
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")
NOT_DUE = "noop: not due, or claimed by another worker"
SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"
SECONDS = 10


# --- messages -----------------------------------------------------------------------------------


@pytest.fixture
def order(world: World):
    """A step, a sleep, a step; it keeps account of its bodies."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book before", world.book, event.instance_id, event.run_number)
        step.sleep("rest", 60)
        return step.do("book after", world.book, event.instance_id, event.run_number)

    return order


def test_any_number_of_messages_advances_a_run_once(world: World, order) -> None:
    instance = order.create()
    said = [instance.advance() for _ in range(3)]
    assert said == ["waiting until 2030-01-01 00:01:00 UTC", NOT_DUE, NOT_DUE]
    world.advance(60)
    said = [instance.advance() for _ in range(3)]
    assert said == ["complete", NOT_DUE, NOT_DUE]
    assert world.booked() == ["book before", "book after"]


def test_a_message_that_comes_too_early_changes_nothing(world: World, order) -> None:
    instance = order.run()
    before = instance.row
    world.advance(59.999999)
    assert instance.advance() == NOT_DUE
    assert instance.row == before


def test_messages_in_the_wrong_order_end_in_the_same_place(world: World) -> None:
    order = flow_of(world, lambda step: [step.wait_for_event(f"page {n}", "page").payload for n in range(3)])
    instance = order.create()
    for page in "abc":
        instance.send("page", page)
    instance.pause()
    instance.resume()
    instance.restart()
    for page in "def":
        instance.send("page", page)
    for due in reversed(list(world.messages)):
        world.worker.advance(due.ref)
    assert instance.output == ["d", "e", "f"]


@pytest.mark.parametrize("status", ["paused", "complete", "errored", "terminated"])
def test_a_message_for_an_instance_that_must_not_run_changes_nothing(world: World, status: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        match status:
            case "errored":
                raise ValueError("no")
            case "paused" | "terminated":
                step.sleep("rest", 60)

    instance = order.run()
    if status in ("paused", "terminated"):
        getattr(instance, status.removesuffix("d"))()
    world.advance(3600)
    before = instance.row
    assert (instance.status, instance.advance(), instance.row) == (status, NOT_DUE, before)


def test_an_instance_runs_without_any_message_at_all(world: World, order) -> None:
    instance = order.create()
    for _ in range(4):
        world.messages.clear()
        world.run_after(60)
    assert instance.status == "complete"
    assert world.booked() == ["book before", "book after"]


def test_a_sweep_does_not_repeat_itself_before_a_worker_had_its_chance(world: World, order) -> None:
    instance = order.create()
    world.messages.clear()
    gaps, last = [], world.now
    for _ in range(40):
        world.advance(1)
        if world.sweeper.sweep():
            gaps.append((world.now - last).total_seconds())
            last = world.now
            world.messages.clear()
            if len(gaps) == 4:
                break
    assert gaps == [5, 5, 10, 20]
    assert instance.row.dispatch_count == len(gaps)


# --- code that a worker does not know -----------------------------------------------------------


def test_a_worker_without_the_code_leaves_the_instance_for_one_that_has_it(world: World) -> None:
    old, new = world.new_worker(registry=Registry()), world.new_worker()

    instance = flow_of(world, lambda step: "done").create()
    world.messages.clear()
    for _ in range(3):
        assert old.advance(instance.ref) == "noop: workflow 'order' is unknown to this worker"
        world.advance(4.999999)
        assert world.sweeper.sweep() == 0
        world.advance(0.000001)
        assert world.sweeper.sweep() == 1  # every five seconds, without doubling
        world.messages.clear()
    row = instance.row
    assert (row.status, row.crash_count, row.claim_token) == ("active", 0, None)
    assert new.advance(instance.ref) == "complete"


def test_a_worker_without_the_code_does_not_disturb_one_that_is_at_it(world: World) -> None:
    old, new = world.new_worker(registry=Registry()), world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        before = instance.row
        old.advance(instance.ref)
        assert instance.row == before
        step.sleep("rest", 3600)

    instance = order.create()
    new.advance(instance.ref)
    before = instance.row
    assert instance.status == "waiting"
    old.advance(instance.ref)
    assert instance.row == before


# --- on threads ---------------------------------------------------------------------------------


def test_a_worker_that_runs_on_a_thread_does_all_the_same(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    worker, said = world.new_worker(), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        who = event.instance_id, event.run_number
        step.do("book one", world.book, *who)
        step.do("book two", StepConfig(timeout=None), world.book, *who)
        step.do("flaky", StepConfig(retries=Retries(limit=1, delay=0)), lambda tx: 1 / (tx.attempt - 1))
        return step.gather(step.submit("book three", world.book, *who), step.submit("plain", lambda: 3))

    instance = order.create()
    ref = instance.ref
    for _ in range(2):
        thread = threading.Thread(target=lambda: said.append(worker.advance(ref)))
        thread.start()
        thread.join(SECONDS)
    assert said == ["released: due again", "complete"]
    assert instance.output == ["booked book three", 3]
    assert world.booked() == ["book one", "book two", "book three"]


def test_the_threads_of_bodies_are_used_again_and_do_not_pile_up(world: World) -> None:
    worker = world.new_worker()
    seen: set[int] = set()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(20):
            step.do(f"{n}", lambda: seen.add(threading.get_ident()))

    ref = order.create().ref
    thread = threading.Thread(target=worker.advance, args=(ref,))
    thread.start()
    thread.join(SECONDS)
    assert len(seen) == 1
    assert seen.isdisjoint({thread.ident, threading.get_ident()})


def test_a_claim_says_who_has_it(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        row = instance.row
        seen.append((row.claim_task_id, row.claimed_by, row.lease_until - world.now_us, row.status))

    instance = order.create()
    world.run_until_idle()
    assert seen == [("task", "worker-1", timedelta(seconds=30) // timedelta(microseconds=1), "active")]


def test_the_step_that_lost_a_race_of_constraints_stops_quietly(world: World) -> None:
    """An internal row that is there already means that somebody else was here: no error of the author's."""
    slow = world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            st = world.store.tables.step
            with world.store.engine.begin() as connection:
                connection.execute(
                    sa.insert(st).values(
                        instance_pk=instance.row.id,
                        run_number=1,
                        step_key="work",
                        seq=1,
                        name="work",
                        type="do",
                        status="completed",
                        attempts=1,
                        result='"other"',
                        commit_id="x",
                        created_at=world.now_us,
                        finished_at=world.now_us,
                    )
                )
            return "mine"

        return step.do("work", work)

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    world.run_after(31)
    assert instance.output == "other"
