"""Commits under one claim, each in the fastest way that is safe.

A commit without the body's session is *retryable*: it is repeated after a deadlock. It is also repeated after a commit
in doubt, such as after a lost connection, if the database shows that the commit did not happen. A commit in the body's
session cannot be repeated: the body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from sqlalchemy.orm import Session

from celery_durable import notify
from celery_durable.errors import Superseded
from celery_durable.model import ReleaseOutcome, RunOutcome
from celery_durable.runner.commit_writer import CommitWriter
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.store import claims, step_rows
from celery_durable.store.engine import Tx
from celery_durable.store.watchdog import PASS


class DatabaseCommitter:
    """The committer that writes to the store."""

    def __init__(self, env: Environment, run: ClaimedRun) -> None:
        self._env, self._store, self._run_created_at = env, env.store, run.state.created_at
        self._lease, self._claim = run.lease, run.lease.claim
        self._published = PublishedValues(env, run.lease)
        self._writer = CommitWriter(env, run, self._published)
        self._transact = functools.partial(env.store.transact, timeouts=PASS)
        self._run_statement = functools.partial(env.store.run_statement, timeouts=PASS)

    def publish(self, key: str, text: str) -> None:
        self._published.publish(key, text)

    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        lease, published = self._lease, self._published
        requested_at = lease.mark_progress()
        session = None if attempt is None else attempt.buffer.session
        has_user_code = session is not None or bool(step_commit.user_writes)
        if has_user_code:  # it may take any length of time (LAW 7)
            lease.enter_user_code(step_commit)
        run, work = self._choose_way(step_commit, session)
        try:
            committed = run(work, find_committed=functools.partial(self._find_committed, step_commit=step_commit))
        except (Superseded, Exception) as error:  # noqa: BLE001  # `_recover` raises it
            committed = self._recover(error, step_commit, session)
        finally:
            if has_user_code:
                lease.exit_user_code(step_commit)
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
            notify.send_run_ended(self._claim, run_outcome, lambda: self._lease.now - self._run_created_at)
        elif committed.released is not None:
            notify.send_workflow_suspended(self._claim, committed.released, committed.until)
        if committed.due_runs:
            self._env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self._env.send_messages(list(committed.messages))

    # --- the ways to commit ---------------------------------------------------------------------

    def _choose_way(
        self, step_commit: StepCommit, session: Session | None
    ) -> tuple[Callable[..., Committed], Callable[[Tx], Committed]]:
        """Return how to run the transaction of a commit, and what to do in it."""
        writer = self._writer
        if session is not None:
            run = functools.partial(self._store.transact_session, session)
            return run, functools.partial(writer.write, step_commit=step_commit, session=session)
        if not self._published.pending:
            if step_commit.is_single_row:
                return self._run_statement, functools.partial(writer.write_single_row, write=step_commit.writes[0])
            if (run_outcome := step_commit.bare_outcome) is not None:
                is_single_statement = writer.is_single_statement(run_outcome)
                run = self._run_statement if is_single_statement else self._transact
                return run, functools.partial(writer.write_bare_outcome, run_outcome=run_outcome)
        run = functools.partial(self._store.transact, timeouts=None) if step_commit.user_writes else self._transact
        return run, functools.partial(writer.write, step_commit=step_commit)

    def _recover(self, error: BaseException, step_commit: StepCommit, session: Session | None) -> Committed:
        """Return what a commit has done although it failed with ``error``; raise the error, or what it means."""
        store = self._store
        if isinstance(error, Superseded) and session is None and step_commit.is_single_row:
            # This pass may have superseded itself: the first try timed out, but the database applied it before the
            # second one.
            found = store.transact(functools.partial(self._find_committed, step_commit=step_commit))
            if found is not None:
                return found
        if isinstance(error, (Superseded, StepEffectFailed)):
            raise error
        is_in_doubt = store.is_commit_in_doubt(error)
        if not is_in_doubt and (session is not None or step_commit.user_writes) and store.is_rejection(error):
            raise StepEffectFailed(error) from error  # a deferred constraint, or an error that the body ignored
        if session is not None and (is_in_doubt or store.is_transient(error)):
            raise BodyRerunRequired(str(error)) from error
        raise error

    # --- commits in doubt -----------------------------------------------------------------------

    def _find_committed(self, tx: Tx, step_commit: StepCommit) -> Committed | None:
        """Return what a commit in doubt has done, or None if it was rolled back; raises Superseded.

        It locks the instance first, and so waits until the database has committed or rolled back the commit.
        """
        is_held = claims.is_held(tx, self._claim)
        rows = step_rows.find_commit(tx, self._claim, commit_id=step_commit.commit_id) if step_commit.commit_id else ()
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
