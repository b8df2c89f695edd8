"""What happens between any two commits of a worker, and what happens in any order: one after another, and by dice."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from celery_durable import EventTimeout, Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import InstanceTerminal
from celery_durable.model import Status
from tests.support.world import World, insert_name

mostly_on_sqlite = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
patient = pytest.mark.timeout(180)

UNLOCKED = ("claimed", "after-commit", "before-body")
"""Checkpoints at which the worker holds no lock."""


@pytest.fixture
def errand(world: World):
    """A few steps of every kind, without sessions: on SQLite those would keep everybody else out."""
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def errand(event: WorkflowEvent, step: Step):
        step.do("begin", lambda: 1)
        try:
            answer = step.wait_for_event("approval", "approval", timeout=300).payload
        except EventTimeout:
            answer = "late"
        step.gather(
            step.submit("flaky", StepConfig(retries=Retries(limit=1, delay=5)), lambda tx: 1 / (tx.attempt - 1)),
            step.submit_sleep("nap", 10),
        )
        step.do("end", lambda tx: tx.mutate(insert_name(f"{event.instance_id}-{event.run_number}")))
        return [event.run_number, answer]

    return errand


def finish(world: World, instance) -> None:
    for _ in range(20):
        world.run_until_idle()
        if instance.status.is_terminal:
            return
        if instance.status is Status.PAUSED:
            instance.resume()
        world.advance(61)
    raise AssertionError(instance.row)


def send(instance) -> None:
    instance.send("approval", "yes", id=f"{instance.id}-yes")


ACTIONS = {
    "send_event": send,
    "pause": lambda instance: instance.pause(),
    "pause and resume": lambda instance: (instance.pause(), instance.resume()),
    "terminate": lambda instance: instance.terminate(),
    "restart": lambda instance: instance.restart(),
}


@patient
@mostly_on_sqlite
@pytest.mark.parametrize(
    "action", [pytest.param(name, marks=pytest.mark.slow if name == "pause and resume" else ()) for name in ACTIONS]
)
def test_anything_may_happen_to_an_instance_between_any_two_commits_of_its_worker(
    world: World, errand, action: str
) -> None:
    scout = world.new_worker()
    finish(world, errand.create(id="scout"))
    numbers = [n for n, name in enumerate(scout.runtime.passed) if name in UNLOCKED]
    scout.runtime.is_dead = True  # from here on each instance has a worker of its own
    for number in numbers:
        instance = errand.create(id=f"at-{number}")
        done = []

        def act(instance=instance, done=done) -> None:
            done.append(instance.status)
            try:
                ACTIONS[action](instance)
            except InstanceTerminal:
                assert instance.status.is_terminal

        world.new_worker().runtime.at[number] = act
        finish(world, instance)
        assert len(done) == 1, number
        was_over = done[0].is_terminal
        match action:
            case "send_event":
                in_time = was_over or instance.output == [1, "yes"] or instance.step("approval").status == "errored"
                assert in_time, number
            case "terminate":
                assert instance.status == ("complete" if was_over else "terminated"), number
            case "restart":
                assert instance.output == [2, "late"], number
                assert instance.row.run_number == 2
            case _:
                assert instance.output == [1, "late"], number


WAITS = {
    "alone": lambda step: step.wait_for_event("approval", "approval", timeout=300),
    "in a gather": lambda step: step.gather(
        step.submit("work", lambda: 1),
        step.submit_sleep("nap", 300),
        step.submit_wait_for_event("approval", "approval", timeout=300),
    ),
    "in a race": lambda step: step.first(
        "race",
        step.submit_wait_for_event("other", "other", timeout=300),
        step.submit_wait_for_event("approval", "approval", timeout=300),
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_event_is_never_missed_whenever_it_is_sent(world: World, wait: str) -> None:
    """Before the wait, while it is being recorded, after: nobody has to wait for the deadline."""
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("begin", lambda: 1)
        WAITS[wait](step)

    scout = world.new_worker()
    assert order.run(id="scout").status == "waiting"
    numbers = [n for n, name in enumerate(scout.runtime.passed) if name in UNLOCKED]
    scout.runtime.is_dead = True
    for number in numbers:
        instance = order.create(id=f"at-{number}")
        world.new_worker().runtime.at[number] = lambda instance=instance: send(instance)
        world.run_until_idle()
        assert instance.statuses()["approval"] == "completed", number
        world.run_after(300)
        assert instance.status == "complete", number


class Dice:
    """Everything that may happen, in an order that a seed tells."""

    def __init__(self, world: World, instances: list, seed: int) -> None:
        self.world, self.instances, self.random = world, instances, random.Random(seed)
        self.story: list[str] = []

    def roll(self) -> None:
        happening = self.random.choice(
            [self.deliver] * 6 + [self.wait] * 4 + [self.sweep] * 3 + [self.crash] * 2
            + [self.lose, self.double, self.shuffle, self.send, self.pause, self.resume, self.restart, self.stop]
        )  # fmt: skip
        self.story.append(happening.__name__)
        try:
            happening()
        except InstanceTerminal:
            pass

    def any(self):
        return self.random.choice(self.instances)

    def deliver(self) -> None:
        if self.world.messages:
            self.world.worker.advance(self.world.messages.pop(0).ref)

    def wait(self) -> None:
        self.world.advance(self.random.choice([0.5, 3, 12, 31, 70]))

    def sweep(self) -> None:
        self.world.sweeper.sweep()

    def crash(self) -> None:
        runtime = self.world.worker.runtime
        runtime.crash_at = len(runtime.passed) + self.random.randrange(25)

    def lose(self) -> None:
        self.world.messages.clear()

    def double(self) -> None:
        self.world.messages.extend(self.world.messages[:3])

    def shuffle(self) -> None:
        self.random.shuffle(self.world.messages)

    def send(self) -> None:
        self.any().send("approval", "yes")

    def pause(self) -> None:
        self.any().pause()

    def resume(self) -> None:
        self.any().resume()

    def restart(self) -> None:
        if self.random.random() < 0.3:
            self.any().restart()

    def stop(self) -> None:
        """The worker is asked to stop; another takes its place at the next message."""
        worker = self.world.worker
        worker.should_stop = True
        if self.world.messages:
            worker.advance(self.world.messages.pop(0).ref)
        self.world.new_worker()


@patient
@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in range(30)])
def test_whatever_happens_in_whatever_order_every_instance_ends_and_every_step_counts_once(
    world: World, seed: int
) -> None:
    world.exempt["I4"] = "branches end in any order"
    bodies: Counter = Counter()

    def count(tx: StepTx) -> int:
        bodies[tx.idempotency_key, tx.attempt] += 1
        return tx.attempt

    @world.workflow
    def journey(event: WorkflowEvent, step: Step):
        who = event.instance_id, event.run_number
        careful = StepConfig(retries=Retries(limit=None, delay=2, backoff="constant"))
        step.do("count", careful, count)
        step.do("book one", careful, world.book, *who)
        step.sleep("rest", 10)
        try:
            step.wait_for_event("approval", "approval", timeout=60)
        except EventTimeout:
            step.log.info("no approval")
        step.gather(
            step.submit("book two", careful, world.book, *who),
            step.submit("flaky", careful, lambda tx: 1 / (tx.attempt // 2)),
            step.submit_sleep("nap", 20),
        )
        step.first("race", step.submit_sleep("quick", 3), step.submit_wait_for_event("other", "other"))
        step.do("mutate", careful, lambda tx: tx.mutate(insert_name(f"{event.instance_id}-{event.run_number}")))
        return event.run_number

    instances = [journey.create(id=f"i-{n}") for n in range(3)]
    dice = Dice(world, instances, seed)
    for _ in range(120):
        dice.roll()
    for worker in list(world._workers):
        worker.runtime.crash_at, worker.should_stop = None, False
    for instance in instances:
        for _ in range(30):
            world.run_until_idle()
            if instance.status.is_terminal:
                break
            instance.resume()
            world.advance(61)
        error = None if instance.status == "complete" else instance.error
        if error is not None:  # the dice may kill five workers in a row at one place
            assert error.startswith("WorkerCrashLoop: "), (error, dice.story)
            continue
        assert instance.output == instance.row.run_number, dice.story
        assert set(instance.statuses().values()) <= {"completed", "errored", "cancelled"}, dice.story
    assert max(bodies.values()) == 1, dice.story
