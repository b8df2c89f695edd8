"""One run of a workflow under a schedule of faults, and what is observed in it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal, get_args

from celery_durable.model import Status
from celery_durable.testing.harness import DurableHarness
from celery_durable.testing.instance import HarnessInstance
from celery_durable.testing.processes import RunnerProcess

# The schedules of faults under which `assert_crash_safe` runs a workflow.


Deliveries = Literal["once", "twice", "at once", "lost"]
"""What happens to each message: delivered once; twice, and every older one again, mixed; to two runners; never."""
_PAIRS = 8
_HOLDS_NO_LOCK = ("claimed", "before-body", "after-commit")


@dataclass(frozen=True, slots=True)
class CrashSchedule:
    """The faults in one run of the workflow.

    ``crashes``: the checkpoints at which one runner after the other dies. ``freeze``: the first runner is frozen beyond
    its lease at this checkpoint, and continues when another runner has finished the work.
    """

    crashes: tuple[int, ...] = ()
    freeze: int | None = None
    deliveries: Deliveries = "once"
    seed: int = 0

    @property
    def faults(self) -> int:
        """The number of step functions that may run without their result being stored."""
        return len(self.crashes) + (self.freeze is not None)


def choose_schedules(schedules: list[CrashSchedule], most: int, seed: int) -> list[CrashSchedule]:
    """Return at most ``most`` of the schedules, which the seed chooses."""
    if len(schedules) <= most:
        return schedules
    chosen = random.Random(f"{seed}/choice").sample(range(len(schedules)), most)  # noqa: S311  # reproducible on purpose
    return [schedules[number] for number in sorted(chosen)]


def generate_schedules(passed: Sequence[str], seed: int) -> Iterator[CrashSchedule]:
    """Order schedules from simple to complex, so that the first failure is nearly the shortest."""
    rng = random.Random(f"{seed}/schedules")  # noqa: S311  # reproducible on purpose
    kinds: tuple[Deliveries, ...] = get_args(Deliveries)
    for deliveries in kinds[1:]:
        yield CrashSchedule(deliveries=deliveries, seed=seed)
    for number in range(len(passed)):
        yield CrashSchedule((number,), deliveries=kinds[number % 2], seed=seed)
    for number, name in enumerate(passed):
        if name in _HOLDS_NO_LOCK:
            yield CrashSchedule(freeze=number, seed=seed)
    for _ in range(_PAIRS):
        pair = rng.randrange(len(passed)), rng.randrange(len(passed))
        yield CrashSchedule(pair, deliveries=rng.choice(kinds), seed=rng.getrandbits(16))


def simplify(schedule: CrashSchedule) -> Iterator[CrashSchedule]:
    """Yield schedules with fewer faults, which may show the same failure."""
    if schedule.faults and schedule.deliveries != "once":
        yield replace(schedule, crashes=(), freeze=None)
    for number in schedule.crashes if len(schedule.crashes) > 1 else ():
        yield replace(schedule, crashes=(number,), deliveries="once")
        yield replace(schedule, crashes=(number,))
    if schedule.deliveries != "once":
        yield replace(schedule, deliveries="once")


_MOST_TURNS = 10_000


@dataclass(slots=True)
class EndResult:
    """How an instance ended."""

    status: str
    output: Any
    error: str | None
    steps: dict[str, str]


@dataclass(slots=True)
class Observed:
    """The observations of one run."""

    passed: list[str] = field(default_factory=list)
    instances: dict[str, EndResult] = field(default_factory=dict)
    effects: Any = None
    unchecked: list[str] = field(default_factory=list)
    """The tables that were written and are not compared. Only the undisturbed run looks for them."""
    bodies: Counter[tuple[str, str]] = field(default_factory=Counter)
    unsent: list[str] = field(default_factory=list)
    uncancelled: str | None = None
    """The step at which the run should have been cancelled, and never waited."""
    faults: list[str] = field(default_factory=list)
    is_endless: bool = False
    lost: set[str] = field(default_factory=set)
    """The names of the steps that failed with StepLost."""
    misnamed: str | None = None


class FaultyRun:
    """A run in progress: delivers messages, moves time, sends events and causes faults."""

    def __init__(
        self,
        harness: DurableHarness,
        schedule: CrashSchedule,
        events: list[tuple[str, Any]],
        cancel_at: str | None = None,
    ) -> None:
        self.events, self.cancel_at, self.seen = events, cancel_at, Observed()
        self._harness, self._schedule = harness, schedule
        self._crashes = list(schedule.crashes)
        self._runner: RunnerProcess | None = None
        self._known: list[Any] = []
        self._answered: set[tuple[str, str, int, str, datetime | None]] = set()

    def run(self, instance: HarnessInstance[Any]) -> None:
        """Deliver messages, let time pass, send events and cancel the instance, until nothing is left to do."""
        for _ in range(_MOST_TURNS):
            if self._harness.messages:
                self._deliver()
            elif not (self._cancel(instance) or self._send() or self._harness.tasks.answer()):
                due_at = self._harness.next_due()
                if due_at is None:
                    return
                self._harness.clock.set_to(max(due_at, self._harness.clock.now))
                self._prepare()
                self._harness.tick()
        self.seen.is_endless = True

    def _deliver(self) -> None:
        messages = self._harness.messages
        runner = self._prepare()
        match self._schedule.deliveries:
            case "once":
                self._harness.deliver(messages.pop(0))
            case "twice":
                self._known += [each for each in messages if each not in self._known]
                messages.duplicate()
                messages.extend(self._known)
                messages.shuffle()
                batch, messages[:] = list(messages), []
                for each in batch:
                    self._harness.deliver(each, to=self._prepare())
            case "at once":
                self._harness.run_concurrently()
            case "lost":
                if messages.drop() and self._harness.next_due() is not None:
                    self._look_for_what_is_lost()
        self._note(runner)

    def _look_for_what_is_lost(self) -> None:
        """Deliver everything that the sweep publishes. If these messages were lost too, nothing would run."""
        while not self._harness.messages and (due_at := self._harness.next_due()) is not None:
            self._harness.clock.set_to(max(due_at, self._harness.clock.now))
            self._harness.tick()
        while self._harness.messages:
            self._harness.deliver(self._harness.messages.pop(0), to=self._prepare())

    def _prepare(self) -> RunnerProcess:
        """Return the runner for the next message, with its scheduled fault set."""
        runner = self._harness.runner
        if runner is not self._runner:
            if self._runner is not None:
                self._note(self._runner)
            elif self._schedule.freeze is not None:
                runner.runtime.at[self._schedule.freeze] = partial(self._freeze, runner)
            self._runner = runner
            self.seen.passed = runner.runtime.passed
            if self._crashes:
                runner.runtime.crash_at = self._crashes.pop(0)
        return runner

    def _note(self, runner: RunnerProcess) -> None:
        if runner.is_dead and runner.runtime.crash_at is not None:
            runner.runtime.crash_at = None
            self.seen.faults.append(f"{runner.name} died at {self._place(runner)}")

    def _place(self, runner: RunnerProcess) -> str:
        attempts = self._harness.attempts
        last = f", the last body being that of step {attempts[-1].step!r}" if attempts else ", before any body"
        return f"checkpoint {len(runner.runtime.passed) - 1} ({runner.runtime.passed[-1]}{last})"

    def _freeze(self, runner: RunnerProcess) -> None:
        self.seen.faults.append(f"{runner.name} froze at {self._place(runner)} until another had taken over")
        runner.suspend()
        self._harness.clock.advance(self._harness.settings.lease_seconds + 1)
        second = self._harness.second_runner()
        for summary in self._harness.durable.internals.operations.queries.list(limit=1000).items:
            self._harness.deliver(self._harness.instance(summary.workflow, summary.id), to=second)
        runner.wake_up()

    def _cancel(self, instance: HarnessInstance[Any]) -> bool:
        """Cancel the instance if it waits at the step where it is to be cancelled."""
        if not any(step.is_waiting and step.name == self.cancel_at for step in instance.steps()):
            return False
        self.cancel_at = None
        instance.cancel()
        return True

    def _send(self) -> bool:
        """Send the next event that an instance waits for."""
        if not self.events:
            return False
        for summary in self._harness.durable.internals.operations.queries.list(status=Status.WAITING, limit=1000).items:
            handle = self._harness.instance(summary.workflow, summary.id)
            for step in handle.steps():
                wait = summary.workflow, summary.id, summary.run_number, step.step_key, step.wake_at
                if not step.is_waiting or step.wait_event_type is None or wait in self._answered:
                    continue
                for event in self.events:
                    if event[0] == step.wait_event_type:
                        self._answered.add(wait)
                        self.events.remove(event)
                        handle.send_event(*event)
                        return True
        return False
