"""The state of one pass over a workflow function: what it has read and recorded, and the commits by which it advances.

Only the thread of the pass commits steps. If a commit fails for a reason outside user code, such as a database outage,
it ends the pass. An outage must never look like a failed step (a hazard in docs/design.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NoReturn

from celery_durable import values
from celery_durable.ancestry import AncestorRun
from celery_durable.errors import Cancelled, Interruption, PassBroken, StepMisuse, Suspend
from celery_durable.model import (
    CANCELLED,
    LIMITS_KEY,
    LogLevel,
    LogLine,
    OpenWait,
    RunOutcome,
    Status,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
    WorkflowEvent,
)
from celery_durable.replay_state import ReplayState
from celery_durable.runner.attempts import Attempts
from celery_durable.runner.commit_parts import EndChildren, ReleaseLimits, StepEffectFailed
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.published_values import encode_published_value
from celery_durable.runner.step_attempt import StepAttempt, current_attempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, Committer, StepCommit
from celery_durable.runner.step_execution import PassInterrupted, Race, RaceWon, StepExecution

_FUNCTION_ENDED = (
    "A step method was called after its workflow function had ended. Use the step that the function was called with, "
    "while it runs."
)


class ExecutionContext:
    """The state of one pass, shared by its parts. ``max_commits``: interrupt the pass after this many commits."""

    def __init__(
        self,
        env: Environment,
        run: ClaimedRun,
        replay_state: ReplayState,
        committer: Committer,
        *,
        max_commits: int | None = None,
    ) -> None:
        self.env, self.run, self.lease, self.replay_state, self.committer = env, run, run.lease, replay_state, committer
        self.claim, self.ancestry = run.lease.claim, run.state.ancestry
        self.limits = env.settings.limits
        self.now = self.claim.claimed_at  # never ahead of the database's time
        self.event: WorkflowEvent[Any] | None = None
        """What the workflow function was called with."""
        self.race: Race | None = None
        """The call of `Step.first` that is executed now, if any: the branch that finishes first wins."""
        self.logs: list[LogLine] = []
        """Log lines of the workflow function and the engine, which the next commit writes."""
        self.interruption: Interruption | None = None
        """The first interruption of this pass. After it, no further step may run."""
        self.pending_suspension: StepCommit | None = None
        """The commit that records the wait or retry of the only open step, and releases the instance.

        It runs after `Suspend` has left the workflow function.
        """
        self.counted_in_advance: list[tuple[StepExecution, StepRow | None]] = []
        """The steps whose attempts this pass counted before their bodies started, and their rows before that."""
        self.cancellation = run.state.cancellation
        """What the next unfinished step call raises, if the run was cancelled and no step call has raised it yet."""
        self.is_cancelled = False
        """Whether a step call of this pass has raised Cancelled."""
        if any(row.is_cancelled for row in replay_state.rows.values()):
            self.cancellation = None
        self.attempts = Attempts(self)
        self._thread: int | None = threading.get_ident()  # None: the function has returned or raised
        self._started = env.runtime.monotonic()
        self._commits, self._max_commits = 0, max_commits
        self._pause_requested = False

    # --- may the pass continue ------------------------------------------------------------------

    def check_running(self) -> None:
        """Return if the function may continue, else raise the interruption. Every step method calls this first."""
        if current_attempt.get() is not None:
            raise StepMisuse(
                "A step method was called inside a step's body. Call it from the workflow function, between steps."
            )
        if threading.get_ident() != self._thread:
            if self._thread is None:
                raise StepMisuse(_FUNCTION_ENDED)
            raise StepMisuse(
                "A step method was called from another thread. Use step.submit() and step.gather() for parallel steps."
            )
        if self.interruption is not None:
            raise self.interruption
        if self._must_stop():
            raise self.interrupt(Suspend())

    def end_function(self) -> None:
        """Refuse further step calls: the function has returned or raised, and something may have kept its `Step`."""
        self._thread = None

    def _must_stop(self) -> bool:
        # Concurrent branches are committed one after the other, so the count can exceed the limit.
        if self._max_commits is not None and self._commits >= self._max_commits:
            return True
        if self._pause_requested or self.lease.is_cancelled:
            return True
        if self.env.should_stop() or self.run.limits.is_over(self.now):
            return True
        # A pass always commits one step, so that a long replay cannot release the run for ever without progress.
        elapsed_seconds = self.env.runtime.monotonic() - self._started
        return self._commits > 0 and elapsed_seconds > self.env.settings.pass_seconds

    def interrupt(self, reason: Interruption) -> Interruption:
        """Make every further step call raise ``reason``; returns it. If there is an earlier one, that one counts."""
        if self.interruption is None:
            self.interruption = reason
        return self.interruption

    def interrupt_by(self, error: BaseException) -> Interruption:
        """Interrupt the pass because of an error of the engine or its database; returns the interruption to raise."""
        if isinstance(error, Interruption):
            return self.interrupt(error)
        if self.env.stops_process(error):
            reason: Interruption = PassInterrupted(error)
        else:
            reason = PassBroken(f"{type(error).__name__}: {error}")
        reason.__cause__ = error
        return self.interrupt(reason)

    def run_or_interrupt(self, operation: Callable[[], Any]) -> Any:
        """Call a database operation and return its result. If it fails, interrupt the pass."""
        try:
            return operation()
        except (Interruption, Exception) as exc:  # noqa: BLE001  # an outage must not look like a failed step
            raise self.interrupt_by(exc)  # noqa: B904  # it has its cause

    @property
    def current_ancestor(self) -> AncestorRun:
        """The run whose time and random numbers the code sees at its current step."""
        return self.ancestry.ancestor_at(self.replay_state.last_seq)

    # --- commits --------------------------------------------------------------------------------

    def build_write(
        self,
        execution: StepExecution,
        status: StepStatus,
        *,
        error: tuple[str, str] | None = None,
        commit_id: str | None = None,
        attempts: int = 0,
        retry_in: timedelta | None = None,
        wake_in: timedelta | None = None,
        wake_at: datetime | None = None,
        event_type: str | None = None,
        result: str | None = None,
        ran_for: timedelta | None = None,
        payload_type: str | None = None,
        ask: str | None = None,
        keeps_limits: bool = False,
    ) -> StepWrite:
        """Build the row to write for a step; ``error``: name and message. Without an ``ask``, it keeps that it has.

        A limited step gives back its limits, unless it ``keeps_limits``.
        """
        row = self.replay_state.rows.get(execution.key)
        has_attempts = execution.kind.has_attempts
        return StepWrite(
            key=execution.key,
            seq=execution.entry.seq,
            name=execution.name,
            type=execution.kind.type,
            status=status,
            replaces=None if row is None else row.commit_id,
            commit_id=commit_id or next(self.lease.commit_ids),
            max_attempts=execution.policy.max_attempts if has_attempts else None,
            timeout=execution.policy.timeout if has_attempts else None,
            error_name=None if error is None else error[0],
            error_message=None if error is None else error[1],
            attempts=attempts,
            retry_in=retry_in,
            wake_in=wake_in,
            wake_at=wake_at,
            event_type=event_type,
            result=result,
            ran_for=ran_for,
            payload_type=payload_type,
            ask=row.ask if ask is None and row is not None else ask,
            releases_limits=bool(execution.policy.limits) and not keeps_limits,
        )

    def commit_step(self, execution: StepExecution, write: StepWrite) -> None:
        """Commit the row of a step. If the step finishes inside a race, the same commit records the winner."""
        self.commit(StepCommit(write.commit_id, [write, *self.build_race_writes(execution, write)]), execution)

    def commit(
        self, step_commit: StepCommit, execution: StepExecution | None = None, attempt: StepAttempt | None = None
    ) -> None:
        """Run a commit and apply it to the state of the pass, and to the step of ``execution``.

        Raises RaceWon if the step won a race, and StepEffectFailed and BodyRerunRequired: user code caused them, or the
        body runs again. Every other failure interrupts the pass: an outage must not look like a failed step.
        """
        logs_before = len(self.logs)
        if logs_before:
            step_commit.logs = [*self.logs, *step_commit.logs]
        try:
            committed = self.committer.commit(step_commit, attempt)
        except (StepEffectFailed, BodyRerunRequired):
            raise
        except (Interruption, Exception) as exc:  # noqa: BLE001  # an outage must not look like a failed step
            raise self.interrupt_by(exc)  # noqa: B904  # it has its cause
        del self.logs[:logs_before]  # writes of user code may have added more
        self._commits += 1
        self.attempts.note_recorded(committed.rows)
        for row in committed.rows:
            self.replay_state.record(row)
            if row.finished_at is not None and row.finished_at > self.now:
                self.now = row.finished_at
        self._pause_requested = self._pause_requested or committed.pause_requested
        if execution is not None:
            self._apply_to(execution)
        self.committer.announce(committed)
        if self.race is not None and execution is not None and execution.finished_row is not None:
            raise RaceWon

    def _apply_to(self, execution: StepExecution) -> None:
        """Set the row or the wait of a step after its commit."""
        row = self.replay_state.rows.get(execution.key)
        if row is None:
            return
        if row.is_finished:
            execution.finished_row = row
        else:
            execution.wait = OpenWait.of(row)

    def suspend_with(self, step_commit: StepCommit) -> None:
        """Run ``step_commit``, which releases the instance, after `Suspend` has left the workflow function.

        Use it only if the pass waits for nothing else.
        """
        step_commit.logs = [*self.logs, *step_commit.logs]
        self.logs.clear()
        self.pending_suspension = step_commit

    def commit_last(self, step_commit: StepCommit) -> Committed:
        """Run the commit that ends the pass, with the remaining log lines."""
        step_commit.logs = [*step_commit.logs, *self.logs]
        ending = step_commit.ending
        if isinstance(ending, RunOutcome) and ending.status is not Status.TERMINATED and self._may_have_limits():
            step_commit.parts = [ReleaseLimits(), *step_commit.parts]
        committed = self.committer.commit(step_commit)
        self.logs.clear()
        self.committer.announce(committed)
        return committed

    def _may_have_limits(self) -> bool:
        """Whether a run that ends may have limits, or wait for some: of its workflow, or of an open step."""
        rows = self.replay_state.rows
        return LIMITS_KEY in rows or not all(row.is_finished for row in rows.values())

    def build_uncounting_writes(self) -> list[StepWrite]:
        """Build the rows that take back the attempts that were counted before their bodies started.

        The pass writes them when it ends without a crash, so these attempts do not count.
        """
        rows, commit_id = self.replay_state.rows, next(self.lease.commit_ids)
        writes = []
        for execution, before in self.counted_in_advance:
            row = rows.get(execution.key)
            if row is None or row.status is not StepStatus.PENDING:
                continue
            write = self.build_write(execution, StepStatus.PENDING, attempts=row.attempts - 1, commit_id=commit_id)
            if before is not None:
                write = replace(write, error_name=before.error_name, error_message=before.error_message)
            writes.append(write)
        return writes

    # --- cancellation ---------------------------------------------------------------------------

    def cancel(
        self, executions: Sequence[StepExecution], cancelled: Cancelled, *, logs: Sequence[LogLine] = (), **columns: Any
    ) -> None:
        """End open steps because the run was cancelled. Their rows make their call raise `Cancelled` in every pass."""
        self.cancellation, commit_id = None, next(self.lease.commit_ids)
        writes = []
        for execution in executions:
            row = self.replay_state.rows.get(execution.key)
            kept: dict[str, Any] = {} if row is None else {"attempts": row.attempts, "event_type": row.wait_event_type}
            kept |= {"error": (CANCELLED, cancelled.reason or ""), "commit_id": commit_id, **columns}
            writes.append(self.build_write(execution, StepStatus.CANCELLED, **kept))
        self.commit(StepCommit(commit_id, writes, logs, [EndChildren("cancel", cancelled.reason)]))
        for execution in executions:
            self._apply_to(execution)

    def raise_cancelled(self, row: StepRow) -> NoReturn:
        """Raise what the call of a cancelled step raises."""
        self.is_cancelled = True
        raise Cancelled(row.error_message or None)

    # --- races ----------------------------------------------------------------------------------

    def build_race_writes(self, winner: StepExecution, write: StepWrite) -> Sequence[StepWrite]:
        """Build the rows that end the race of the current `Step.first` call if ``write`` finishes its winner."""
        if self.race is None or not write.is_finished:
            return ()
        return self.build_race_end(self.race, winner, write.commit_id)

    def build_race_end(self, race: Race, winner: StepExecution, commit_id: str) -> list[StepWrite]:
        """Build the rows that end a race: one with the winner's key, and one for each branch that is still open.

        The commit that finishes the winner writes them, with its ``commit_id``. A rewound or forked run finds the
        branches of the race by that id (see `ancestry`).
        """
        result = values.encode(winner.key, what="Winner", limits=self.limits)
        race_write = StepWrite(
            key=race.entry.key,
            seq=race.entry.seq,
            name=race.entry.name,
            type=StepType.DO,
            status=StepStatus.COMPLETED,
            replaces=None,
            commit_id=commit_id,
            attempts=1,
            result=result,
        )
        losers = [branch for branch in race.branches if branch is not winner and self.find_finished_row(branch) is None]
        return [race_write, *(self._build_loser(branch, commit_id) for branch in losers)]

    def _build_loser(self, branch: StepExecution, commit_id: str) -> StepWrite:
        """Build the row of a branch that has lost. It keeps what the branch waited for, such as its child."""
        row = self.replay_state.rows.get(branch.key)
        event_type = None if row is None else row.wait_event_type
        return self.build_write(branch, StepStatus.CANCELLED, commit_id=commit_id, event_type=event_type)

    def find_finished_row(self, execution: StepExecution) -> StepRow | None:
        """Return the current row of a step if it has finished, else None."""
        row = self.replay_state.rows.get(execution.key)
        return row if row is not None and row.is_finished else None

    # --- logs and published values --------------------------------------------------------------

    def add_log(self, level: LogLevel, message: str, category: str, data: str | None = None) -> None:
        """Keep a log line until the next commit: that of the body on this thread, else the next commit of the pass."""
        attempt = current_attempt.get()
        line = LogLine(
            level=level,
            category=category,
            message=values.sanitize_text(message, self.env.settings.max_log_message),
            data=data,
            step_key=None if attempt is None else attempt.step_key,
            attempt=None if attempt is None else attempt.number,
            is_replay=attempt is None and self.replay_state.is_replaying,
        )
        (self.logs if attempt is None else attempt.logs).append(line)

    def publish(self, key: str, value: Any) -> None:
        """Publish a value, unless the function is replaying steps of an earlier pass."""
        text, attempt = encode_published_value(self.env.settings, key, value), current_attempt.get()
        if attempt is not None:
            attempt.check_not_abandoned()
            self.committer.publish(key, text)
        elif self._thread is None:
            raise StepMisuse(_FUNCTION_ENDED)
        elif self.interruption is not None:
            raise self.interruption
        elif not self.replay_state.is_replaying:
            self.run_or_interrupt(lambda: self.committer.publish(key, text))
