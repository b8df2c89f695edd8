"""Limits: at most so many steps at once, in the order in which they asked, and nothing that leaks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from celery_durable import Limit, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.model import RunRef
from celery_durable.store.runs import holds as hold_rows
from celery_durable.store.runs.holds import LimitKey
from tests.support.databases import on_databases
from tests.support.limits import Bodies, define, holds, serve
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


def test_a_step_waits_until_another_one_has_given_back_its_limit(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in ("a", "b", "c"):
        order.create(id=each)
    seen = []

    def others() -> None:
        bodies.pass_over("b", "c")
        seen.append(holds(world))

    bodies.during["a"] = others
    bodies.pass_over("a")
    assert seen == [[("a", "held"), ("b", "waiting"), ("c", "waiting")]]
    world.run_until_idle()
    assert bodies.ran == ["a", "b", "c"]
    assert bodies.most == 1
    assert [order.of(each).output for each in "abc"] == ["a", "b", "c"]
    assert holds(world) == []


def test_nothing_is_waited_for_while_there_is_room(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=2))
    for each in ("a", "b"):
        order.create(id=each)
    bodies.during["a"] = lambda: bodies.pass_over("b")
    bodies.pass_over("a")
    assert bodies.most == 2
    assert holds(world) == []


def test_a_waiting_step_is_a_suspension_that_no_time_ends(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    a, b = order.create(id="a"), order.create(id="b")
    seen = []

    def look() -> None:
        bodies.pass_over("b")
        world.messages.clear()
        world.advance(world.settings.lease / 2)
        world.tick()
        seen.append((b.status, b.statuses(), b.row.claim_token, b.step("call").attempts, bodies.ran.copy()))

    bodies.during["a"] = look
    bodies.pass_over("a")
    world.run_until_idle()
    assert seen == [("waiting", {"call": "waiting"}, None, 0, ["a"])]
    assert (a.output, b.output) == ("a", "b")


def test_a_backoff_holds_nothing(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1), retries=Retries(limit=1, delay=60))

    def fail() -> None:
        raise ValueError("declined")

    bodies.during["a"] = fail
    a = order.run(id="a")
    assert holds(world) == []
    assert order.run(id="b").output == "b"
    world.run_after(60)
    assert a.output == "a"
    assert a.step("call").attempts == 2


def test_a_step_that_resumes_goes_before_new_ones(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1), retries=Retries(limit=1, delay=60))

    def fail() -> None:
        raise ValueError("declined")

    bodies.during["a"] = fail
    order.run(id="a")
    for each in ("b", "c"):
        order.create(id=each)

    def others() -> None:
        bodies.pass_over("c")
        world.messages.clear()
        world.advance(60)
        bodies.pass_over("a")

    bodies.during["b"] = others
    bodies.pass_over("b")
    world.run_until_idle()
    assert bodies.ran == ["a", "b", "a", "c"]


def test_a_step_that_fails_gives_back_its_limit(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1), retries=0)

    def fail() -> None:
        bodies.pass_over("b")
        raise ValueError("declined")

    for each in ("a", "b"):
        order.create(id=each)
    bodies.during["a"] = fail
    bodies.pass_over("a")
    world.run_until_idle()
    assert order.of("a").error == "ValueError: declined"
    assert order.of("b").output == "b"
    assert holds(world) == []


def test_the_limit_of_a_dead_worker_is_free_when_its_lease_has_ended(world: World, bodies: Bodies) -> None:
    """Not earlier, when new workers start (solid_queue#735), and not never (solid_queue#546)."""
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in ("a", "b"):
        order.create(id=each)
    worker = world.worker
    bodies.during["a"] = worker.runtime.die
    worker.advance(RunRef("order", "a", 1))
    bodies.pass_over("b")
    assert holds(world) == [("a", "held"), ("b", "waiting")]
    world.messages.clear()
    serve(world)
    assert holds(world) == [("a", "held"), ("b", "waiting")]
    world.advance(2 * world.settings.lease)
    world.sweeper.sweep()
    serve(world)
    assert ("b", "granted") in holds(world)
    world.run_until_idle()
    assert sorted(bodies.ran) == ["a", "a", "b"]
    assert order.of("a").step("call").attempts == 2
    assert holds(world) == []


def test_all_limits_of_a_step_are_taken_together(world: World, bodies: Bodies) -> None:
    """Nobody holds one limit while waiting for another."""
    stripe, tenant = Limit("stripe", at_once=2), Limit("tenant", at_once=1, by=lambda event: event.payload)
    order = define(world, bodies, tenant, stripe)
    for each, payload in (("a", "acme"), ("b", "acme"), ("c", "other")):
        order.create(payload, id=each)
    seen = []

    def others() -> None:
        bodies.pass_over("b", "c")
        seen.append(holds(world))

    bodies.during["a"] = others
    bodies.pass_over("a")
    assert seen == [[("a", "held"), ("a", "held"), ("b", "blocked"), ("b", "waiting")]]
    assert bodies.ran == ["a", "c"]  # which waits for nothing that "b" could have had
    world.run_until_idle()
    assert bodies.ran == ["a", "c", "b"]
    assert holds(world) == []


def test_a_step_that_gets_room_at_one_limit_may_have_to_wait_for_another(world: World, bodies: Bodies) -> None:
    first, second = Limit("first", at_once=1), Limit("second", at_once=1)
    order = define(world, bodies, first, second)

    seen = []

    def hold_second() -> None:
        world.operations.lifecycle.terminate("uses_first", "f")
        serve(world)
        seen.append(holds(world))

    @world.workflow
    def uses_first(event: WorkflowEvent, step: Step):
        return step.do("call", StepConfig(limits=[first]), bodies, event.instance_id)

    @world.workflow
    def uses_second(event: WorkflowEvent, step: Step):
        return step.do("call", StepConfig(limits=[second]), bodies, event.instance_id)

    uses_first.create(id="f")
    uses_second.create(id="s")
    order.create(id="both")

    def hold_first() -> None:
        bodies.pass_over("both")
        seen.append(holds(world))
        world.new_worker().advance(RunRef("uses_second", "s", 1))

    bodies.during["f"], bodies.during["s"] = hold_first, hold_second
    world.new_worker().advance(RunRef("uses_first", "f", 1))
    assert sorted(seen[0]) == [("both", "blocked"), ("both", "waiting"), ("f", "held")]
    assert sorted(seen[1]) == [("both", "blocked"), ("both", "waiting"), ("s", "held")]
    world.run_until_idle()
    assert bodies.ran == ["f", "s", "both"]
    assert bodies.most == 2
    assert holds(world) == []


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_step_keeps_its_place_if_the_database_sorts_names_otherwise(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1), Limit("Tenant", at_once=5))
    for each in "abc":
        order.create(id=each)
    seen = []

    def others() -> None:
        bodies.pass_over("b", "c")
        world.operations.lifecycle.wake("order", "b")
        bodies.pass_over("b")
        seen.extend(holds(world))

    bodies.during["a"] = others
    with _collation_of_names(world, "en-US-x-icu"):
        bodies.pass_over("a")
        world.run_until_idle()
    assert [each for each, state in seen if state == "waiting"] == ["b", "c"]
    assert bodies.ran == ["a", "b", "c"]


