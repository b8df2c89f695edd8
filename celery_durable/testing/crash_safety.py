"""assert_crash_safe: a test that a workflow has the same result wherever its workers die.

    def test_order_is_crash_safe():
        assert_crash_safe(order, {"cents": 100}, events=[("approval", {"by": "eve"})], side_effects=Shop.metadata)

It runs the workflow once undisturbed, then once for each schedule of faults. A runner dies before or after a commit, a
publishing or a step's function, or freezes there until another runner has taken over. Messages arrive twice and in
another order, at two runners at once, or not at all. The result must be the same each time.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable.model import Status
from celery_durable.testing.code import Code, definition_of
from celery_durable.testing.errors import HarnessMisuse, NotCrashSafe, SampledSchedules
from celery_durable.testing.harness import DurableHarness
from celery_durable.testing.process import RunnerProcess

Deliveries = Literal["once", "twice", "at once", "lost"]
"""What happens to each message: delivered once; twice, and every older one again, mixed; to two runners; never."""

Deed = Callable[[Session], Any]

_ID = "crash-safe"
_MOST_TURNS = 10_000
_PAIRS = 8
_MOST_SCHEDULES = 200
_HOLDS_NO_LOCK = ("claimed", "before-body", "after-commit")
_MOST_SHOWN = 500


@dataclass(frozen=True, slots=True)
class CrashSchedule:
    """The faults in one run of the workflow.

    ``crashes``: the first runner dies at its checkpoint of the first number, the next runner at its checkpoint of the
    second number, and so on. ``freeze``: the first runner is frozen beyond its lease at this checkpoint, and continues
    when another runner has finished the work.
    """

    crashes: tuple[int, ...] = ()
    freeze: int | None = None
    deliveries: Deliveries = "once"
    seed: int = 0

    @property
    def faults(self) -> int:
        """The number of step functions that may run without their result being stored."""
        return len(self.crashes) + (self.freeze is not None)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The work of `assert_crash_safe`. ``checkpoints``: the places in an undisturbed run where a runner can die."""

    checkpoints: int
    schedules: int
    crashes: int
    freezes: int
    possible: int
    """The number of possible schedules. If there are more than ``schedules``, a sample was run."""

    @property
    def is_sample(self) -> bool:
        """Whether some schedules were left out."""
        return self.schedules < self.possible


def assert_crash_safe(
    workflow: Code,
    params: Any = None,
    *,
    events: Sequence[tuple[str, Any]] = (),
    side_effects: sa.MetaData | Deed | None = None,
    compare: Callable[[Any], Any] | None = None,
    setup: Callable[[DurableHarness], object] | None = None,
    workflows: Iterable[Code] = (),
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    schedules: int | None = None,
    replay: CrashSchedule | None = None,
    expect_error: str | None = None,
) -> CrashReport:
    """Fail with NotCrashSafe unless the workflow has the same result wherever its runners die.

    Output or error, stored steps and side effects must be the same, and no step's function may run more often than the
    crashes explain. Time moves by itself, to the end of each sleep, retry and timeout.

    Args:
        workflow: The workflow to test.
        params: Its parameters.
        events: Pairs of type and payload. Each is sent when the workflow waits for its type.
        side_effects: What steps write with ``tx.session`` or ``tx.mutate``. The MetaData of your tables: they are
            created before each run, and their rows are compared without automatic keys. Or a function of a session
            whose results are compared.
        compare: Returns the part of the output that must be the same, if it contains times or the like.
        setup: Gets each harness before the run, to create tables or mocks, for example
            ``harness.mocks.mock_step_result("charge", "ch_1")``.
        workflows: Other workflows that this one creates or sends events to.
        settings: As for `DurableHarness`.
        seed: Decides all random values.
        schedules: The largest number of schedules. If there are more, the seed chooses. None: 200, and
            SampledSchedules warns if there are more.
        replay: Run only this schedule, as a failure shows it.
        expect_error: The name of the error with which the workflow should end.

    Returns:
        What was run.

    Raises:
        NotCrashSafe: A run has another result, or runs a step's function too often.
        HarnessMisuse: The undisturbed run does not end as expected, or ``setup`` mocks steps that it does not reach.
    """
    trial = _Trial(workflow, params, tuple(events), side_effects, compare, setup, tuple(workflows), settings or {})
    calm = trial.run(CrashSchedule(seed=seed))
    trial.check_calm(calm, expect_error)
    possible = [replay] if replay is not None else list(_schedules(calm.passed, seed))
    chosen = _choose(possible, _MOST_SCHEDULES if schedules is None else schedules, seed)
    if schedules is None and len(chosen) < len(possible):
        text = f"{len(chosen)} of {len(possible)} schedules are run, which the seed chooses."
        remedy = f"schedules={len(possible)} runs all, schedules={len(chosen)} says that so many are enough."
        warnings.warn(SampledSchedules(f"{text} {remedy}"), stacklevel=2)
    for schedule in chosen:
        if problems := trial.differences(calm, trial.run(schedule)):
            shortest, problems, where = trial.shorten(calm, schedule, problems)
            raise NotCrashSafe(definition_of(workflow).name, repr(shortest), where, problems)
    return CrashReport(
        checkpoints=len(calm.passed),
        schedules=len(chosen),
        crashes=sum(len(each.crashes) for each in chosen),
        freezes=sum(each.freeze is not None for each in chosen),
        possible=len(possible),
    )


