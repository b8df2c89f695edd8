"""The state of one pass: what it has read and recorded, and the commits by which it advances.

Only the thread of the pass commits steps. If a commit fails for a reason outside user code, such as a database outage,
it ends the pass. An outage must never look like a failed step (a hazard in docs/design.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_durable import notify, values
from celery_durable.ancestry import AncestorRun, Ancestry
from celery_durable.config import Settings
from celery_durable.errors import Interruption, PassBroken, StepMisuse, Suspend, ValueRefused
from celery_durable.model import DueRun, LogLevel, LogLine, OpenWait, OutboxMessage, StepRow, StepStatus, StepType
from celery_durable.replay_state import ReplayState
from celery_durable.runner.lease import Lease
from celery_durable.runner.run_limits import RunLimits
from celery_durable.runner.step_attempt import StepAttempt, current_attempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, Committer, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runner.step_execution import PassInterrupted, Race, RaceWon, StepExecution
from celery_durable.runtime import Runtime
from celery_durable.step import BodyCall, ChildCall, MapCall, SleepCall, StepCall, TaskCall, WaitCall
from celery_durable.store.engine import Store
from celery_durable.store.step_rows import StepWrite

STEP_TYPES: dict[type[StepCall], StepType] = {
    BodyCall: StepType.DO,
    SleepCall: StepType.SLEEP,
    WaitCall: StepType.WAIT,
    TaskCall: StepType.TASK,
    MapCall: StepType.MAP,
    ChildCall: StepType.CHILD,
}
"""The step type that each kind of call is recorded with."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The objects that all passes of a process share. The callables are the arguments of `Runner`."""

    store: Store
    settings: Settings
    runtime: Runtime
    publish_runs: Callable[[list[DueRun]], None]
    send_messages: Callable[[list[OutboxMessage]], None]
    should_stop: Callable[[], bool]
    stops_process: Callable[[BaseException], bool]
    """Whether an exception stops the process, and is not a failure of the code that raised it."""


def encode_log_data(settings: Settings, message: str, category: str, data: dict[str, Any]) -> str | None:
    """Encode the data of a log line as JSON text, None if it has none.

    Raises for an invalid category, and for data that is not JSON or too large.
    """
    values.check_text_name("Log category", category, settings.max_log_category)
    if category == "system":
        raise ValueRefused('Log category "system" is reserved for the engine; use another.')
    return values.encode(data, what=f"Data of log line {message[:80]!r}", limits=settings.limits) if data else None