@contextlib.contextmanager
def _collation_of_names(world: World, collation: str) -> Iterator[None]:
    def set_it(name: str) -> None:
        with world.store.engine.begin() as connection:
            change = f'ALTER TABLE workflow_hold ALTER COLUMN name TYPE varchar(100) COLLATE "{name}"'
            connection.exec_driver_sql(change)

    set_it(collation)
    try:
        yield
    finally:
        set_it("default")


def test_each_value_of_by_has_a_limit_of_its_own(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("tenant", at_once=1, by=lambda event: event.payload))
    for each, payload in (("a", "acme"), ("b", 7), ("c", "acme")):
        order.create(payload, id=each)
    bodies.during["a"] = lambda: bodies.pass_over("c", "b")
    bodies.pass_over("a")
    world.run_until_idle()
    assert bodies.ran == ["a", "b", "c"]


@pytest.mark.parametrize("value", [None, "", True, 1.5, "x" * 256])
def test_a_key_that_is_none_fails_the_run(world: World, bodies: Bodies, value: object) -> None:
    order = define(world, bodies, Limit("tenant", at_once=1, by=lambda event: value))
    shown = repr(value) if len(repr(value)) <= 120 else repr(value)[:117] + "..."
    assert order.run().error == (
        f"LimitKeyInvalid: The function by= of limit 'tenant' returned {shown}: return a text of 1 to 255 characters, "
        "or a whole number."
    )
    assert bodies.ran == []


def test_values_of_fair_take_turns(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1, fair=lambda event: event.payload))
    ids = [("a1", "acme"), ("a2", "acme"), ("a3", "acme"), ("b1", "bolt"), ("b2", "bolt"), ("c1", "core")]
    for each, payload in ids:
        order.create(payload, id=each)
    bodies.during["a1"] = lambda: bodies.pass_over("a2", "a3", "b1", "b2", "c1")
    bodies.pass_over("a1")
    world.run_until_idle()
    assert bodies.ran == ["a1", "a2", "b1", "c1", "a3", "b2"]


