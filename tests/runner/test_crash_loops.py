"""Workers that die again and again: growing pauses, attempts that are used up, and the end of an instance."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from tests.support.flows import flow_of
from tests.support.world import World

LEASE = timedelta(seconds=31)


class Deadly:
    """A body that kills its worker, and keeps the numbers of its attempts."""

    def __init__(self, world: World) -> None:
        self.world, self.attempts = world, list[int]()

    def __call__(self, tx: StepTx) -> None:
        self.attempts.append(tx.attempt)
        self.world.worker.die()


def let_workers_die(world: World, instance, limit: int = 12) -> list[float]:
    """Run until the instance has ended; returns the pause after each crash, in seconds."""
    pauses = []
    for _ in range(limit):
        world.run_until_idle()
        row = instance.row
        if instance.status.is_terminal:
            return pauses
        if row.claim_token is None:
            pauses.append((row.run_at - world.now_us) / 1_000_000)
            world.advance(instance.run_at - world.now)
        else:
            world.advance(LEASE)
            world.sweeper.sweep()
            row = instance.row
            pauses.append((row.run_at - world.now_us) / 1_000_000)
            world.advance(timedelta(microseconds=max(0, row.run_at - world.now_us)))
    raise AssertionError(f"the instance did not end within {limit} crashes")


def test_an_instance_that_kills_every_worker_is_given_up_with_growing_pauses(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(1)
        world.worker.die()

    instance = order.create()
    assert let_workers_die(world, instance) == [0, 1, 2, 4, 8]
    assert len(seen) == 5
    assert instance.error == (
        "WorkerCrashLoop: 5 workers in a row died or lost their lease while they worked on this instance, without a "
        "step in between. Look at the workers' logs (out of memory, a crash in native code?), then retry it."
    )


def test_a_resumed_instance_whose_first_pass_crashed_is_due_at_once(world: World) -> None:
    """A pause after a crash is no start time: the run has started, so a resume ends the pause as for any other run."""

    instance = flow_of(world, lambda step: step.do("charge", lambda: world.worker.die())).create()
    for _ in range(2):
        world.run_until_idle()
        world.advance(LEASE)
        world.sweeper.sweep()
    assert (instance.status, instance.run_at > world.now) == ("active", True)
    instance.pause()
    instance.resume()
    assert (instance.status, instance.run_at) == ("active", world.now)


def test_how_many_workers_may_die_is_a_setting(make_world) -> None:
    world = make_world(max_crashes=2)
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(1)
        world.worker.die()

    instance = order.create()
    let_workers_die(world, instance)
    assert len(seen) == 2
    assert instance.error.startswith("WorkerCrashLoop: 2 workers in a row ")


def test_a_step_that_was_recorded_in_between_clears_the_count_of_deaths(world: World) -> None:
    deaths = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(4):
            step.do(f"{n}", lambda: 1)
            if deaths.count(n) < 4:
                deaths.append(n)
                world.worker.die()
        return "survived"

    instance = order.create()
    let_workers_die(world, instance, limit=40)
    assert instance.output == "survived"
    assert len(deaths) == 16


def test_a_worker_that_releases_the_run_in_between_does_not_clear_the_crash_count(world: World) -> None:
    deadly, leaving = Deadly(world), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for worker in leaving:
            worker.should_stop = True
        step.do("deadly", StepConfig(retries=2), deadly)

    instance = order.create()
    for _ in range(3):
        world.run_until_idle()  # one worker dies
        world.advance(LEASE)
        world.sweeper.sweep()
        world.advance(60)
        leaving.append(world.new_worker())
        assert leaving[-1].advance(instance.ref) == "released: due again"  # the next is told to stop before it begins
        world.new_worker()
    world.run_until_idle()
    assert deadly.attempts == [1, 2, 3]
    assert instance.error.startswith("StepMaxAttemptsExceeded: ")


def test_a_worker_that_makes_sure_of_its_lease_does_not_clear_the_count_of_deaths(world: World) -> None:
    deadly = Deadly(world)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        world.advance(31)  # its lease may have ended by its own clock, so it asks before it begins the body
        step.do("deadly", StepConfig(retries=2), deadly)

    instance = order.create()
    let_workers_die(world, instance)
    assert deadly.attempts == [1, 2, 3]
    assert instance.error.startswith("StepMaxAttemptsExceeded: ")


@pytest.mark.parametrize(
    "sibling",
    [
        lambda step: step.submit_wait_for_event("approval", "approval"),
        lambda step: step.submit_sleep("long", "300 days"),
        lambda step: step.submit_sleep("short", 5),
        lambda step: step.submit("quick", lambda: 1),
        lambda step: step.submit("retrying", StepConfig(retries=Retries(limit=None, delay="1 h")), lambda: 1 / 0),
    ],
    ids=["wait", "long sleep", "short sleep", "body", "retry"],
)
def test_a_deadly_branch_uses_up_its_attempts_whatever_is_open_beside_it(world: World, sibling) -> None:
    world.exempt["I4"] = "branches end in any order"
    deadly = Deadly(world)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        branch = step.submit("deadly", StepConfig(retries=2), deadly)
        try:
            step.first("race", branch, sibling(step)) if event.payload else step.gather(branch, sibling(step))
        except StepFailed as exc:
            return exc.error_name

    instance = order.create()
    for _ in range(30):
        world.run_until_idle()
        if "deadly" in instance.statuses() and instance.step("deadly").status == "errored":
            break
        world.advance(LEASE)
    assert deadly.attempts == [1, 2, 3]
    assert instance.step("deadly").error.name == "StepMaxAttemptsExceeded"


def test_a_deadly_branch_that_may_be_tried_for_ever_is_given_up_with_growing_pauses(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    deadly = Deadly(world)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        branch = step.submit("deadly", StepConfig(retries=Retries(limit=None)), deadly)
        step.gather(branch, step.submit_wait_for_event("approval", "approval"))

    instance = order.create()
    # The wait is recorded by the first pass; from then on each pass only announces the next attempt.
    assert let_workers_die(world, instance) == [0, 1, 2, 4, 8]
    assert deadly.attempts == [1, 2, 3, 4, 5]
    assert instance.error.startswith("WorkerCrashLoop: 5 workers in a row ")


class Leaving(BaseException):
    """The worker is told to stop while a body runs."""


def test_deploys_between_the_deaths_of_a_branch_neither_count_nor_forget_them(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    attempts, is_deploying = [], False

    def work(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        if is_deploying:
            raise Leaving
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        deadly = step.submit("deadly", StepConfig(retries=Retries(limit=None)), work)
        step.gather(deadly, step.submit_wait_for_event("approval", "approval"))

    instance = order.create()
    for deaths in range(1, 5):
        world.run_until_idle()  # one worker dies
        world.advance(LEASE)
        world.sweeper.sweep()
        world.advance(60)
        is_deploying = True
        with pytest.raises(Leaving):
            world.new_worker(interruptions=(Leaving,)).advance(instance.ref)
        is_deploying = False
        assert (instance.row.crash_count, instance.step("deadly").attempts) == (deaths, deaths)
        world.new_worker()
    let_workers_die(world, instance)
    assert attempts == [1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert instance.error.startswith("WorkerCrashLoop: 5 workers in a row ")


def test_a_branch_beside_a_deadly_one_keeps_its_own_count(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    attempts = []

    def work(tx: StepTx) -> str:
        attempts.append((tx.name, tx.attempt))
        return tx.name

    instance = flow_of(world, lambda step: step.gather(step.submit("a", work), step.submit("b", work))).create()
    world.worker.runtime.crash_at = "after-body"
    world.run_until_idle()
    assert instance.statuses() == {"a": "pending", "b": "pending"}
    world.run_after(LEASE)
    assert instance.output == ["a", "b"]
    assert sorted(attempts) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
