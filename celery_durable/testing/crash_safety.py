"""assert_crash_safe: a test that a workflow has the same result wherever its workers die.

It runs the workflow once undisturbed, then once for each schedule of faults. A runner dies before or after a commit, a
publishing or a step's function, or freezes there until another runner has taken over. Messages arrive twice and in
another order, at two runners at once, or not at all. The result must be the same each time.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable.model import OUTCOME_UNKNOWN, Status
from celery_durable.store.migrations import migrate
from celery_durable.testing.code import Code, definition_of
from celery_durable.testing.crash_runs import (
    CrashSchedule,
    EndResult,
    FaultyRun,
    Observed,
    choose_schedules,
    generate_schedules,
    simplify,
)
from celery_durable.testing.databases import MakeStore
from celery_durable.testing.errors import HarnessMisuse, NotCrashSafe, SampledSchedules, UncheckedTables
from celery_durable.testing.harness import DurableHarness

Deed = Callable[[Session], Any]

_ID = "crash-safe"
_MOST_SCHEDULES = 200
_MOST_SHOWN = 500


@dataclass(frozen=True, slots=True)
class ComparedTables:
    """Tables of a web framework: their names, and a function that returns their rows."""

    names: frozenset[str]
    read: Deed


SideEffects = sa.MetaData | Deed | ComparedTables | Literal["all"]


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
    cancel_at: str | None = None,
    side_effects: SideEffects | None = None,
    compare: Callable[[Any], Any] | None = None,
    may_lose: Iterable[str] = (),
    setup: Callable[[DurableHarness], object] | None = None,
    workflows: Iterable[Code] = (),
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    schedules: int | None = None,
    replay: CrashSchedule | None = None,
    expect_error: str | None = None,
    make_store: MakeStore | None = None,
) -> CrashReport:
    """Fail with NotCrashSafe unless the workflow has the same result wherever its runners die.

    Output or error, stored steps and side effects must be the same, and no step's function may run more often than the
    crashes explain. Time moves by itself, to the end of each sleep, retry and timeout.

    Args:
        workflow: The workflow to test.
        params: Its parameters.
        events: Pairs of type and payload. Each is sent when the workflow waits for its type.
        cancel_at: The name of a step. The run is cancelled when it waits there, and must end as terminated.
        side_effects: What steps write with ``tx.session`` or ``tx.mutate``. The MetaData of your tables: they are
            created before each run, and their rows are compared without automatic keys. "all": all tables that
            ``setup`` creates. Or a function of a session whose results are compared. Unless it is a function,
            UncheckedTables warns about other tables that the workflow writes to.
        compare: Returns the part of the output that must be the same, if it contains times or the like.
        may_lose: The names of steps that a crash may fail with StepLost, because the workflow handles that. It may then
            end in another way, which you test with ``faults.crash_in_step``: only the calls are counted.
        setup: Gets each harness before the run, to create tables or mocks, for example
            ``harness.mocks.mock_step_result("charge", "ch_1")``.
        workflows: Other workflows that this one creates or sends events to.
        settings: As for `DurableHarness`.
        seed: Decides all random values.
        schedules: The largest number of schedules. If there are more, the seed chooses. None: 200, and
            SampledSchedules warns if there are more.
        replay: Run only this schedule, as a failure shows it.
        expect_error: The name of the error with which the workflow should end.
        make_store: As for `DurableHarness`. All instances in that database are deleted before each run.

    Returns:
        What was run.

    Raises:
        NotCrashSafe: A run has another result, or runs a step's function too often.
        HarnessMisuse: The undisturbed run does not end as expected, or ``setup`` mocks steps that it does not reach.
    """
    trial = _Trial(
        workflow,
        params,
        tuple(events),
        cancel_at,
        side_effects,
        compare,
        frozenset(may_lose),
        setup,
        tuple(workflows),
        settings or {},
        make_store,
    )
    calm = trial.run(CrashSchedule(seed=seed), finds_unchecked=True)
    trial.check_calm(calm, expect_error)
    if calm.unchecked:
        written = ", ".join(calm.unchecked)
        text = f"Workflow {definition_of(workflow).name!r} also writes to {written}, which side_effects= does not name."
        remedy = 'A doubled row there is not found. Name these tables too, or pass side_effects="all".'
        warnings.warn(UncheckedTables(f"{text} {remedy}"), stacklevel=2)
    possible = [replay] if replay is not None else list(generate_schedules(calm.passed, seed))
    chosen = choose_schedules(possible, _MOST_SCHEDULES if schedules is None else schedules, seed)
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


@dataclass(slots=True)
class _Trial:
    workflow: Code
    params: Any
    events: tuple[tuple[str, Any], ...]
    cancel_at: str | None
    side_effects: SideEffects | None
    compare: Callable[[Any], Any] | None
    may_lose: frozenset[str]
    setup: Callable[[DurableHarness], object] | None
    others: tuple[Code, ...]
    settings: Mapping[str, Any]
    make_store: MakeStore | None

    def run(self, schedule: CrashSchedule, *, finds_unchecked: bool = False) -> Observed:
        """Run the workflow to its end under a schedule, in a new harness."""
        codes, seed = [self.workflow, *self.others], schedule.seed
        options: dict[str, Any] = {"make_store": self.make_store, "wipe": self.make_store is not None}
        with DurableHarness(codes, seed=seed, settings=self.settings, unused_mocks=True, **options) as harness:
            if isinstance(self.side_effects, sa.MetaData):
                harness.create_tables(self.side_effects)
            if self.setup is not None:
                self.setup(harness)
            course = FaultyRun(harness, schedule, list(self.events), self.cancel_at)
            before = self._read_unchecked(harness) if finds_unchecked else {}
            course.run(harness.create(definition_of(self.workflow).name, self.params, id=_ID))
            if finds_unchecked:
                after = self._read_unchecked(harness)
                course.seen.unchecked = sorted(name for name, rows in after.items() if rows != before.get(name))
            return self._observe(harness, course)

    def _read_unchecked(self, harness: DurableHarness) -> dict[str, list[str]]:
        match self.side_effects:
            case sa.MetaData():
                checked = {table.name for table in self.side_effects.tables.values()}
            case ComparedTables():
                checked = set(self.side_effects.names)
            case None:
                checked = set()
            case _:
                return {}
        ours = _own_tables(harness)
        with harness.session() as session:
            present = sa.inspect(session.connection()).get_table_names()
            names = [name for name in present if name not in ours | checked]
            rows = {name: session.execute(sa.select(sa.text("*")).select_from(sa.table(name))) for name in names}
            return {name: sorted(repr(tuple(row)) for row in found) for name, found in rows.items()}

    def _observe(self, harness: DurableHarness, course: FaultyRun) -> Observed:
        seen = course.seen
        seen.misnamed = harness.mocks.describe_unused()
        seen.unsent = [type_ for type_, _ in course.events]
        seen.uncancelled = course.cancel_at
        seen.bodies = Counter((f"{each.workflow}/{each.instance_id}", each.step) for each in harness.attempts)
        for summary in harness.durable.internals.operations.queries.list(limit=1000).items:
            handle = harness.instance(summary.workflow, summary.id)
            status, history = handle.status(), handle.history()
            error = None if status.error is None else f"{status.error.name}: {status.error.message}"
            is_ours = summary.id == _ID and self.compare is not None and status.status is Status.COMPLETE
            output = self.compare(status.output) if is_ours and self.compare is not None else status.output
            steps = {step.step_key: str(step.status) for step in history.steps}
            seen.lost |= {step.name for step in history.steps if step.error and step.error.name == OUTCOME_UNKNOWN}
            seen.instances[f"{summary.workflow}/{summary.id}"] = EndResult(str(status.status), output, error, steps)
        if self.side_effects is not None:
            with harness.session() as session:
                seen.effects = _effects(self.side_effects, session, harness)
        return seen

    def check_calm(self, calm: Observed, expected: str | None) -> None:
        """Check that the undisturbed run ends; otherwise there is nothing to compare with."""
        name = definition_of(self.workflow).name
        if calm.is_endless:
            raise HarnessMisuse(f"Workflow {name!r} comes to no end, also undisturbed: assert_crash_safe() needs one.")
        ended = calm.instances[f"{name}/{_ID}"]
        error = None if ended.error is None else ended.error.partition(":")[0]
        if error == expected:  # an unexpected error says more: it may be why a wait was not reached
            if calm.unsent:
                raise HarnessMisuse(f"Workflow {name!r} never waited for {calm.unsent}: leave these out of events=.")
            if calm.uncancelled is not None:
                raise HarnessMisuse(
                    f"Workflow {name!r} never waited at step {calm.uncancelled!r}, so it was not cancelled. Name a "
                    "step that sleeps, or that waits for an event, a task or a child, in cancel_at=."
                )
        success = Status.COMPLETE if self.cancel_at is None else Status.TERMINATED
        if (error, ended.status) != (expected, str(success if expected is None else Status.ERRORED)):
            how = ended.status if ended.error is None else f"{ended.status} with {ended.error}"
            meant = str(success) if expected is None else f"errored with {expected}"
            remedy = ""
            if error is not None:
                remedy = f" If it is meant to fail, pass expect_error={error!r}."
                if self.side_effects is not None:
                    needs = "Each run begins with empty tables: create the rows that the workflow needs in setup=."
                    remedy = f" {needs}{remedy}"
            raise HarnessMisuse(f"Workflow {name!r} ends {how}, also undisturbed, and not {meant}.{remedy}")
        if calm.misnamed is not None:
            raise HarnessMisuse(f"{calm.misnamed} Correct the names in setup=.")

    def differences(self, calm: Observed, seen: Observed) -> list[str]:
        """Return the differences from the undisturbed run, the most informative first."""
        found = ["It comes to no end."] if seen.is_endless else []
        may_differ = bool(seen.lost) and seen.lost <= self.may_lose
        for name in calm.instances.keys() | seen.instances.keys() if not may_differ else ():
            found += _unlike(name, calm.instances.get(name), seen.instances.get(name), seen.lost)
        if seen.effects != calm.effects and not may_differ:
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
        self, calm: Observed, schedule: CrashSchedule, problems: list[str]
    ) -> tuple[CrashSchedule, list[str], list[str]]:
        """Return the shortest schedule with this failure, its problems and where its runners died."""
        for simpler in simplify(schedule):
            seen = self.run(simpler)
            if found := self.differences(calm, seen):
                return simpler, found, seen.faults
        again = self.run(schedule)
        found = self.differences(calm, again) or [*problems, "Run again it passed: something is left to chance."]
        return schedule, found, again.faults


def _unlike(name: str, calm: EndResult | None, seen: EndResult | None, lost: set[str]) -> list[str]:
    if calm is None or seen is None:
        return [f"Instance {name} {'is there only undisturbed' if seen is None else 'is there only then'}."]
    found = []
    if (seen.status, seen.error) != (calm.status, calm.error):
        error = "" if seen.error is None else f" with {seen.error}"
        found.append(f"{name} is {seen.status}{error}, and undisturbed {calm.status}.")
    elif seen.output != calm.output:
        found.append(f"{name} returns {_short(seen.output)}, and undisturbed {_short(calm.output)}.")
    if seen.steps != calm.steps:
        advice = (
            "A workflow must make the same calls every time it is run: take time and chance from step.now(), "
            "step.random() and step.uuid(), and everything else from params and from the results of steps."
        )
        if lost:
            advice = (
                "The crash failed a step with StepLost. If the workflow handles that, pass "
                f"may_lose={sorted(lost)}, and test it with faults.crash_in_step()."
            )
        found.append(f"{name} records {_short(seen.steps)}, and undisturbed {_short(calm.steps)}. {advice}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _effects(wanted: SideEffects, session: Session, harness: DurableHarness) -> Any:
    if isinstance(wanted, ComparedTables):
        return wanted.read(session)
    if wanted == "all":
        wanted = sa.MetaData()
        wanted.reflect(session.connection(), only=lambda name, _: name not in _own_tables(harness))
    if not isinstance(wanted, sa.MetaData):
        return wanted(session)
    rows: dict[str, list[Any]] = {}
    for table in wanted.sorted_tables:
        columns = [column for column in table.c if column is not table.autoincrement_column]
        rows[table.name] = sorted((tuple(row) for row in session.execute(sa.select(*columns))), key=repr)
    return rows


def _own_tables(harness: DurableHarness) -> set[str]:
    tables = harness.durable.internals.store.tables.metadata.tables.values()
    return {table.name for table in tables} | {migrate.version_table(harness.settings.table_prefix)}
