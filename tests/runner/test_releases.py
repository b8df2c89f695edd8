"""A worker releases its run at a step boundary: after a long pass, or if it is to stop."""

from __future__ import annotations

import threading

import pytest

from celery_durable import Step, StepConfig, StepTx, WorkflowEvent, signals
from tests.signals.conftest import hearing
from tests.support.flows import flow_of
from tests.support.world import World

SECONDS = 10


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

    instance = flow_of(world, lambda step: step.do("a", lambda: "done")).create()
    world.advance(world.settings.grace_seconds)
    world.sweeper.sweep()  # from here on it would be looked at again after the redispatch time
    world.messages.clear()
    leaving.should_stop = True
    before = instance.row
    assert leaving.advance(instance.ref) == "noop: this worker takes no runs now, and leaves the run to a later sweep"
    assert world.messages == []  # they might come back to it
    assert (instance.row.claim_token, instance.row.version) == (None, before.version)
    world.sweeper.sweep()  # at once
    assert [due.ref for due in world.messages] == [instance.ref]
    assert staying.advance(instance.ref) == "complete"


def test_a_worker_that_is_to_stop_leaves_a_sleeper_its_alarm(world: World) -> None:
    instance = flow_of(world, lambda step: step.sleep("rest", 60)).run()
    before = instance.row
    leaving = world.new_worker()
    leaving.should_stop = True
    assert leaving.advance(instance.ref) == "noop: this worker takes no runs now, and leaves the run to a later sweep"
    assert instance.row == before


class SoftStop(Exception):
    """What a worker raises in author code to stop it."""


@pytest.mark.parametrize(
    ("stop", "where"),
    [
        *((SoftStop, where) for where in ("body", "session", "function", "branch", "boundary", "session's boundary")),
        (SystemExit, "branch"),
        (KeyboardInterrupt, "function"),
    ],
)
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


def test_a_body_that_a_stop_has_interrupted_is_reported_again_as_the_same_attempt(world: World) -> None:
    worker, stops = world.new_worker(interruptions=(SystemExit,)), [SystemExit("now")]

    def work() -> None:
        if stops:
            raise stops.pop()

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("work", work)
        step.sleep("rest", "1 hour")

    instance = order.create()
    with hearing(signals.step_started) as started:
        with pytest.raises(SystemExit):
            worker.advance(instance.ref)
        world.run_until_idle()
        world.run_after(3600)  # the last pass replays both steps
    assert instance.status == "complete"
    assert [(each["step"], each["attempt"]) for each in started] == [("work", 1), ("work", 1), ("rest", 1)]


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

    order = flow_of(world, lambda step: step.gather(*(step.submit(name, StepConfig(retries=0), work) for name in "ab")))
    instance = order.create()
    with pytest.raises(SystemExit):
        instance.advance(world.new_worker(interruptions=(SystemExit,)))
    assert {step.step_key: step.attempts for step in instance.steps()}["b"] == 0
    world.run_until_idle()
    assert instance.output == ["a", "b"]
    assert {step.attempts for step in instance.steps()} == {1}
