"""The replay check: it replays a recorded run with the current code, and stops before it would do anything new.

Step calls follow the same rules as in every pass. The check runs no body and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

from celery_durable.definitions import WorkflowDefinition
from celery_durable.errors import StepNameReused, StepResultInvalid, StepTypeMismatch, Suspend, ValueRefused
from celery_durable.insight.recorded_run import RecordedRun
from celery_durable.model import RunOutcome, RunRef, Status, StepRow
from celery_durable.replay_state import ReplayState
from celery_durable.runner import Runner
from celery_durable.runner.environment import ClaimedRun
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.function_pass import FunctionPass, open_context
from celery_durable.runner.lease import Lease
from celery_durable.runner.replay import ReplayContext
from celery_durable.runner.run_limits import RunLimits
from celery_durable.runner.step_attempt import StepAttempt, current_attempt
from celery_durable.runner.step_commit import Committed, StepCommit
from celery_durable.runner.step_execution import Race, StepExecution
from celery_durable.runner.step_kinds import Difference, StepKinds
from celery_durable.step import StepCall
from celery_durable.values import Limit

_KEEP_STEPS = (
    "Keep the recorded steps and their names until no run with them is left, or give the changed workflow a new name."
)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay check, in call order. ``replayed`` steps returned their recorded result.

    ``next_steps``: the names of those that the code would run or wait for. ``uncalled``: those that the code did not
    call, without those in ``differences``. ``end``: a sentence about where the replay ended. The run can continue with
    ``open_step_changes``.
    """

    ref: RunRef
    replayed: tuple[StepRow, ...]
    next_steps: tuple[str, ...]
    uncalled: tuple[StepRow, ...]
    end: str
    differences: tuple[Difference, ...]
    open_step_changes: tuple[Difference, ...] = ()

    @property
    def matches(self) -> bool:
        return not self.differences


class DryRunCommitter:
    """A `Committer` that writes nothing. It keeps the outcome with which the run would end."""

    def __init__(self) -> None:
        self.run_outcome: RunOutcome | None = None

    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:  # noqa: ARG002
        if isinstance(step_commit.ending, RunOutcome):
            self.run_outcome = step_commit.ending
        return Committed(run_outcome=self.run_outcome)

    def announce(self, committed: Committed) -> None: ...

    def publish(self, key: str, text: str) -> None: ...


OnStep = Callable[[StepExecution, Callable[[], NoReturn]], None]
"""Called at each step call, before the code gets the result. The second argument is a function to leave the replay."""


def check_replay(runner: Runner, recorded: RecordedRun, on_step: OnStep | None = None) -> ReplayResult:
    """Replay a recorded run with the current code, up to its first unfinished step, without bodies and writes.

    ``runner`` has the code. ``on_step`` is called at each step call. Raises WorkflowNotFound, and ValueRefused for a
    linear workflow.
    """
    definition = runner.registry.get(recorded.ref.workflow)
    if not isinstance(definition, WorkflowDefinition):
        raise ValueRefused(
            f"Workflow {definition.name!r} is linear and has no code to replay: a run follows the rows that it "
            "began with."
        )
    env, claim, state, committer = runner.env, recorded.claim, recorded.run_state, DryRunCommitter()
    lease = Lease(claim, env.settings.lease, env.runtime, requested_at=env.runtime.monotonic())
    limits = RunLimits(definition, claim, state, runner.kinds.is_satisfied)
    run = ClaimedRun(definition, lease, state, limits)
    context = open_context(definition, replace(env, should_stop=lambda: False), run, committer)
    replay_check = ReplayCheck(definition, context, runner.kinds, on_step)
    pass_ = FunctionPass(definition, context, replay_check)
    outer_attempt = current_attempt.set(None)
    try:
        pass_.conclude(pass_.execute())
    finally:
        current_attempt.reset(outer_attempt)
    return compare(recorded, context.replay_state, replay_check, committer.run_outcome)


