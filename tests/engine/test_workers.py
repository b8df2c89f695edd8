"""Workers against each other and against time: claims, leases, messages of every kind, handing on."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.definitions import Registry
from celery_durable.model import RunRef
from tests.engine.world import SerializationFailure, World

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


def test_a_message_that_comes_too_late_finds_the_work_done(world: World, order) -> None:
    instance = order.create()
    late = list(world.messages)
    world.run_until_idle()
    world.run_after(60)
    assert instance.status == "complete"
    assert [world.worker.advance(due.ref) for due in late] == [NOT_DUE]


@pytest.mark.parametrize("run_number", [0, 1, 3, -1])
def test_a_message_for_another_run_changes_nothing(world: World, order, run_number: int) -> None:
    instance = order.create()
    instance.restart()
    before = instance.row
    assert world.worker.advance(RunRef("order", "i-1", run_number)) == NOT_DUE
    assert instance.row == before
    world.run_until_idle()
    assert instance.status == "waiting"


def test_a_message_for_nobody_changes_nothing(world: World, order) -> None:
    assert world.worker.advance(RunRef("order", "nobody", 1)) == NOT_DUE


def test_messages_in_the_wrong_order_end_in_the_same_place(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.wait_for_event(f"page {n}", "page").payload for n in range(3)]

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


# --- claims -------------------------------------------------------------------------------------


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

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", lambda: ran.append(threading.get_ident()) or "worked")

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


def test_a_worker_that_overslept_its_lease_changes_nothing(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    attempts = []

    def book(tx: StepTx, instance_id: str, run: int) -> str:
        attempts.append(tx.attempt)
        if tx.attempt == 1:
            slow.runtime.suspend()  # it does not even notice
            world.advance(31)
            assert fast.advance(instance.ref) == "complete"
        return world.book(tx, instance_id, run)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        booked = step.do("book", book, event.instance_id, event.run_number)
        step.do("after", lambda: 1)
        return booked

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert instance.output == "booked book"
    assert attempts == [1, 2]
    assert world.booked() == ["book"]
    assert instance.step("book").attempts == 2
    assert instance.statuses() == {"book": "completed", "after": "completed"}


def test_a_worker_that_overslept_in_a_plain_body_records_nothing(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    results = iter(["slow", "fast"])

    def work() -> str:
        mine = next(results)
        if mine == "slow":
            world.advance(31)
            assert fast.advance(instance.ref) == "complete"
        return mine

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", work)

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert instance.output == "fast"


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
            with world.store.engine.begin() as somebody:
                somebody.execute(sa.select(i.c.id).with_for_update())
                world.advance(20)
                slow.runner._renewer._renew(dict(slow.runner._renewer._leases))  # a heartbeat that finds the row locked
            world.advance(11)
            assert fast.advance(instance.ref) == "complete"
        step.do("work", lambda: ran.append(1))

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert ran == [1]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_body_whose_transaction_was_lost_does_not_run_again_where_the_lease_is_lost_too(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    ran = []

    def work(tx: StepTx) -> str:
        ran.append(1)
        tx.session.execute(sa.select(1))
        if len(ran) == 1:
            world.advance(31)
            assert fast.advance(instance.ref) == "complete"
            raise sa.exc.OperationalError("UPDATE ...", {}, SerializationFailure("could not serialize access"))
        return "worked"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", work)

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert len(ran) == 2
    assert instance.output == "worked"


# --- handing on ---------------------------------------------------------------------------------


def test_a_pass_that_has_run_long_makes_room_at_its_next_boundary(make_world) -> None:
    world = make_world(pass_seconds=60, lease_seconds=600)
    said = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(6):
            step.do(f"{n}", lambda: world.advance(25))
        return "done"

    instance = order.create()
    while not instance.status.is_terminal:
        said += world.tick()
        assert len(said) < 9
    assert said == ["released: due again", "complete"]
    assert instance.row.crash_count == 0


def test_a_pass_gets_somewhere_however_short_its_time_is(make_world) -> None:
    world = make_world(pass_seconds=1, lease_seconds=600)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        world.advance(5)
        for n in range(4):
            step.do(f"{n}", lambda: 1)
        return "done"

    instance = order.run()
    assert instance.output == "done"


def test_a_worker_that_is_to_stop_hands_its_run_on_at_the_next_boundary(world: World) -> None:
    leaving, staying = world.new_worker(), world.new_worker()
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def stop() -> None:
            ran.append("a")
            leaving.should_stop = True

        step.do("a", stop)
        step.do("b", lambda: ran.append("b"))
        return "done"

    instance = order.create()
    world.messages.clear()
    assert leaving.advance(instance.ref) == "released: due again"
    assert [due.ref for due in world.messages] == [instance.ref]  # at once, not when the lease ends
    row = instance.row
    assert (row.status, row.claim_token, row.crash_count) == ("active", None, 0)
    assert staying.advance(instance.ref) == "complete"
    assert ran == ["a", "b"]
    assert instance.step("b").attempts == 1


def test_a_worker_that_is_to_stop_claims_nothing_and_the_next_sweep_offers_it_to_others(world: World) -> None:
    leaving, staying = world.new_worker(), world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("a", lambda: "done")

    instance = order.create()
    world.advance(world.settings.grace_seconds)
    world.sweeper.sweep()  # from here on it would be looked at again after the redispatch time
    world.messages.clear()
    leaving.should_stop = True
    before = instance.row
    assert leaving.advance(instance.ref) == "noop: this worker is stopping, and leaves the run to another worker"
    assert world.messages == []  # they might come back to it
    assert (instance.row.claim_token, instance.row.version) == (None, before.version)
    world.sweeper.sweep()  # at once
    assert [due.ref for due in world.messages] == [instance.ref]
    assert staying.advance(instance.ref) == "complete"


def test_a_worker_that_is_to_stop_leaves_a_sleeper_its_alarm(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", 60)

    instance = order.run()
    before = instance.row
    leaving = world.new_worker()
    leaving.should_stop = True
    assert leaving.advance(instance.ref) == "noop: this worker is stopping, and leaves the run to another worker"
    assert instance.row == before


class SoftStop(Exception):
    """What a worker raises in author code to stop it."""


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt, SoftStop])
@pytest.mark.parametrize("where", ["body", "session", "function", "branch", "boundary", "session's boundary"])
def test_what_stops_a_worker_is_no_failure_and_no_attempt(world: World, stop, where: str) -> None:
    world.exempt["I9"] = "the attempt is given back"
    world.exempt["I4"] = "branches end in any order"
    worker = world.new_worker(interruptions=(SystemExit, KeyboardInterrupt, SoftStop))
    stops, attempts = [stop("now")], []

    def work(tx: StepTx, *who) -> str:
        attempts.append(tx.attempt)
        if who:
            world.book(tx, *who)
        if stops and "boundary" not in where:
            raise stops.pop()
        if stops:
            worker.runtime.at["before-commit"] = stop_now
        return "worked"

    def stop_now() -> None:
        raise stops.pop()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        once = StepConfig(retries=0)
        if where == "function" and stops:
            raise stops.pop()
        if where == "branch":
            return step.gather(step.submit("work", once, work), step.submit_sleep("rest", 0))[0]
        who = (event.instance_id, event.run_number) if "session" in where else ()
        return step.do("book" if who else "work", once, work, *who)

    instance = order.create()
    with pytest.raises(stop, match="now"):
        worker.advance(instance.ref)
    row = instance.row
    assert (row.status, row.claim_token, row.crash_count) == ("active", None, 0)
    world.run_until_idle()
    assert instance.output == "worked"
    assert attempts == [1] * len(attempts)
    assert instance.steps()[0].attempts == 1
    assert len(world.booked()) == ("session" in where)


def test_several_branches_that_are_stopped_get_their_attempts_back(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    stops, attempts, meet = [True], [], threading.Barrier(2)

    def work(tx: StepTx) -> str:
        attempts.append((tx.name, tx.attempt))
        if stops:
            meet.wait(SECONDS)
            if tx.name == "b":
                stops.clear()
                raise SystemExit(0)
            threading.Event().wait(0.05)
        return tx.name

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(*(step.submit(name, StepConfig(retries=0), work) for name in "ab"))

    instance = order.create()
    with pytest.raises(SystemExit):
        instance.advance(world.new_worker(interruptions=(SystemExit,)))
    assert {step.step_key: step.attempts for step in instance.steps()}["b"] == 0
    world.run_until_idle()
    assert instance.output == ["a", "b"]
    assert {step.attempts for step in instance.steps()} == {1}


# --- code that a worker does not know -----------------------------------------------------------


def test_a_worker_without_the_code_leaves_the_instance_for_one_that_has_it(world: World) -> None:
    old, new = world.new_worker(registry=Registry()), world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return "done"

    instance = order.create()
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
