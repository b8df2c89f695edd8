"""Commits under one claim, each in the fastest way that is safe.

A commit without the body's session is *retryable*: it is repeated after a deadlock. It is also repeated after a commit
in doubt, such as after a lost connection, if the database shows that the commit did not happen. A commit in the body's
session cannot be repeated: the body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from sqlalchemy.orm import Session

from celery_durable import notify
from celery_durable.errors import Superseded
from celery_durable.model import ReleaseOutcome, RunOutcome, Status, StepRow
from celery_durable.runner.commit_writer import CommitWriter
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.store import claims, step_rows
from celery_durable.store.engine import Tx
from celery_durable.store.step_rows import WrittenStep
from celery_durable.store.watchdog import PASS


class DatabaseCommitter:
    """The committer that writes to the store."""

    def __init__(self, env: Environment, run: ClaimedRun) -> None:
        self._env, self._store, self._run = env, env.store, run
        self._lease, self._claim = run.lease, run.lease.claim
        self._published = PublishedValues(env, run.lease)
        self._writer = CommitWriter(env, run, self._published)

    def publish(self, key: str, text: str) -> None:
        self._published.publish(key, text)

    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        lease, published = self._lease, self._published
        requested_at = lease.mark_progress()
        session = None if attempt is None else attempt.buffer.session
        if session is not None or step_commit.user_writes:
            committed = self._commit_with_user_writes(step_commit, session)
        elif published.pending:
            committed = self._commit_retryable(step_commit)
        elif step_commit.is_single_row:
            committed = self._commit_single_row(step_commit)
        elif (run_outcome := step_commit.bare_outcome) is not None and run_outcome.status is not Status.TERMINATED:
            committed = self._commit_bare_outcome(step_commit, run_outcome)
        else:
            committed = self._commit_retryable(step_commit)
        if published.flushing:
            published.mark_flushed()
        lease.extend(requested_at=requested_at)
        if session is not None and attempt is not None:
            attempt.close_session()
        self._writer.remaining_logs -= len(step_commit.logs)
        if committed.released is not None:
            self._writer.is_start_recorded = True
        self._announce(committed)
        return committed

    def _announce(self, committed: Committed) -> None:
        """Send the signals of a commit. Then wake other runs, so that their signals are sent later."""
        if not committed.is_certain:  # a sweep finds the messages to send and the runs to wake
            return
        notify.send_steps_recorded(self._claim, committed.writes)
        for ref in committed.created:
            notify.send_workflow_created(ref)
        for event in committed.received:
            notify.send_event_received(event)
        if (run_outcome := committed.run_outcome) is not None:
            notify.send_run_ended(self._claim, run_outcome, lambda: self._lease.now - self._run.state.created_at)
        elif committed.released is not None:
            notify.send_workflow_suspended(self._claim, committed.released, committed.until)
        if committed.due_runs:
            self._env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self._env.send_messages(list(committed.messages))

    # --- the ways to commit ---------------------------------------------------------------------

    def _commit_single_row(self, step_commit: StepCommit) -> Committed:
        self._run.limits.reset_suspension()
        (write,) = step_commit.writes
        find_committed = functools.partial(self._find_single_row, step_commit=step_commit)
        try:
            written = self._store.run_statement(
                functools.partial(
                    step_rows.guard_and_write_step, claim=self._claim, write=write, lease=self._lease.length
                ),
                find_committed=find_committed,
                timeouts=PASS,
            )
        except Superseded:
            # This pass may have superseded itself: the first try timed out, but the database applied it before the
            # second one.
            found = self._store.transact(find_committed)
            if found is None:
                raise
            written = found
        return Committed([written.row], written.pause_requested, writes=step_commit.writes)

    def _commit_retryable(self, step_commit: StepCommit) -> Committed:
        try:
            return self._store.transact(
                functools.partial(self._writer.write, step_commit=step_commit),
                find_committed=functools.partial(self._find_committed, step_commit=step_commit),
                timeouts=None if step_commit.user_writes else PASS,
            )
        except Exception as exc:
            if step_commit.user_writes and self._store.is_rejection(exc):  # a deferred constraint, refused at COMMIT
                raise StepEffectFailed(exc) from exc
            raise

    def _commit_bare_outcome(self, step_commit: StepCommit, run_outcome: RunOutcome) -> Committed:
        is_single_statement = self._writer.is_single_statement(run_outcome)
        return (self._store.run_statement if is_single_statement else self._store.transact)(
            functools.partial(self._writer.write_bare_outcome, run_outcome=run_outcome),
            find_committed=functools.partial(self._find_committed, step_commit=step_commit),
            timeouts=PASS,
        )

    def _commit_with_user_writes(self, step_commit: StepCommit, session: Session | None) -> Committed:
        """Commit with statements of user code, which may take any length of time (LAW 7)."""
        self._lease.enter_user_code(step_commit)
        try:
            if session is None:
                return self._commit_retryable(step_commit)
            return self._commit_session(step_commit, session)
        finally:
            self._lease.exit_user_code(step_commit)

    def _commit_session(self, step_commit: StepCommit, session: Session) -> Committed:
        """Commit in the body's own transaction; raises BodyRerunRequired if the transaction did not happen."""
        write = functools.partial(self._writer.write, step_commit=step_commit, session=session)
        try:
            return self._store.transact_session(session, write)
        except StepEffectFailed:
            raise
        except Exception as exc:
            if self._store.is_commit_in_doubt(exc):
                found = self._store.transact(functools.partial(self._find_committed, step_commit=step_commit))
                if found is not None:
                    return found
            elif self._store.is_rejection(exc):  # a deferred constraint, or an error that the body ignored
                raise StepEffectFailed(exc) from exc
            elif not self._store.is_transient(exc):
                raise
            raise BodyRerunRequired(str(exc)) from exc

    # --- commits in doubt -----------------------------------------------------------------------

    def _find_rows(self, tx: Tx, commit_id: str) -> tuple[bool, Sequence[StepRow]]:
        """Return whether the claim is still held, and the rows of a commit that was in doubt.

        It locks the instance first, and so waits until the database has committed or rolled back the commit.
        """
        is_held = claims.is_held(tx, self._claim)
        return is_held, step_rows.find_commit(tx, self._claim, commit_id=commit_id) if commit_id else ()

    def _find_single_row(self, tx: Tx, step_commit: StepCommit) -> WrittenStep | None:
        committed = self._find_committed(tx, step_commit)
        return None if committed is None else WrittenStep(committed.rows[0], pause_requested=False)

    def _find_committed(self, tx: Tx, step_commit: StepCommit) -> Committed | None:
        """Return what a commit in doubt has done, or None if it was rolled back; raises Superseded."""
        is_held, rows = self._find_rows(tx, step_commit.commit_id)
        has_left = step_commit.ending is not None and not is_held
        run_outcome = step_commit.ending if isinstance(step_commit.ending, RunOutcome) else None
        if rows or (has_left and not step_commit.commit_id):
            # Without rows, another worker may have taken over instead. In both cases this pass is over.
            return Committed(
                rows,
                released=ReleaseOutcome.WAITING if has_left and run_outcome is None else None,
                run_outcome=run_outcome,
                writes=step_commit.writes,
                is_certain=bool(rows),
            )
        if not is_held:
            raise Superseded(str(self._claim.ref))
        return None
