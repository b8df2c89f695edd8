"""Commits under one claim. A transaction can write every commit; `lanes` write the frequent ones in less.

A commit without the body's transaction is repeated after a deadlock, or if it was in doubt and the database shows that
it did not happen. One in the body's transaction cannot be repeated: the body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from celery_durable import notify
from celery_durable.errors import Superseded
from celery_durable.model import (
    DueRun,
    Release,
    ReleaseOutcome,
    RunOutcome,
    Status,
    StepRow,
    StepStatus,
    StepWrite,
)
from celery_durable.runner.commit_parts import CommitPart, OpenCommit, ReleaseLimits, RowKinds, StepEffectFailed
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.failed_attempts import log_attempts, log_end
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.run_end import RunEnd
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, StepCommit
from celery_durable.store.engine import Tx
from celery_durable.store.engine.sessions import StepTransaction
from celery_durable.store.engine.time_limits import PASS
from celery_durable.store.runs import claims, outputs, releases, step_rows


class DatabaseCommitter:
    def __init__(self, env: Environment, run: ClaimedRun, kinds: RowKinds) -> None:
        self.env, self.run, self._store, self._kinds = env, run, env.store, kinds
        self._lease, self._claim, self._limits = run.lease, run.lease.claim, run.limits
        self._published = PublishedValues(env, run.lease)
        self.publish = self._published.publish
        self.remaining_logs = env.settings.max_logs - run.state.log_count
        """How many log lines the run may still store."""
        self.kinds_with_rows = {
            kind
            for row in run.state.steps
            if row.status is StepStatus.WAITING and (kind := kinds.of_row(row.type)).has_own_rows
        }
        """The kinds whose steps may have open rows of their own when the run ends."""
        self.write_commit: Callable[[StepCommit], Committed] = self.transact
        """Writes a commit that is not in the body's transaction. The `lanes` come before the plain way."""

    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        lease, published = self._lease, self._published
        requested_at = lease.mark_progress()
        if published.pending:
            step_commit = replace(step_commit, parts=[*step_commit.parts, published])
        transaction = None if attempt is None else attempt.buffer.transaction
        runs_user_code = bool(step_commit.parts) and step_commit.runs_user_code
        if runs_user_code:  # it may take any length of time (LAW 7)
            lease.enter_user_code(step_commit)
        try:
            if transaction is None:
                committed = self.write_commit(step_commit)
            else:
                committed = self.transact(step_commit, transaction)
        except (Superseded, Exception) as error:  # noqa: BLE001  # `_recover` raises it
            committed = self._recover(error, step_commit, transaction)
        finally:
            if runs_user_code:
                lease.exit_user_code(step_commit)
        if published.flushing:
            published.mark_flushed()
        if committed.renews_lease:
            lease.extend(requested_at=requested_at)
        if transaction is not None and attempt is not None:
            attempt.close_transaction()
        self.remaining_logs -= len(step_commit.logs)
        return committed

    def announce(self, committed: Committed) -> None:
        if committed.is_certain:  # else a sweep finds the messages to send and the runs to wake
            self._store.after_commit(functools.partial(self._announce, committed))

    def _announce(self, committed: Committed) -> None:
        failures = committed.failures
        if failures:
            log_attempts(self._claim.ref, failures)
            exceptions = {failed.write.step_key: failed.error for failed in failures}
            notify.send_steps_recorded(self._claim, committed.writes, exceptions)
        else:
            notify.send_steps_recorded(self._claim, committed.writes)
        for announce in committed.announcements:
            announce()
        if (run_outcome := committed.run_outcome) is not None:
            if run_outcome.status is Status.ERRORED:
                log_end(self._claim.ref, run_outcome, failures)
            notify.send_run_ended(self._claim, run_outcome, lambda: self._lease.now - self.run.state.created_at)
        elif committed.released is not None:
            notify.send_workflow_suspended(self._claim, committed.released, committed.until)
        if committed.due_runs:  # after the signals, so that those of the woken runs are sent later
            self.env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self.env.send_messages(list(committed.messages))

    # --- the transaction that can write every commit --------------------------------------------

    def transact(self, step_commit: StepCommit, transaction: StepTransaction | None = None) -> Committed:
        """Write a commit in a transaction: that of the body, if it has opened one."""
        parts = list(step_commit.parts)
        if isinstance(step_commit.ending, RunOutcome):
            parts.append(RunEnd(self.run, step_commit.ending, self.kinds_with_rows))
        if parts:
            self._encode(parts)
        write = functools.partial(self._write, step_commit=step_commit, parts=parts)
        if transaction is not None:
            return self._store.transact_step(transaction, write)
        find_committed = functools.partial(self.find_committed, step_commit=step_commit)
        if step_commit.runs_user_code:
            return self._store.transact_user_writes(write, find_committed=find_committed)
        return self._store.transact(write, find_committed=find_committed, timeouts=PASS)

    def _encode(self, parts: Sequence[CommitPart]) -> None:
        """Encode the values of a commit, before its transaction; raises StepEffectFailed."""
        try:
            with self._lease.user_code():
                for part in parts:
                    part.encode(self.env.settings)
        except Exception as exc:
            if self.env.stops_process(exc):
                raise
            raise StepEffectFailed(exc) from exc

    def _write(self, tx: Tx, step_commit: StepCommit, parts: Sequence[CommitPart]) -> Committed:
        """Write the rows of user code first, then the instances' rows, locked by ascending id (docs/design.md).

        With the guard first, this would deadlock with a web transaction that updates an application row, then sends an
        event.
        """
        claim = self._claim
        for part in parts:
            part.write_user_rows(tx, self.env)
        targets = sorted({target for part in parts for target in part.find_lock_targets(tx)})
        for target in targets:
            if target.pk <= claim.pk:
                target.lock(tx)
        changes_instance = self.changes_instance(step_commit)
        with self._store.conflict_as_superseded():
            guard_result = self._guard(tx, step_commit, changes_instance=changes_instance)
            writes = step_commit.writes
            if step_commit.decide is not None:
                decision = step_commit.decide(tx, guard_result)
                writes, parts = [*writes, *decision.writes], [*parts, *decision.parts]
            if writes:
                self._limits.reset_suspension()
            later_targets = [target for target in targets if target.pk > claim.pk]
            commit = OpenCommit(tx, self.env, claim, guard_result, writes, later_targets)
            rows = [self._write_row(commit, write) for write in writes]
            if ended := [write.key for write in writes if write.releases_limits]:
                ReleaseLimits(ended).write(commit)
        outputs.write_logs(tx, claim, guard_result, step_commit.logs, remaining=self.remaining_logs)
        for part in parts:
            part.write(commit)
        ending = step_commit.ending(rows) if callable(step_commit.ending) else step_commit.ending
        released, until = self._release(commit, ending) if isinstance(ending, Release) else (None, None)
        return Committed(
            rows,
            pause_requested=guard_result.pause_requested,
            released=released,
            until=until,
            run_outcome=ending if isinstance(ending, RunOutcome) else None,
            due_runs=commit.due_runs,
            messages=commit.messages,
            writes=writes,
            failures=commit.failures,
            announcements=commit.announcements,
            renews_lease=changes_instance,
        )

    def is_row_alone(self, step_commit: StepCommit) -> bool:
        """Whether a commit writes one row, and nothing else but an ending and log lines."""
        return step_commit.is_single_row and not self._kinds.of_row(step_commit.writes[0].type).writes_beside

    def changes_instance(self, step_commit: StepCommit) -> bool:
        """Whether the guard of a commit writes to the instance's row: only what has to change (LAW 2)."""
        if step_commit.ending is not None or step_commit.logs or not self.is_row_alone(step_commit):
            return True
        return self.row_changes_instance(step_commit.writes[0])

    def row_changes_instance(self, write: StepWrite) -> bool:
        """Whether it does if the commit is this row alone."""
        adds_finished_step = write.replaces is None and write.status is StepStatus.COMPLETED
        return not adds_finished_step or self._claim.crash_count > 0 or self._lease.is_renewal_due

    def _guard(self, tx: Tx, step_commit: StepCommit, *, changes_instance: bool) -> claims.GuardResult:
        if not changes_instance:
            return claims.guard_without_change(tx, self._claim)
        resets_crash_count = step_commit.resets_crash_count
        return claims.guard(tx, self._claim, lease=self._lease.length, resets_crash_count=resets_crash_count)

    def _write_row(self, commit: OpenCommit, write: StepWrite) -> StepRow:
        kind = self._kinds.of_row(write.type)
        if kind.has_own_rows:
            self.kinds_with_rows.add(kind)
        kind.prepare_write(commit, write)
        return step_rows.write_step(commit.tx, commit.claim, commit.guard_result, write)

    def _release(self, commit: OpenCommit, ending: Release) -> tuple[ReleaseOutcome, datetime | None]:
        tx, claim, guard_result = commit.tx, commit.claim, commit.guard_result
        if not self.run.state.is_start_recorded:
            releases.mark_started(tx, claim)
        if not ending.waits:
            released, until = releases.release(tx, claim, guard_result, grace=commit.grace), None
        else:
            waits = [*ending.waits, *self._limits.deadlines(guard_result.now)]
            if any(wait.condition is not None and wait.is_checked_again for wait in ending.waits):
                waits.append(self._limits.next_check(guard_result.now))
            until = min(wait.due_at for wait in ending.waits)
            released = releases.suspend(tx, claim, guard_result, waits, grace=commit.grace)
        if released is ReleaseOutcome.DUE:
            commit.due_runs.append(DueRun(claim.ref, claim.queue))
        return released, until

    # --- commits in doubt -----------------------------------------------------------------------

    def _recover(self, error: BaseException, step_commit: StepCommit, transaction: StepTransaction | None) -> Committed:
        """Return what a commit has done although it failed with ``error``. Otherwise raise the error that it means."""
        store, find_committed = self._store, functools.partial(self.find_committed, step_commit=step_commit)
        is_in_doubt = transaction is not None and store.is_commit_in_doubt(error)
        # A single statement may have superseded this pass itself: the first try timed out, but the database applied it
        # before the second one.
        is_statement = transaction is None and step_commit.is_single_row
        if is_in_doubt or (isinstance(error, Superseded) and is_statement):
            found = store.transact(find_committed)
            if found is not None:
                return found
        if isinstance(error, (Superseded, StepEffectFailed)):
            raise error
        if is_in_doubt or (transaction is not None and store.is_transient(error)):
            raise BodyRerunRequired(str(error)) from error
        if step_commit.runs_user_code and store.is_rejection(error):
            raise StepEffectFailed(error) from error  # a deferred constraint, or an error that the body ignored
        raise error

    def find_committed(self, tx: Tx, step_commit: StepCommit) -> Committed | None:
        """Return what a commit in doubt has done, None if rolled back, after a wait for the lock; raises Superseded."""
        is_held = claims.is_held(tx, self._claim)
        rows = step_rows.find_commit(tx, self._claim, commit_id=step_commit.commit_id) if step_commit.commit_id else ()
        if not is_held:
            self._lease.is_lost = True
        ending = step_commit.ending
        has_left = ending is not None and not is_held
        run_outcome = ending if isinstance(ending, RunOutcome) else None
        is_due = isinstance(ending, Release) and not ending.waits  # or paused: that was decided under the lock
        if rows or (has_left and not step_commit.commit_id):
            # Without rows, another worker may have taken over instead. In both cases this pass is over.
            return Committed(
                rows,
                released=ReleaseOutcome.WAITING if has_left and run_outcome is None else None,
                run_outcome=run_outcome,
                writes=step_commit.writes,
                failures=step_commit.failures,
                is_certain=bool(rows) and not is_due,
                renews_lease=False,
            )
        if not is_held:
            raise Superseded(str(self._claim.ref))
        return None
