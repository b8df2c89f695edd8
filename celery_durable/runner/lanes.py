"""Lanes: what a database writes in less than the transaction of `DatabaseCommitter.transact`, which writes everything.

Each lane writes the commits that fit it, and hands the others to the next. Without any lane the same is committed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from celery_durable.model import ReleaseOutcome, RunOutcome, Status, StepType
from celery_durable.runner.commit_parts import RowKinds
from celery_durable.runner.committer import DatabaseCommitter
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.step_commit import Committed, StepCommit, build_suspension
from celery_durable.store.engine import Tx
from celery_durable.store.engine.time_limits import PASS
from celery_durable.store.lanes import steps
from celery_durable.store.lanes.groups import GroupedStep
from celery_durable.store.runs import outputs, releases
from celery_durable.store.schema.dialects import MARIADB

T = TypeVar("T")
WriteCommit = Callable[[StepCommit], Committed]


def build_committer(env: Environment, run: ClaimedRun, kinds: RowKinds) -> DatabaseCommitter:
    """Build what commits the steps of a run, with the lanes for its database."""
    committer = DatabaseCommitter(env, run, kinds)
    write = EndLane(committer, committer.transact).commit
    if env.store.combines_writes:
        write = SleepLane(committer, write).commit
        write = RowLane(committer, write).commit
    elif env.store.database is MARIADB:
        write = UnpausedRowLane(committer, write).commit
    committer.write_commit = write if env.group_commit is None else GroupLane(committer, write).commit
    return committer


class _Lane:
    """``otherwise``: the next lane."""

    def __init__(self, committer: DatabaseCommitter, otherwise: WriteCommit) -> None:
        self._committer, self._otherwise = committer, otherwise
        self._env, self._run, self._limits = committer.env, committer.run, committer.run.limits
        self._claim = committer.run.lease.claim

    def _run_statement(self, write: Callable[[Tx], T], step_commit: StepCommit) -> T | Committed:
        find_committed = functools.partial(self._committer.find_committed, step_commit=step_commit)
        run: Callable[..., T | Committed] = self._env.store.run_statement
        return run(write, find_committed=find_committed, timeouts=PASS)


class RowLane(_Lane):
    """One row, and perhaps log lines: the statement that writes them checks the claim (PostgreSQL)."""

    def commit(self, step_commit: StepCommit) -> Committed:
        if step_commit.ending is not None or not self._committer.is_row_alone(step_commit):
            return self._otherwise(step_commit)
        if len(step_commit.logs) > min(outputs.MAX_WITH_STEP, self._committer.remaining_logs):
            return self._otherwise(step_commit)
        self._limits.reset_suspension()
        return self._run_statement(functools.partial(self._write, step_commit=step_commit), step_commit)

    def _write(self, tx: Tx, step_commit: StepCommit) -> Committed:
        [write], logs = step_commit.writes, step_commit.logs
        changes_instance = bool(logs) or self._committer.row_changes_instance(write)
        written = steps.guard_and_write_step(
            tx, self._claim, write, lease=self._run.lease.length, log_lines=logs, changes_instance=changes_instance
        )
        return Committed([written.row], written.pause_requested, writes=[write], renews_lease=changes_instance)


class UnpausedRowLane(_Lane):
    """The row of a finished step, if no pause is requested: two statements in one (MariaDB)."""

    def commit(self, step_commit: StepCommit) -> Committed:
        if self._committer.changes_instance(step_commit):
            return self._otherwise(step_commit)
        written = self._run_statement(functools.partial(self._write, step_commit=step_commit), step_commit)
        return self._otherwise(step_commit) if written is None else written

    def _write(self, tx: Tx, step_commit: StepCommit) -> Committed | None:
        [write] = step_commit.writes
        with tx.store.conflict_as_superseded():
            row = steps.lock_and_insert_unpaused(tx, self._claim, write)
        if row is None:
            return None
        self._limits.reset_suspension()
        return Committed([row], writes=[write], renews_lease=False)


class GroupLane(_Lane):
    """The row of a finished step, together with those of other passes of this process that commit at the same time."""

    def commit(self, step_commit: StepCommit) -> Committed:
        if self._committer.changes_instance(step_commit):
            return self._otherwise(step_commit)
        assert self._env.group_commit is not None
        [write] = step_commit.writes
        step = GroupedStep(self._claim, write)
        result = self._env.group_commit.commit(step, lambda: self._otherwise(step_commit))
        if isinstance(result, Committed):
            return result
        self._limits.reset_suspension()
        return Committed([result.row], result.pause_requested, writes=[write], renews_lease=False)


class SleepLane(_Lane):
    """A new sleep that suspends the run, which no limit and no pause ends earlier: one statement (PostgreSQL)."""

    def commit(self, step_commit: StepCommit) -> Committed:
        if not self._is_sleep(step_commit) or self._limits.is_limited:
            return self._otherwise(step_commit)
        suspended = self._run_statement(functools.partial(self._write, step_commit=step_commit), step_commit)
        return self._otherwise(step_commit) if suspended is None else suspended

    @staticmethod
    def _is_sleep(step_commit: StepCommit) -> bool:
        if step_commit.ending is not build_suspension or step_commit.logs or not step_commit.is_single_row:
            return False  # a sleep writes nothing beside its row
        [write] = step_commit.writes
        return write.type is StepType.SLEEP and write.is_new

    def _write(self, tx: Tx, step_commit: StepCommit) -> Committed | None:
        row = steps.suspend_for_sleep(tx, self._claim, step_commit.writes[0])
        if row is None:
            return None
        self._limits.reset_suspension()
        return Committed([row], released=ReleaseOutcome.WAITING, until=row.wake_at, writes=step_commit.writes)


class EndLane(_Lane):
    """The end of a run that writes and sends nothing else: the statement that ends the run checks the claim."""

    def commit(self, step_commit: StepCommit) -> Committed:
        ending = step_commit.ending
        if not isinstance(ending, RunOutcome) or not self._is_bare(step_commit, ending):
            return self._otherwise(step_commit)
        ended = self._run_statement(functools.partial(self._write, run_outcome=ending), step_commit)
        return self._otherwise(step_commit) if ended is None else ended

    def _is_bare(self, step_commit: StepCommit, run_outcome: RunOutcome) -> bool:
        return not (
            step_commit.writes
            or step_commit.logs
            or step_commit.parts
            or step_commit.decide
            or run_outcome.status is Status.TERMINATED
            or self._claim.parent
            or self._run.definition.hooks.of(is_complete=run_outcome.status is Status.COMPLETE)
            or self._committer.kinds_with_rows
        )

    def _write(self, tx: Tx, run_outcome: RunOutcome) -> Committed | None:
        return Committed(run_outcome=run_outcome) if releases.end_run(tx, self._claim, run_outcome) else None
