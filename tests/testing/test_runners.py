"""Runners that die, are replaced, work at the same time or too late."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import Step, StepTx, WorkflowEvent
from celery_durable.testing import CHECKPOINTS, START, DurableHarness, HarnessMisuse, HeldOutside

rows = sa.MetaData()
books = sa.Table("books", rows, sa.Column("step", sa.String(50)), sa.Column("attempt", sa.Integer))
BUSY = "noop: not due, or claimed by another worker"


def book(tx: StepTx) -> str:
    tx.session.execute(sa.insert(books).values(step=tx.name, attempt=tx.attempt))
    return tx.name


def trip(event: WorkflowEvent[None], step: Step) -> list[str]:
    hotel = step.do("book hotel", book)
    flight = step.do("book flight", book)
    return [hotel, flight]


@pytest.fixture
def harness(make_harness) -> DurableHarness:
    harness = make_harness(trip)
    harness.create_tables(rows)
    return harness


def booked(harness: DurableHarness) -> list[tuple[str, int]]:
    with harness.session() as session:
        return [tuple(row) for row in session.execute(sa.select(books))]


@pytest.mark.parametrize("where", CHECKPOINTS)
def test_a_runner_dies_at_a_checkpoint_and_another_goes_on(harness, where) -> None:
    harness.faults.crash_at(where)
    handle = harness.create(trip)
    first = harness.runner
    harness.run_until_idle()
    if not where.endswith("publish"):  # this workflow wakes nobody
        assert first.is_dead
        assert harness.journal[0].endswith(": crashed")
    harness.advance("2 minutes")
    assert handle.result() == ["book hotel", "book flight"]
    assert sorted(step for step, _ in booked(harness)) == ["book flight", "book hotel"]


def test_a_runner_dies_at_every_checkpoint_of_a_run(make_harness) -> None:
    count = make_harness(trip)
    count.create_tables(rows)
    count.create(trip)
    count.run_until_idle()
    passed = count.runner.runtime.passed
    assert {"claimed", "before-body", "after-body", "before-commit", "after-commit"} == set(passed)
    for number in range(len(passed)):
        harness = make_harness(trip, seed=number)
        harness.create_tables(rows)
        harness.faults.crash_at(number)
        handle = harness.create(trip)
        harness.advance("2 minutes")
        assert handle.result() == ["book hotel", "book flight"], number
        assert sorted(step for step, _ in booked(harness)) == ["book flight", "book hotel"], number
        assert len(harness.attempts) <= 3, number


def test_a_checkpoint_that_is_not_there_is_refused(harness) -> None:
    with pytest.raises(HarnessMisuse, match=r"There is no checkpoint 'after-boddy'. There are: claimed, before-body"):
        harness.faults.crash_at("after-boddy")


@pytest.mark.parametrize(("when", "bodies"), [("before", 1), ("after", 2)])
def test_a_runner_dies_in_a_step(make_harness, when, bodies) -> None:
    paid = []

    def pay(event, step):
        step.do("look", int)
        return step.do("pay", paid.append, 5)

    harness = make_harness(pay)
    crash = harness.faults.crash_in_step("pay", when=when)
    handle = harness.create(pay)
    harness.run_until_idle()
    assert not handle.has_ended
    assert handle.statuses() == {"look": "completed"}
    harness.advance("2 minutes")
    assert handle.has_ended
    assert len(paid) == bodies
    assert crash.calls == 1


def test_a_crash_of_the_runner_rolls_its_own_transaction_back(harness) -> None:
    harness.faults.crash_in_step("book flight", times=2)
    handle = harness.create(trip)
    harness.advance("5 minutes")
    assert handle.result() == ["book hotel", "book flight"]
    assert booked(harness) == [("book hotel", 1), ("book flight", 3)]


def test_a_fresh_runner_goes_on_where_the_last_one_stopped(make_harness) -> None:
    def long(event, step):
        step.do("one", int)
        step.sleep("nap", 60)
        return step.do("two", int)

    harness = make_harness(long)
    handle = harness.create(long)
    harness.run_until_idle()
    old = harness.runner
    new = harness.restart_runner()
    assert (old.is_dead, new.is_dead, harness.runner) == (True, False, new)
    harness.advance(60)
    assert handle.has_ended
    assert [attempt.step for attempt in harness.attempts] == ["one", "two"]


def test_a_second_runner_gets_nothing_while_the_first_is_held_in_a_body(harness) -> None:
    barrier = harness.faults.hold("book hotel")
    handle = harness.create(trip)
    assert harness.tick() == "held at barrier book hotel"
    assert barrier.holds == 1
    assert repr(barrier) == "<Barrier before step 'book hotel', holding 1>"
    second = harness.second_runner()
    assert harness.deliver(handle, to=second) == BUSY
    harness.advance("10 minutes")  # the first renews its lease all the time
    assert harness.deliver(handle, to=second) == BUSY
    assert barrier.release() == ["released: due again"]  # its pass has taken ten minutes: it makes room for others
    harness.run_until_idle()
    assert handle.result() == ["book hotel", "book flight"]
    assert booked(harness) == [("book hotel", 1), ("book flight", 1)]


def test_a_runner_that_overslept_its_lease_changes_nothing(harness) -> None:
    barrier = harness.faults.hold("book hotel")
    handle = harness.create(trip)
    harness.tick()
    zombie = harness.runner
    zombie.suspend()
    barrier.is_open = True  # for others; the first is still in it
    second = harness.second_runner()
    harness.clock.advance("5 minutes")
    harness.tick()
    harness.messages.clear()
    harness.clock.advance("5 minutes")
    assert harness.deliver(handle, to=second) == "complete"
    zombie.wake_up()
    assert barrier.release() == ["superseded: the instance was taken over, restarted or ended meanwhile"]
    assert sorted(booked(harness)) == [("book flight", 1), ("book hotel", 2)]


def test_a_held_body_belongs_to_the_harness_not_to_the_test(harness) -> None:
    harness.faults.hold("book hotel")
    handle = harness.create(trip)
    with pytest.raises(HeldOutside) as caught:
        harness.runner.runner.advance(handle.ref, task_id="me", node="me")
    assert str(caught.value) == (
        "<Barrier before step 'book hotel', holding 0> would hold the test itself: "
        "have the harness deliver, with tick(), run_until_idle() or deliver()."
    )


def test_what_is_held_ends_with_the_harness() -> None:
    harness = DurableHarness([trip])
    harness.create_tables(rows)
    barrier = harness.faults.hold("book hotel")
    harness.create(trip)
    harness.create(trip)
    harness.run_until_idle()
    assert barrier.holds == 2
    harness.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("durable-cooperative")]


@pytest.mark.parametrize("seed", range(20))
def test_runners_at_the_same_time_record_each_step_once(make_harness, seed) -> None:
    harness = make_harness(trip, seed=seed)
    harness.create_tables(rows)
    one, two = harness.create(trip), harness.create(trip)
    said = harness.run_concurrently(runners=3)
    assert sorted(said) == ["complete"] * 2 + [BUSY] * 4
    assert one.has_ended
    assert two.has_ended
    assert len(booked(harness)) == 4


def test_the_thread_of_a_runner_ends_before_the_test_continues(make_harness, tmp_path) -> None:
    """With it end the connections that belong to it, such as Django's. They are closed while no other thread runs."""
    own = threading.local()

    class Connection:
        def __del__(self) -> None:
            os.fsync(file.fileno())  # other threads may run meanwhile, as when SQLite closes a connection
            closed.append(len(seen))

    def open_(event, step) -> None:
        own.connection = Connection()

    closed: list[int] = []
    seen: list[str] = []
    harness = make_harness(open_)
    with (tmp_path / "file").open("w") as file:
        for number in range(20):
            harness.create(open_)
            seen += harness.run_concurrently(runners=1)
            assert len(closed) == number + 1
    assert seen == ["complete"] * 20


def test_the_order_of_concurrent_runners_is_the_seeds(make_harness) -> None:
    def told(seed: int) -> list[str]:
        harness = make_harness(trip, seed=seed)
        harness.create_tables(rows)
        for number in range(3):
            harness.create(trip, id=f"t-{number}")
        return harness.run_concurrently()

    stories = [told(seed) for seed in range(8)]
    assert stories == [told(seed) for seed in range(8)]
    assert len({tuple(story) for story in stories}) > 1


def test_leases_are_renewed_in_virtual_time(harness) -> None:
    barrier = harness.faults.hold("book hotel")
    harness.create(trip)
    harness.tick()
    table = harness.durable.internals.store.tables.instance
    harness.clock.advance("61 seconds")
    with harness.session() as session:
        until = session.scalar(sa.select(table.c.lease_until))
    assert until == (START + timedelta(seconds=60 + 30)).timestamp() * 1_000_000
    barrier.release()