class ReplayCheck(ReplayContext):
    """A `ReplayContext` that only reads the record, and collects the differences."""

    def __init__(
        self,
        definition: WorkflowDefinition,
        context: ExecutionContext,
        kinds: StepKinds,
        on_step: OnStep | None = None,
    ) -> None:
        super().__init__(definition, context, kinds)
        self._on_step = on_step
        self.next_steps: tuple[StepExecution, ...] = ()
        self.differences: dict[str, Difference] = {}
        self.open_step_changes: list[Difference] = []
        self._last_called: StepRow | None = None
        """Of the finished rows that the code has called, the one that was called last in the record."""
        self._last_before_clock: StepRow | None = None
        """As `_last_called`, when the code last asked for the time."""

    def take_limits(self, given: Sequence[Limit]) -> None:
        """Go on without the limits of the workflow."""

    def _start_step(self, call: StepCall) -> StepExecution:
        try:
            execution = super()._start_step(call)
        except (StepTypeMismatch, StepNameReused) as exc:
            self._add_difference(exc.step, exc)
            raise
        row = execution.entry.row
        if row is not None and not execution.entry.is_repeated:
            self._compare_order(row)
        if self._on_step is not None:
            self._on_step(execution, self._leave)
        return execution

    def _leave(self) -> NoReturn:
        raise self._context.interrupt(Suspend())

    def now(self) -> datetime:
        self._last_before_clock = self._last_called
        return super().now()

    def _compare_order(self, row: StepRow) -> None:
        """Report a step called after a later one of the record, if step.now() in between makes the order matter."""
        earlier = self._last_before_clock
        if earlier is not None and earlier.seq > row.seq:
            sentence = (
                f"The code calls step {earlier.name!r} and step.now() before step {row.name!r}; the record, after."
            )
            advice = "step.now() returns another time there than in earlier passes. Recorded results are kept."
            self.open_step_changes.append(Difference(sentence, advice))
        if row.is_finished and (self._last_called is None or self._last_called.seq < row.seq):
            self._last_called = row

    def _decode_result(self, execution: StepExecution, failed: Sequence[str] = ()) -> Any:
        try:
            return super()._decode_result(execution, failed)
        except StepResultInvalid as exc:
            advice = "Keep an annotation that accepts the recorded value until no run with such a value is left."
            self.differences.setdefault(execution.name, Difference(str(exc), advice))
            raise

    def _add_difference(self, step: str, error: Exception) -> None:
        sentence, _, advice = str(error).partition(". ")
        self.differences.setdefault(step, Difference(f"{sentence}.", advice))

    def _advance(self, executions: list[StepExecution]) -> None:
        """Stop before the steps that have not finished in the record, instead of running them."""
        for execution in executions:
            execution.finished_row = execution.finished_row or self._context.find_finished_row(execution)
        next_steps = [execution for execution in executions if execution.finished_row is None]
        if next_steps:
            self._stop_before(next_steps)

    def _decide_race(self, race: Race) -> None:
        self._stop_before(race.branches)

    def _stop_before(self, executions: list[StepExecution]) -> NoReturn:
        self.next_steps = tuple(executions)
        for execution in executions:
            row = self._context.replay_state.rows.get(execution.key)
            if row is not None and not row.is_finished:
                self.open_step_changes += self._find_changes(execution, row)
        raise self._context.interrupt(Suspend())

    def _find_changes(self, execution: StepExecution, row: StepRow) -> Iterator[Difference]:
        """Yield the differences between an open step's call in the code and its row."""
        for was, now, advice in execution.kind.find_changes(execution, row, self._context.env.settings):
            sentence = f"Open step {row.name!r} ({row.type}) was recorded with {was}, and the code has {now}."
            yield Difference(sentence, advice)


def compare(
    recorded: RecordedRun, replay_state: ReplayState, replay: ReplayCheck, run_outcome: RunOutcome | None
) -> ReplayResult:
    """Compare the recorded run with its replay, which has ended."""
    all_uncalled = replay_state.uncalled
    unexplained = [row for row in all_uncalled if row.name not in replay.differences]
    replayed = [row for row in recorded.run_state.steps if row.is_finished and row not in all_uncalled]
    differences = list(replay.differences.values())
    if not differences:
        difference = _find_difference(recorded, replay_state, replay, run_outcome, unexplained)
        differences += [] if difference is None else [difference]
    return ReplayResult(
        ref=recorded.ref,
        replayed=tuple(replayed),
        next_steps=tuple(execution.name for execution in replay.next_steps),
        uncalled=tuple(unexplained),
        end=_describe_end(replay_state, replay, run_outcome),
        differences=tuple(differences),
        open_step_changes=tuple(replay.open_step_changes),
    )


def _find_difference(
    recorded: RecordedRun,
    replay_state: ReplayState,
    replay: ReplayCheck,
    run_outcome: RunOutcome | None,
    unexplained: Sequence[StepRow],
) -> Difference | None:
    does = _describe_behavior(replay_state, replay, run_outcome)
    if unexplained:
        others = f", and {len(unexplained) - 1} more" if len(unexplained) > 1 else ""
        return Difference(f"The code {does}, where the record has {_format_step(unexplained[0])}{others}.", _KEEP_STEPS)
    fails = run_outcome is not None and run_outcome.status is Status.ERRORED
    match recorded.status:
        case Status.COMPLETE if run_outcome is None or fails:
            return Difference(f"The code {does}, where the record is complete.", _KEEP_STEPS)
        case Status.ERRORED if fails and run_outcome is not None and run_outcome.error_name != recorded.error_name:
            sentence = f"The code {does}, where the record ends errored with {recorded.error_name}."
        case Status.ACTIVE | Status.WAITING | Status.PAUSED | Status.TERMINATED if fails:
            sentence = f"The code {does}, where the record does not end."
        case Status.ACTIVE | Status.WAITING | Status.PAUSED if replay.next_steps and run_outcome is not None:
            sentence = f"The code {does}, where the record waits at {_format_names(replay.next_steps)}."
        case _:
            return None
    return Difference(sentence, "Fix the code before it is deployed: running instances would do the same.")


def _describe_behavior(replay_state: ReplayState, replay: ReplayCheck, run_outcome: RunOutcome | None) -> str:
    if run_outcome is None:
        kind = "open" if _is_open(replay_state, replay) else "not recorded"
        verb = "is" if len(replay.next_steps) == 1 else "are"
        return f"calls {_format_names(replay.next_steps)}, which {verb} {kind}"
    if run_outcome.status is Status.ERRORED:
        return f"ends errored with {run_outcome.error_name}: {run_outcome.error_message}".rstrip(": .")
    return "ends as cancelled" if run_outcome.status is Status.TERMINATED else "returns"


def _describe_end(replay_state: ReplayState, replay: ReplayCheck, run_outcome: RunOutcome | None) -> str:
    if run_outcome is not None:
        return f"The code {_describe_behavior(replay_state, replay, run_outcome)}."
    if _is_open(replay_state, replay):
        return f"The record is open at {_format_names(replay.next_steps)}."
    return f"The record ends before {_format_names(replay.next_steps)}."


def _is_open(replay_state: ReplayState, replay: ReplayCheck) -> bool:
    return all(replay_state.rows.get(execution.key) for execution in replay.next_steps)


def _format_names(executions: Sequence[StepExecution]) -> str:
    names = ", ".join(repr(execution.name) for execution in executions)
    return f"step {names}" if len(executions) == 1 else f"steps {names}"


def _format_step(row: StepRow) -> str:
    return f"step {row.name!r} ({row.type})"