def test_the_value_of_fair_that_holds_least_goes_first(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=3, fair=lambda event: event.payload))
    for each, payload in (("a1", "acme"), ("a2", "acme"), ("x", "bolt"), ("a3", "acme"), ("b1", "bolt")):
        order.create(payload, id=each)
    # While two of acme run and one of bolt ends, the next one is bolt's, although one of acme came before.
    bodies.during["x"] = lambda: bodies.pass_over("a3", "b1")
    bodies.during["a2"] = lambda: (bodies.pass_over("x"), world.tick())
    bodies.during["a1"] = lambda: bodies.pass_over("a2")
    bodies.pass_over("a1")
    world.run_until_idle()
    assert bodies.ran == ["a1", "a2", "x", "b1", "a3"]


def test_a_rate_spaces_the_starts(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", rate="1 per minute"))
    began = []

    def note() -> None:
        began.append(world.now)

    for each in ("a", "b", "c"):
        order.create(id=each)
        bodies.during[each] = note
    world.run_until_idle()
    for _ in range(200):
        world.run_after(1)
        serve(world)
    assert bodies.ran == ["a", "b", "c"]
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(began)]
    assert all(59.9 <= gap <= 62 for gap in gaps), gaps


def test_starts_do_not_bunch_after_an_outage_of_the_workers(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", rate="10 per second"))
    began = []
    for each in map(str, range(40)):
        order.create(id=each)
        bodies.during[each] = lambda: began.append(world.now)
    world.run_until_idle()
    world.advance(1)
    for _ in range(30):  # granted, while no worker takes a message
        world.advance(1)
        serve(world)
        world.sweeper.sweep()
    before = len(began)
    world.run_until_idle()
    assert len(began) - before <= 3  # the burst that a rate allows
    for _ in range(100):
        world.run_after(0.1)
        serve(world)
    assert len(began) == 40
    for index in range(len(began) - 12):
        assert (began[index + 12] - began[index]).total_seconds() >= 1


def test_a_paused_run_keeps_its_place_and_gives_back_its_grant(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "abc":
        order.create(id=each)

    def others() -> None:
        bodies.pass_over("b", "c")
        order.of("b").pause()

    bodies.during["a"] = others
    bodies.pass_over("a")
    assert ("b", "parked") in holds(world)
    bodies.during["c"] = lambda: (
        order.of("b").resume(),
        bodies.pass_over("b"),
        order.create(id="d"),
        bodies.pass_over("d"),
    )
    world.run_until_idle()
    assert bodies.ran == ["a", "c", "b", "d"]
    assert holds(world) == []


def test_a_grant_that_no_pass_takes_passes_on(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "abc":
        order.create(id=each)
    bodies.during["a"] = lambda: bodies.pass_over("b", "c")
    bodies.pass_over("a")
    assert holds(world) == [("b", "granted"), ("c", "waiting")]
    world.messages.clear()
    world.advance(world.settings.lease)
    serve(world)
    assert holds(world) == [("b", "parked"), ("c", "granted")]
    world.run_until_idle()
    assert sorted(bodies.ran) == ["a", "b", "c"]
    assert bodies.most == 1
    assert holds(world) == []


def test_a_crash_between_a_commit_and_its_wake_up_delays_the_next_by_one_check(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "ab":
        order.create(id=each)
    worker = world.worker
    bodies.during["a"] = lambda: (bodies.pass_over("b"), setattr(worker.runtime, "crash_at", "after-commit"))
    worker.advance(RunRef("order", "a", 1))
    assert worker.is_dead
    assert holds(world) == [("b", "waiting")]
    serve(world)
    assert holds(world) == [("b", "granted")]
    world.run_after(2 * world.settings.lease)
    world.run_until_idle()
    assert order.of("b").output == "b"


@pytest.mark.parametrize("end", ["terminate", "restart", "cancel"])
def test_a_waiting_run_that_is_ended_leaves_the_queue(world: World, bodies: Bodies, end: str) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "abc":
        order.create(id=each)

    def others() -> None:
        bodies.pass_over("b", "c")
        if end == "restart":
            world.restart(order.of("b"))
        else:
            getattr(world.operations.lifecycle, end)("order", "b")
        world.tick()

    bodies.during["a"] = others
    bodies.pass_over("a")
    world.run_until_idle()
    assert bodies.ran == (["a", "c", "b"] if end == "restart" else ["a", "c"])
    assert holds(world) == []


def test_a_holder_that_is_terminated_frees_its_limit(world: World, bodies: Bodies) -> None:
    """DBOS lets a stuck holder at a limit of 1 stop all others until its database is edited (dbos#805)."""
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "ab":
        order.create(id=each)
    seen = []

    def stuck() -> None:
        bodies.pass_over("b")
        world.operations.lifecycle.terminate("order", "a")
        serve(world)
        seen.append(holds(world))

    bodies.during["a"] = stuck
    bodies.pass_over("a")
    assert seen == [[("b", "granted")]]
    world.run_until_idle()
    assert order.of("b").output == "b"
    assert holds(world) == []


def test_branches_hold_for_themselves(world: World, bodies: Bodies) -> None:
    limit = Limit("stripe", at_once=1)
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        config = StepConfig(limits=[limit])
        return step.gather(
            *(step.submit(name, config, bodies, name) for name in "abc"), step.submit("free", bodies, "d")
        )

    assert order.run().output == ["a", "b", "c", "d"]
    assert sorted(bodies.ran) == ["a", "b", "c", "d"]
    assert holds(world) == []


def test_a_branch_that_loses_a_race_leaves_the_queue(world: World, bodies: Bodies) -> None:
    limit = Limit("stripe", at_once=1)

    holder = define(world, bodies, limit, name="holder")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        waits = step.submit("waits", StepConfig(limits=[limit]), bodies, "waits")
        return step.first("race", waits, step.submit("free", bodies, "free"))

    world.exempt["I4"] = "branches end in any order"
    holder.create(id="holder")
    bodies.during["holder"] = lambda: (order.create(id="o"), bodies.pass_over("o"))
    world.worker.advance(RunRef("holder", "holder", 1))
    world.run_until_idle()
    assert order.of("o").output == "free"
    assert bodies.ran == ["holder", "free"]
    assert holds(world) == []


def test_a_run_that_ends_leaves_the_queues_of_its_open_branches(world: World, bodies: Bodies) -> None:
    limit = Limit("stripe", at_once=1)

    holder = define(world, bodies, limit, name="holder")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def fail() -> None:
            raise ValueError("declined")

        waits = step.submit("waits", StepConfig(limits=[limit]), bodies, "waits")
        fails = step.submit("fails", StepConfig(retries=Retries(limit=1, delay=1)), fail)
        step.gather(waits, fails)

    world.exempt["I4"] = "branches end in any order"
    holder.create(id="holder")

    def others() -> None:
        order.create(id="o", max_run="5 seconds")
        bodies.pass_over("o")
        world.advance(6)
        world.tick()

    bodies.during["holder"] = others
    world.worker.advance(RunRef("holder", "holder", 1))
    world.run_until_idle()
    assert order.of("o").status == "terminated"
    assert holds(world) == []


def test_new_numbers_in_the_code_count_from_the_next_step_on(world: World, bodies: Bodies) -> None:
    define(world, bodies, Limit("stripe", at_once=1)).run(id="a")
    order = define(world, bodies, Limit("stripe", at_once=2))
    for each in ("b", "c"):
        order.create(id=each)
    bodies.during["b"] = lambda: bodies.pass_over("c")
    bodies.pass_over("b")
    assert bodies.most == 2


def test_an_attempt_whose_worker_died_while_it_waited_is_not_counted(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1), retries=0, on_lost="fail")
    for each in "ab":
        order.create(id=each)

    def others() -> None:
        worker = world.new_worker()
        worker.runtime.crash_at = "after-commit"
        worker.advance(RunRef("order", "b", 1))
        assert worker.is_dead

    bodies.during["a"] = others
    bodies.pass_over("a")
    world.run_after(2 * world.settings.lease)
    assert order.of("b").output == "b"
    assert order.of("b").step("call").attempts == 1


def test_a_limit_that_is_released_twice_is_granted_once(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "abc":
        order.create(id=each)
    freed = []

    def release_twice() -> None:
        bodies.pass_over("b", "c")
        pk = order.of("a").row.id
        for _ in range(2):
            freed.append(world.store.transact(lambda tx: hold_rows.release(tx, pk, 1, "call")))
            world.operations.limits.queue.serve([LimitKey("stripe", "")])

    bodies.during["a"] = release_twice
    bodies.pass_over("a")  # its commit releases for the third time
    assert freed == [{LimitKey("stripe", "")}, set()]
    assert holds(world) == [("b", "granted"), ("c", "waiting")]
    world.run_until_idle()
    assert bodies.ran == ["a", "b", "c"]
    assert holds(world) == []