class ExecutionContext:
    """The state of one pass, shared by its parts."""

    def __init__(
        self,
        env: Environment,
        lease: Lease,
        replay_state: ReplayState,
        committer: Committer,
        *,
        run_limits: RunLimits,
        ancestry: Ancestry,
        max_commits: int | None = None,
    ) -> None:
        self.env, self.lease, self.replay_state, self.committer = env, lease, replay_state, committer
        self.ancestry = ancestry
        self.now = lease.claim.claimed_at  # never ahead of the database's time
        self.race: Race | None = None
        """The call of `Step.first` that is executed now, if any: the branch that finishes first wins."""
        self.logs: list[LogLine] = []
        self.interruption: Interruption | None = None
        """The first interruption of this pass. After it, no further step may run."""
        self.pending_suspension: Callable[[], Committed] | None = None
        """Commits the wait or retry of the only open step, and releases the instance.

        It runs after `Suspend` has left the workflow function.
        """
        self.counted_in_advance: list[StepExecution] = []
        """The steps whose attempts this pass counted before their bodies started."""
        self._thread = threading.get_ident()
        self._started = env.runtime.monotonic()
        self._commits, self._max_commits = 0, max_commits
        self._run_limits = run_limits
        self._pause_requested = False

    def check_running(self) -> None:
        """Return if the function may continue, else raise the interruption. Every step method calls this first."""
        if current_attempt.get() is not None:
            raise StepMisuse(
                "A step method was called inside a step's body. Call it from the workflow function, between steps."
            )
        if threading.get_ident() != self._thread:
            raise StepMisuse(
                "A step method was called from another thread. Use step.submit() and step.gather() for parallel steps."
            )
        if self.interruption is not None:
            raise self.interruption
        must_stop = self._pause_requested or self.env.should_stop() or self._has_reached_limit
        must_stop = must_stop or self._run_limits.is_exceeded(self.now)
        # A pass always commits one step, so that a long replay cannot release the run for ever without progress.
        is_out_of_time = self._commits and self._elapsed_seconds > self.env.settings.pass_seconds
        if must_stop or is_out_of_time:
            raise self.interrupt(Suspend())

    @property
    def current_ancestor(self) -> AncestorRun:
        """The run whose time and random numbers the code sees at its current step."""
        return self.ancestry.ancestor_at(self.replay_state.last_seq)

    @property
    def _has_reached_limit(self) -> bool:
        # Concurrent branches are committed one after the other, so the count can exceed the limit.
        return self._max_commits is not None and self._commits >= self._max_commits

    @property
    def _elapsed_seconds(self) -> float:
        return self.env.runtime.monotonic() - self._started

    def interrupt(self, reason: Interruption) -> Interruption:
        """Make every further step call raise ``reason``; returns it. If there is an earlier one, that one counts."""
        if self.interruption is None:
            self.interruption = reason
        return self.interruption

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
    ) -> StepWrite:
        """Build the row to write for a step; ``error``: name and message."""
        row = self.replay_state.row(execution.key)
        has_attempts = isinstance(execution.call, (BodyCall, TaskCall, MapCall))
        return StepWrite(
            key=execution.key,
            seq=execution.entry.seq,
            name=execution.name,
            type=STEP_TYPES[type(execution.call)],
            status=status,
            replaces=None if row is None else row.commit_id,
            commit_id=commit_id or self.env.runtime.new_token(),
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
        )

    def commit_step(self, execution: StepExecution, write: StepWrite) -> None:
        """Commit the row of a step.

        If the step finishes inside a race, the same commit records the winner, and this raises RaceWon.
        """
        race_writes = self.build_race_writes(execution, write.commit_id) if write.is_finished else []
        step_commit = StepCommit([write, *race_writes], self.drain_logs())
        self.apply_to(execution, self.run_or_interrupt(lambda: self.committer.commit(step_commit)))

    def defer_suspension(self, step_commit: StepCommit) -> None:
        """Record a wait and release the instance in one commit, after `Suspend` has left the workflow function.

        Use it only if the pass waits for nothing else.
        """

        def commit() -> Committed:
            step_commit.logs += self.drain_logs()  # lines that the function logged after the suspension
            return self.committer.commit(step_commit)

        self.pending_suspension = commit

    def commit_suspension(self, pending_suspension: Callable[[], Committed]) -> Committed:
        """Run the deferred commit, send its signals, and publish its due runs and messages."""
        committed = pending_suspension()
        committed.notify(self.lease.claim)
        if committed.released is not None:
            notify.send_workflow_suspended(self.lease.claim, committed.released, committed.until)
        self.env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self.env.send_messages(list(committed.messages))
        return committed

    def build_uncounting_writes(self) -> list[StepWrite]:
        """Build the rows that take back the attempts that were counted before their bodies started.

        The pass writes them when it ends without a crash, so these attempts do not count.
        """
        rows = [(execution, self.replay_state.row(execution.key)) for execution in self.counted_in_advance]
        return [
            self.build_write(execution, StepStatus.PENDING, attempts=row.attempts - 1)
            for execution, row in rows
            if row is not None and row.status is StepStatus.PENDING
        ]

    def apply_to(self, execution: StepExecution, committed: Committed) -> None:
        """Apply a commit, and set the row or the wait of its step; raises RaceWon if the step won a race."""
        self.apply(committed)
        execution.finished_row = self.find_finished_row(execution)
        row = self.replay_state.row(execution.key)
        if execution.finished_row is None and row is not None:
            due_at = row.next_retry_at or row.wake_at
            if due_at is not None:
                execution.wait = OpenWait(due_at, row.wait_event_type)
        if execution.finished_row is not None and self.race is not None:
            raise RaceWon

    def apply(self, committed: Committed) -> None:
        """Apply a commit to the state of the pass, send its signals, and publish its due runs and messages."""
        self._commits += 1
        for row in committed.rows:
            self.replay_state.record(row)
            if row.finished_at is not None:
                self.now = max(self.now, row.finished_at)
        self._pause_requested = self._pause_requested or committed.pause_requested
        committed.notify(self.lease.claim)
        if committed.due_runs:
            self.env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self.env.send_messages(list(committed.messages))

    def run_or_interrupt(self, operation: Callable[[], Any]) -> Any:
        """Call a database operation and return its result. If it fails, interrupt the pass.

        Raises StepEffectFailed and BodyRerunRequired unchanged: user code caused them, or the body runs again. An
        outage must not look like a failed step.
        """
        try:
            return operation()
        except (StepEffectFailed, BodyRerunRequired):
            raise
        except Interruption as exc:
            raise self.interrupt(exc) from None
        except Exception as exc:
            if self.env.stops_process(exc):
                raise self.interrupt(PassInterrupted(exc)) from exc
            raise self.interrupt(PassBroken(f"{type(exc).__name__}: {exc}")) from exc

    def add_log(self, level: LogLevel, message: str, category: str, data: str | None = None) -> None:
        """Keep a log line until the next commit: that of the body on this thread, else the next commit of the pass."""
        step_attempt = current_attempt.get()
        line = LogLine(
            level=level,
            category=category,
            message=values.sanitize_text(message, self.env.settings.max_log_message),
            data=data,
            step_key=None if step_attempt is None else step_attempt.step_key,
            attempt=None if step_attempt is None else step_attempt.number,
            is_replay=step_attempt is None and self.replay_state.is_replaying,
        )
        (self.logs if step_attempt is None else step_attempt.logs).append(line)

    def publish(self, key: str, value: Any) -> None:
        """Publish a value, unless the function is replaying steps of an earlier pass."""
        published, step_attempt = self.committer.published, current_attempt.get()
        text = published.encode_value(key, value)
        if step_attempt is not None:
            step_attempt.check_not_abandoned()
            published.publish(key, text)
        elif self.interruption is not None:
            raise self.interruption
        elif not self.replay_state.is_replaying:
            self.run_or_interrupt(lambda: published.publish(key, text))

    def drain_logs(self, step_attempt: StepAttempt | None = None) -> list[LogLine]:
        """Remove and return the log lines of the workflow function, followed by those of ``step_attempt``."""
        lines = [*self.logs, *(step_attempt.logs if step_attempt is not None else ())]
        self.logs.clear()
        return lines

    def build_race_writes(self, winner: StepExecution, commit_id: str) -> list[StepWrite]:
        """Build the rows that end the race of the current `Step.first` call.

        One row has the winner's key. Each branch that is still open is recorded as cancelled.

        The commit that finishes the winner writes them, with its ``commit_id``. A rewound or forked run finds the
        branches of the race by that id (see `ancestry`).
        """
        race = self.race
        if race is None:
            return []
        result = values.encode(winner.key, what="Winner", limits=self.env.settings.limits)
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
        return [race_write, *(self.build_write(branch, StepStatus.CANCELLED, commit_id=commit_id) for branch in losers)]

    def find_finished_row(self, execution: StepExecution) -> StepRow | None:
        """Return the current row of a step if it has finished, else None."""
        row = self.replay_state.row(execution.key)
        return row if row is not None and row.is_finished else None