def _choose(schedules: list[CrashSchedule], most: int, seed: int) -> list[CrashSchedule]:
    if len(schedules) <= most:
        return schedules
    chosen = random.Random(f"{seed}/choice").sample(range(len(schedules)), most)  # noqa: S311  # reproducible on purpose
    return [schedules[number] for number in sorted(chosen)]


def _schedules(passed: Sequence[str], seed: int) -> Iterator[CrashSchedule]:
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


# --- one run ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _EndResult:
    """How an instance ended."""

    status: str
    output: Any
    error: str | None
    steps: dict[str, str]


@dataclass(slots=True)
class _Observed:
    """The observations of one run."""

    passed: list[str] = field(default_factory=list)
    instances: dict[str, _EndResult] = field(default_factory=dict)
    effects: Any = None
    bodies: Counter[tuple[str, str]] = field(default_factory=Counter)
    unsent: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_endless: bool = False
    misnamed: str | None = None


@dataclass(slots=True)
class _Trial:
    """The workflow under test, with everything that each of its runs needs."""

    workflow: Code
    params: Any
    events: tuple[tuple[str, Any], ...]
    side_effects: sa.MetaData | Deed | None
    compare: Callable[[Any], Any] | None
    setup: Callable[[DurableHarness], object] | None
    others: tuple[Code, ...]
    settings: Mapping[str, Any]

    def run(self, schedule: CrashSchedule) -> _Observed:
        """Run the workflow to its end under a schedule, in a new harness."""
        codes, seed = [self.workflow, *self.others], schedule.seed
        with DurableHarness(codes, seed=seed, settings=self.settings, unused_mocks=True) as harness:
            if isinstance(self.side_effects, sa.MetaData):
                harness.create_tables(self.side_effects)
            if self.setup is not None:
                self.setup(harness)
            course = _Course(harness, schedule, list(self.events))
            harness.create(definition_of(self.workflow).name, self.params, id=_ID)
            course.run()
            return self._observe(harness, course)

    def _observe(self, harness: DurableHarness, course: _Course) -> _Observed:
        seen = course.seen
        seen.misnamed = harness.mocks.describe_unused()
        seen.unsent = [type_ for type_, _ in course.events]
        seen.bodies = Counter((f"{each.workflow}/{each.instance_id}", each.step) for each in harness.attempts)
        for summary in harness.durable.internals.operations.queries.list(limit=1000).items:
            handle = harness.instance(summary.workflow, summary.id)
            status, history = handle.status(), handle.history()
            error = None if status.error is None else f"{status.error.name}: {status.error.message}"
            is_ours = summary.id == _ID and self.compare is not None and status.status is Status.COMPLETE
            output = self.compare(status.output) if is_ours and self.compare is not None else status.output
            steps = {step.step_key: str(step.status) for step in history.steps}
            seen.instances[f"{summary.workflow}/{summary.id}"] = _EndResult(str(status.status), output, error, steps)
        if self.side_effects is not None:
            with harness.session() as session:
                seen.effects = _effects(self.side_effects, session)
        return seen

    def check_calm(self, calm: _Observed, expected: str | None) -> None:
        """Check that the undisturbed run ends; otherwise there is nothing to compare with."""
        name = definition_of(self.workflow).name
        if calm.is_endless:
            raise HarnessMisuse(f"Workflow {name!r} comes to no end, also undisturbed: assert_crash_safe() needs one.")
        if calm.unsent:
            raise HarnessMisuse(f"Workflow {name!r} never waited for {calm.unsent}: leave these out of events=.")
        ended = calm.instances[f"{name}/{_ID}"]
        error = None if ended.error is None else ended.error.partition(":")[0]
        if (error, ended.status) != (expected, str(Status.COMPLETE if expected is None else Status.ERRORED)):
            how = ended.status if ended.error is None else f"{ended.status} with {ended.error}"
            meant = "complete" if expected is None else f"errored with {expected}"
            remedy = "" if error is None else f" If it is meant to fail, pass expect_error={error!r}."
            raise HarnessMisuse(f"Workflow {name!r} ends {how}, also undisturbed, and not {meant}.{remedy}")
        if calm.misnamed is not None:
            raise HarnessMisuse(f"{calm.misnamed} Correct the names in setup=.")

    def differences(self, calm: _Observed, seen: _Observed) -> list[str]:
        """Return the differences from the undisturbed run, the most informative first."""
        found = ["It comes to no end."] if seen.is_endless else []
        for name in calm.instances.keys() | seen.instances.keys():
            found += _unlike(name, calm.instances.get(name), seen.instances.get(name))
        if seen.effects != calm.effects:
            found.append(
                f"The side effects are {_short(seen.effects)}, and undisturbed {_short(calm.effects)}. Write through "
                "tx.session or tx.mutate, or have the receiver tell repetitions apart by tx.idempotency_key."
            )
        for (name, step), times in seen.bodies.items():
            most = calm.bodies[name, step] + len(seen.faults)
            if times > most and (name, step) in calm.bodies:  # else it is reported already
                found.append(f"The body of step {step!r} of {name} ran {times} times; {most} are explained.")
        return found

    def shorten(
        self, calm: _Observed, schedule: CrashSchedule, problems: list[str]
    ) -> tuple[CrashSchedule, list[str], list[str]]:
        """Return the shortest schedule with this failure, its problems and where its runners died."""
        for simpler in _simpler(schedule):
            seen = self.run(simpler)
            if found := self.differences(calm, seen):
                return simpler, found, seen.faults
        again = self.run(schedule)
        found = self.differences(calm, again) or [*problems, "Run again it passed: something is left to chance."]
        return schedule, found, again.faults


