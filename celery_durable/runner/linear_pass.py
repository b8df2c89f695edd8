"""A pass over a run of a linear workflow: the rows alone decide the next step, and its handler returns the outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery_durable.definitions import LinearDefinition
from celery_durable.errors import Interruption, WorkerCrashLoop
from celery_durable.model import (
    LogLine,
    OpenWait,
    PassResult,
    Release,
    RunOutcome,
    Status,
    StepRow,
    StepStatus,
    StepWrite,
)
from celery_durable.runner import linear_rows
from celery_durable.runner.attempts import Attempts
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.lease import release_for_shutdown
from celery_durable.runner.linear_rows import LinearRows
from celery_durable.runner.linear_step import LinearStep
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import Committed, Committer, Decision, StepCommit, build_release_commit
from celery_durable.runner.step_execution import PassInterrupted
from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.runs.claims import GuardResult

logger = logging.getLogger("celery_durable.runner")


class LinearPass:
    """Advances one run as far as its rows allow now. ``max_commits``: release it after this many handler outcomes."""

    def __init__(
        self,
        definition: LinearDefinition,
        env: Environment,
        run: ClaimedRun,
        committer: Committer,
        *,
        max_commits: int | None,
    ) -> None:
        self.definition, self.env, self.run, self.committer = definition, env, run, committer
        self.lease, self.claim = run.lease, run.lease.claim
        self.rows = LinearRows(run.state.steps, now=self.claim.claimed_at)
        self.logs: list[LogLine] = []
        self._attempts = Attempts(self)
        self._max_commits = max_commits
        self._started_at, self._commits, self._pause_requested = env.runtime.monotonic(), 0, False
        self._result: PassResult | None = None

    # --- the stages -----------------------------------------------------------------------------

    def check_limits(self) -> StepCommit | None:
        """Return the commit that ends a run that killed too many workers or took too long; None if it may continue."""
        if (cancelled := self.run.state.cancellation) is not None:
            return StepCommit(ending=RunOutcome(Status.TERMINATED, reason=str(cancelled)))
        crashes, row = self.claim.crash_count, self.rows.current
        if crashes < self.env.settings.max_crashes or row is None:
            if not self.run.limits.is_limited:
                return None
            reason = self.env.store.read(self.run.limits.termination_reason)
            return None if reason is None else StepCommit(ending=RunOutcome(Status.TERMINATED, reason=reason))
        error = WorkerCrashLoop(crashes)
        return linear_rows.build_failure_commit(row, self._new_commit_id(), (type(error).__name__, str(error)))

    def execute(self) -> StepCommit | None:
        """Run steps; returns the commit that ends the pass, None if a step's has. Raises as `FunctionPass.execute`."""
        try:
            return self._run_steps()
        except PassInterrupted as stopped:
            release_for_shutdown(self.claim.ref, self._release_before_stopping)
            raise stopped.error from None
        except BaseException as error:
            if self.env.stops_process(error):
                release_for_shutdown(self.claim.ref, self._release_before_stopping)
            raise

    def _run_steps(self) -> StepCommit | None:
        while self._result is None:
            row = self.rows.current
            if row is None:
                return self._complete_run()
            if row.status is StepStatus.RUNNING:
                policy = self.definition.policy_of(row.name, self.env.settings.step_policy)
                self.commit(
                    linear_rows.build_lost_worker_commit(row, self._new_commit_id(), may_repeat=policy.may_repeat)
                )
            elif self._should_stop():
                return build_release_commit([])
            elif row.name not in self.definition.handlers:
                return self._release_without_handler(row)
            elif row.status is StepStatus.LINEAR_WAITING:
                self._check_wait(row)
            elif row.next_retry_at is not None and row.next_retry_at > self.rows.now:
                return build_release_commit([OpenWait(row.next_retry_at)])
            else:
                self._run_step(linear_rows.build_running_write(row, self._new_commit_id()))
        return None

    def conclude(self, last_commit: StepCommit | None) -> PassResult:
        if last_commit is not None:
            self.commit(last_commit)
        assert self._result is not None
        return self._result

    def _complete_run(self) -> StepCommit:
        """Complete the run, because all its steps are done.

        Normally the commit of the last step does. Here a person completed that step with set-result, or another worker
        took over the run before this pass read the rows: then the commit fails with Superseded.
        """
        return StepCommit(ending=RunOutcome(Status.COMPLETE, output=self.rows.rows[-1].result))

    def _should_stop(self) -> bool:
        elapsed_seconds = self.env.runtime.monotonic() - self._started_at
        is_out_of_time = self._commits > 0 and elapsed_seconds > self.env.settings.pass_seconds
        has_reached_max_commits = self._max_commits is not None and self._commits >= self._max_commits
        is_over = self.run.limits.is_over(self.lease.now)  # the next pass terminates it
        return bool(
            self._pause_requested or self.env.should_stop() or is_over or is_out_of_time or has_reached_max_commits
        )

    def _release_without_handler(self, row: StepRow) -> StepCommit:
        """Release a run whose next step has no handler in this process. Another worker's code may have the handler."""
        delay = timedelta(seconds=self.env.settings.unknown_workflow_seconds)
        logger.warning(
            "This worker has no handler for step %r of linear workflow %r; instance %s is left for a worker that has "
            "one. Keep the handlers of all steps of unfinished runs, or wait for the deploy to end.",
            row.name, self.definition.name, self.claim.ref,
        )  # fmt: skip
        self._result = PassResult(f"noop: step {row.name!r} has no handler in this worker", was_executed=False)
        return build_release_commit([OpenWait(self.rows.now + delay)], shows_progress=False)

    # --- steps ----------------------------------------------------------------------------------

    def _run_step(self, write: StepWrite) -> None:
        """Record the step as RUNNING, and call its handler."""
        (row,) = self.commit(StepCommit(write.commit_id, [write])).rows
        self._attempt(row)

    def _attempt(self, row: StepRow) -> None:
        self._attempts.run([LinearStep(self, row)])

    def _release_before_stopping(self) -> None:
        """Release the run; a RUNNING step is READY again, or fails if it may not be repeated."""
        self._attempts.record_interrupted()
        if self._result is not None:
            return
        row, commit_id = self.rows.current, self._new_commit_id()
        writes = []
        if row is not None and row.status is StepStatus.RUNNING:
            writes = [linear_rows.build_ready_write(row, commit_id)]
        committed = self._commit(build_release_commit([], commit_id=commit_id if writes else "", writes=writes))
        self.committer.announce(replace(committed, writes=()))  # it is no retry

    def _check_wait(self, row: StepRow) -> None:
        """Check a waiting step under the lock.

        If its event has arrived, the step becomes READY with it. If its deadline has passed, it becomes RUNNING without
        an event. Otherwise the same commit suspends the instance.
        """
        commit_id, due_at, event_type = self._new_commit_id(), row.wake_at, row.wait_event_type
        assert due_at is not None
        assert event_type is not None

        def decide(tx: Tx, guard_result: GuardResult) -> Decision:
            event = run_events.find_oldest_event(tx, self.claim, event_type, key=row.step_key, deadline=due_at)
            if event is not None:
                run_events.consume(tx, self.claim, guard_result, event, key=row.step_key)
                return Decision([linear_rows.build_event_write(row, commit_id, event.seq)])
            return Decision([linear_rows.build_running_write(row, commit_id)] if due_at <= guard_result.now else [])

        def find_ending(rows: Sequence[StepRow]) -> Release | None:
            return None if rows else Release([OpenWait(due_at, event_type)])

        # A handler that is called at the deadline may still kill its worker.
        step_commit = StepCommit(commit_id, decide=decide, ending=find_ending, shows_progress=False)
        for recorded in self.commit(step_commit).rows:
            if recorded.status is StepStatus.RUNNING:
                self._attempt(recorded)

    # --- commits --------------------------------------------------------------------------------

    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        committed = self._commit(step_commit, attempt)
        self.committer.announce(committed)
        return committed

    def _commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        logs_before = len(self.logs)
        step_commit.logs = [*self.logs, *step_commit.logs]
        committed = self.committer.commit(step_commit, attempt)
        del self.logs[:logs_before]
        self._commits += attempt is not None
        self._pause_requested = self._pause_requested or committed.pause_requested
        self._attempts.note_recorded(committed.rows)
        self.rows.apply(committed.rows)
        if committed.released is not None or committed.run_outcome is not None:
            self._result = self._result or committed.pass_result
        return committed

    def run_or_interrupt(self, operation: Callable[[], Any]) -> Any:
        return operation()

    def interrupt(self, reason: Interruption) -> Interruption:
        return reason

    def _new_commit_id(self) -> str:
        return next(self.lease.commit_ids)
