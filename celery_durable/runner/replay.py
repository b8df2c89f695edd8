"""The step calls of one pass: each call of the workflow function replays, runs or waits for a step.

Once `Suspend` or an error interrupts the pass, every further step call raises it again. So ``finally: step.do(...)``
does no harm.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from celery_durable import values
from celery_durable.definitions import WorkflowDefinition
from celery_durable.errors import (
    BranchNeverGathered,
    Cancelled,
    DefinitionInvalid,
    NonRetryableError,
    StepCancelled,
    StepFailed,
    StepNameReused,
    Suspend,
)
from celery_durable.model import (
    EPOCH,
    LIMITS_KEY,
    LogLevel,
    OpenWait,
    StepStatus,
    StepType,
)
from celery_durable.replay_state import StepEntry
from celery_durable.runner.environment import encode_log_data
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.lease import EngineCode
from celery_durable.runner.limits import take_workflow_limits
from celery_durable.runner.step_commit import StepCommit
from celery_durable.runner.step_execution import OtherSteps, Race, RaceWon, StepExecution, build_failure
from celery_durable.runner.step_kinds import StepKinds
from celery_durable.step import StepCall, StepFuture
from celery_durable.values import Codec, Limit

_ERRORED = StepStatus.ERRORED


class ReplayContext:
    """Executes the step calls of one pass: each is replayed, run, or suspends the pass."""

    def __init__(self, definition: WorkflowDefinition, context: ExecutionContext, kinds: StepKinds) -> None:
        self._definition, self._context, self._kinds = definition, context, kinds
        self._max_name_length = context.env.settings.max_step_name
        self._policy = context.env.settings.step_policy.override_with(definition.step_defaults)
        self._last_finished_at = EPOCH
        self._random_calls = 0
        self._submitted: dict[str, StepExecution] = {}
        self.waits: list[OpenWait] = []
        self._engine_code = EngineCode(context.lease, definition)

    def call(self, call: StepCall) -> Any:
        with self._engine_code:
            self._context.check_running()
            execution = self._start_step(call)
            if execution.finished_row is None:
                self._advance([execution])
                if execution.finished_row is None:
                    self._suspend([execution])
            return self._decode_result(execution)

    def submit(self, call: StepCall) -> StepFuture[Any]:
        self._context.check_running()
        branch = self._start_step(call)
        self._context.replay_state.reserve_name(branch.key)
        self._submitted[branch.key] = branch
        return StepFuture(self, branch.name, branch.key, branch)

    def gather(self, futures: tuple[StepFuture[Any], ...], *, return_exceptions: bool) -> list[Any]:
        with self._engine_code:
            return self._gather(futures, return_exceptions=return_exceptions)

    def _gather(self, futures: tuple[StepFuture[Any], ...], *, return_exceptions: bool) -> list[Any]:
        self._context.check_running()
        branches = self._take_branches(futures)
        if any(branch.finished_row is None for branch in branches):
            self._advance(branches)
        self._check_cancelled(branches)
        open_ = [branch for branch in branches if branch.finished_row is None]
        if open_:
            self._suspend(open_)
        results: list[Any] = []
        failed = [
            branch.key
            for branch in branches
            if branch.finished_row is not None and branch.finished_row.status is _ERRORED
        ]
        for branch in branches:  # advance the clock for all branches, before the first failure is raised
            self._advance_clock(branch)
        for branch in branches:
            try:
                results.append(self._decode_result(branch, failed))
            except (StepFailed, NonRetryableError) as exc:
                if not return_exceptions:
                    raise
                results.append(exc)
        return results

    def first(self, name: str, futures: tuple[StepFuture[Any], ...]) -> Any:
        with self._engine_code:
            return self._first(name, futures)

    def _first(self, name: str, futures: tuple[StepFuture[Any], ...]) -> Any:
        self._context.check_running()
        if not futures:
            raise DefinitionInvalid(f"step.first({name!r}) needs at least one branch.")
        branches = self._take_branches(futures)
        name = values.check_text_name("Step name", name, self._max_name_length)
        entry = self._context.replay_state.call(name, StepType.DO, ("first", [branch.key for branch in branches]))
        by_key = {branch.key: branch for branch in branches}
        if entry.row is None:
            self._context.race = Race(entry, branches)
            try:
                self._decide_race(self._context.race)
            finally:
                self._context.race = None
        row = self._context.replay_state.rows.get(entry.key)
        if row is None:
            self._suspend(branches)
        key = Codec().decode(row.result or "null")
        if key not in by_key:
            raise DefinitionInvalid(
                f"step.first({name!r}) was won by branch {key!r}, which the code does not pass to it any more. "
                "Pass it again, or give the new race another name."
            )
        winner = by_key[key]
        winner.finished_row = self._context.replay_state.rows.get(winner.key)
        return self._decode_result(winner, [winner.key, entry.key])

    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None:
        self._context.add_log(
            level, message, category, encode_log_data(self._context.env.settings, message, category, data)
        )

    def publish(self, key: str, value: Any) -> None:
        self._context.publish(key, value)

    def now(self) -> datetime:
        self._context.check_running()
        return self._now()

    def _now(self) -> datetime:
        """Return when the last step ended whose result the code received, or the creation: the same in every pass."""
        return max(self._last_finished_at, self._context.current_ancestor.created_at)

    def random_source(self) -> random.Random:
        """Return a random generator for one number, seeded with the run and with how many were returned before it."""
        self._context.check_running()
        self._random_calls += 1
        return random.Random(f"{self._context.current_ancestor.run}/{self._random_calls}")  # noqa: S311  # reproducible on purpose

    # --- called by the runner --------------------------------------------------------------------

    def take_limits(self, given: Sequence[Limit]) -> None:
        """Take the limits of the workflow, unless this run has them. Raises Suspend if it has to wait for them.

        A run that was cancelled before it did anything ends without them.
        """
        context, rows = self._context, self._context.replay_state.rows
        row, claim = rows.get(LIMITS_KEY), context.claim
        holder = f'"{claim.pk}/{claim.ref.run_number}"'  # a rewind or a fork has copied the row of another run
        if row is not None and row.is_finished and row.result == holder:
            return
        if context.cancellation is not None and not rows.keys() - {LIMITS_KEY}:
            context.is_cancelled = True
            raise context.cancellation
        with self._engine_code:
            wait = take_workflow_limits(context, given, holder)
            if wait is not None:
                self.waits = [wait]
                raise context.interrupt(Suspend())

    def check_end(self) -> None:
        """Check that the function gathered every branch before it returned; raises BranchNeverGathered."""
        if self._submitted:
            raise BranchNeverGathered([branch.name for branch in self._submitted.values()])

    def _suspend(self, executions: list[StepExecution]) -> NoReturn:
        """Keep what the open steps wait for, and interrupt the pass with Suspend."""
        self.waits = [
            execution.wait for execution in executions if execution.finished_row is None and execution.wait is not None
        ]
        raise self._context.interrupt(Suspend())

    def _start_step(self, call: StepCall) -> StepExecution:
        """Check a call's arguments, find its step, and log a warning if its name is used again in this pass."""
        context, settings = self._context, self._context.env.settings
        kind = self._kinds.of_call(call)
        identity = kind.identify(call, settings, self._policy)
        name, policy = values.check_text_name("Step name", identity.name, self._max_name_length), identity.policy
        repeat = kind.has_bodies and policy.repeat
        entry = context.replay_state.call(name, kind.type, identity.work, repeat=repeat)
        if entry.row is None:
            kind.check_new(identity, settings, self._now)
            if policy.limits:
                self._check_limits(name, policy.limits)
        if entry.is_repeated:
            context.add_log(
                LogLevel.WARNING,
                f"Step name {name!r} is used again in one pass: the recorded result is returned.",
                "system",
            )
            row = context.replay_state.rows.get(entry.key)
            entry = StepEntry(entry.key, entry.name, entry.seq, row, is_repeated=True)
        return StepExecution(kind, call, entry, policy, identity.fn)

    def _check_limits(self, step: str, limits: Sequence[Limit]) -> None:
        """Check that a step asks for no limit that its run holds: it would wait for its own run."""
        held = {limit.name for limit in self._definition.limits}
        if taken := sorted(held.intersection(limit.name for limit in limits)):
            raise DefinitionInvalid(
                f"Step {step!r} asks for the limit {taken[0]!r}, which its run holds from its beginning to its end: "
                "leave it out of the step."
            )

    def _take_branches(self, futures: tuple[StepFuture[Any], ...]) -> list[StepExecution]:
        """Return the branches of these futures, and release their names: the code may use them again."""
        branches = []
        for future in futures:
            branch = getattr(future, "branch", None)
            if not isinstance(branch, StepExecution):
                raise DefinitionInvalid(
                    f"{future!r} is no branch of this workflow run: pass what step.submit() returned, and a list "
                    "of branches with a star: step.gather(*branches)."
                )
            if branch in branches:
                raise StepNameReused(branch.name, concurrently=True)
            self._submitted.pop(branch.key, None)
            self._context.replay_state.release_name(branch.key)
            branch.finished_row = self._context.find_finished_row(branch)
            branches.append(branch)
        return branches

    def _advance_clock(self, execution: StepExecution) -> None:
        if execution.finished_row is not None and execution.finished_row.finished_at is not None:
            self._last_finished_at = max(self._last_finished_at, execution.finished_row.finished_at)

    def _decode_result(self, execution: StepExecution, failed: Sequence[str] = ()) -> Any:
        """Return or raise the recorded result of a finished step. The first pass and every later one get the same.

        ``failed``: the keys of the rows to drop if a person retries the failed run, by default the key of this step.
        """
        self._advance_clock(execution)
        row = execution.finished_row
        assert row is not None
        if row.is_cancelled:
            self._context.raise_cancelled(row)
        if row.status is StepStatus.CANCELLED:
            raise StepCancelled(execution.name)
        if row.status is StepStatus.ERRORED:
            failure = build_failure(execution.name, row.error_name, row.error_message, row.attempts)
            failed_keys = tuple(failed) or (execution.key,)
            failure.failed_keys, failure.failed_at_seq = failed_keys, self._context.replay_state.last_seq
            raise failure from execution.cause
        return execution.kind.decode(self._context, execution, row)

    def _check_cancelled(self, branches: list[StepExecution]) -> None:
        """Raise Cancelled if a cancel has ended one of these branches, and end the others that are open."""
        for branch in branches:
            row = branch.finished_row
            if row is not None and row.is_cancelled:
                if open_ := [other for other in branches if other.finished_row is None]:
                    self._context.cancel(open_, Cancelled(row.error_message or None))
                self._context.raise_cancelled(row)

    def _advance(self, executions: list[StepExecution]) -> None:
        """Advance each step until it has finished or waits. If the run was cancelled, end them instead."""
        if self._context.cancellation is not None:
            open_ = [execution for execution in executions if execution.finished_row is None]
            self._context.cancel(open_, self._context.cancellation)
            return
        if len(executions) == 1:
            executions[0].kind.advance(self._context, executions, OtherSteps.NONE)
            return
        open_steps = [execution for execution in executions if execution.finished_row is None]
        # Steps that only wait count as open, too. A commit that checks one of them resets the crash count, so the
        # count no longer says how often the body's worker died.
        other_steps = OtherSteps.FINISHED if len(open_steps) == 1 else OtherSteps.OPEN
        waits_first = sorted(open_steps, key=lambda each: each.kind.has_bodies)
        for kind, steps in itertools.groupby(waits_first, key=lambda each: each.kind):
            kind.advance(self._context, list(steps), other_steps)

    def _decide_race(self, race: Race) -> None:
        self._check_cancelled(race.branches)
        finished = [branch for branch in race.branches if branch.finished_row is not None]
        # A branch that lost an earlier race can win this one only if every branch lost an earlier race.
        candidates = [
            branch
            for branch in finished
            if branch.finished_row is not None and branch.finished_row.status is not StepStatus.CANCELLED
        ]
        if candidates or len(finished) == len(race.branches):  # the winner finished before the race started
            winner, commit_id = (candidates or finished)[0], next(self._context.lease.commit_ids)
            self._context.commit(StepCommit(commit_id, self._context.build_race_end(race, winner, commit_id)))
            return
        with suppress(RaceWon):
            self._advance(race.branches)
            self._check_cancelled(race.branches)