def _simpler(schedule: CrashSchedule) -> Iterator[CrashSchedule]:
    if schedule.faults and schedule.deliveries != "once":
        yield replace(schedule, crashes=(), freeze=None)
    for number in schedule.crashes if len(schedule.crashes) > 1 else ():
        yield replace(schedule, crashes=(number,), deliveries="once")
        yield replace(schedule, crashes=(number,))
    if schedule.deliveries != "once":
        yield replace(schedule, deliveries="once")


def _unlike(name: str, calm: _EndResult | None, seen: _EndResult | None) -> list[str]:
    if calm is None or seen is None:
        return [f"Instance {name} {'is there only undisturbed' if seen is None else 'is there only then'}."]
    found = []
    if (seen.status, seen.error) != (calm.status, calm.error):
        error = "" if seen.error is None else f" with {seen.error}"
        found.append(f"{name} is {seen.status}{error}, and undisturbed {calm.status}.")
    elif seen.output != calm.output:
        found.append(f"{name} returns {_short(seen.output)}, and undisturbed {_short(calm.output)}.")
    if seen.steps != calm.steps:
        found.append(
            f"{name} records {_short(seen.steps)}, and undisturbed {_short(calm.steps)}. A workflow must make the same "
            "calls every time it is run: take time and chance from step.now(), step.random() and step.uuid(), and "
            "everything else from params and from the results of steps."
        )
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _effects(wanted: sa.MetaData | Deed, session: Session) -> Any:
    if not isinstance(wanted, sa.MetaData):
        return wanted(session)
    rows: dict[str, list[Any]] = {}
    for table in wanted.sorted_tables:
        columns = [column for column in table.c if column is not table.autoincrement_column]
        rows[table.name] = sorted((tuple(row) for row in session.execute(sa.select(*columns))), key=repr)
    return rows


# --- a run in progress --------------------------------------------------------------------------


class _Course:
    """A run in progress: delivers messages, moves time, sends events and causes faults."""

    def __init__(self, harness: DurableHarness, schedule: CrashSchedule, events: list[tuple[str, Any]]) -> None:
        self.events, self.seen = events, _Observed()
        self._harness, self._schedule = harness, schedule
        self._crashes = list(schedule.crashes)
        self._runner: RunnerProcess | None = None
        self._known: list[Any] = []
        self._answered: set[tuple[str, str, int, str, datetime | None]] = set()

    def run(self) -> None:
        """Deliver messages, let time pass and send events, until nothing is left to do."""
        for _ in range(_MOST_TURNS):
            if self._harness.messages:
                self._deliver()
            elif not (self._send() or self._harness.tasks.answer()):
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
        """Record where a runner has died."""
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
