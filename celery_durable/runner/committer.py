"""Commits under one claim, each in the fastest way that is safe.

A commit without the body's session is *retryable*: it is repeated after a deadlock. It is also repeated after a commit
in doubt, such as after a lost connection, if the database shows that the commit did not happen. A commit in the body's
session cannot be repeated: the body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_durable import notify
from celery_durable.errors import Superseded
from celery_durable.model import Release, ReleaseOutcome, RunOutcome
from celery_durable.runner.commit_writer import CommitWriter
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.store import claims, step_rows
from celery_durable.store.engine import Tx
from celery_durable.store.watchdog import PASS

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session


class DatabaseCommitter:
    """The committer that writes to the store."""

    def __init__(self, env: Environment, run: ClaimedRun) -> None:
        self._env, self._store, self._run_created_at = env, env.store, run.state.created_at
        self._lease, self._claim = run.lease, run.lease.claim
        self._published = PublishedValues(env, run.lease)
        self._writer = CommitWriter(env, run, self._published)

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
            committed = run(work)
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
        return committed

    def announce(self, committed: Committed) -> None:
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
        if committed.due_runs:  # after the signals, so that those of the woken runs are sent later
            self._env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self._env.send_messages(list(committed.messages))

    # --- the ways to commit ---------------------------------------------------------------------

    def _choose_way(
        self, step_commit: StepCommit, session: Session | None
    ) -> tuple[Callable[..., Committed], Callable[[Tx], Committed]]:
        """Return how to run the transaction of a commit, and what to do in it."""
        writer, store = self._writer, self._store
        last_messages = () if step_commit.ending is None else writer.build_last_messages(step_commit)
        if session is not None:
            write = functools.partial(
                writer.write, step_commit=step_commit, last_messages=last_messages, session=session
            )
            return functools.partial(store.transact_session, session), write
        find_committed = functools.partial(self._find_committed, step_commit=step_commit)
        if not self._published.pending:
            run_statement = functools.partial(store.run_statement, find_committed=find_committed, timeouts=PASS)
            if step_commit.is_single_row:
                return run_statement, functools.partial(writer.write_single_row, write=step_commit.writes[0])
            if (run_outcome := step_commit.bare_outcome) is not None:
                end = functools.partial(writer.write_bare_outcome, run_outcome=run_outcome, last_messages=last_messages)
                if not last_messages and self._claim.parent is None:
                    return run_statement, end
                return functools.partial(store.transact, find_committed=find_committed, timeouts=PASS), end
        timeouts = None if step_commit.user_writes else PASS
        run = functools.partial(store.transact, find_committed=find_committed, timeouts=timeouts)
        return run, functools.partial(writer.write, step_commit=step_commit, last_messages=last_messages)

    def _recover(self, error: BaseException, step_commit: StepCommit, session: Session | None) -> Committed:
        """Return what a commit has done although it failed with ``error``. Otherwise raise the error that it means."""
        store, find_committed = self._store, functools.partial(self._find_committed, step_commit=step_commit)
        is_in_doubt = session is not None and store.is_commit_in_doubt(error)
        # A single row may have superseded this pass itself: the first try timed out, but the database applied it before
        # the second one.
        if is_in_doubt or (isinstance(error, Superseded) and session is None and step_commit.is_single_row):
            found = store.transact(find_committed)
            if found is not None:
                return found
        if isinstance(error, (Superseded, StepEffectFailed)):
            raise error
        if is_in_doubt or (session is not None and store.is_transient(error)):
            raise BodyRerunRequired(str(error)) from error
        if (session is not None or step_commit.user_writes) and store.is_rejection(error):
            raise StepEffectFailed(error) from error  # a deferred constraint, or an error that the body ignored
        raise error

    # --- commits in doubt -----------------------------------------------------------------------

    def _find_committed(self, tx: Tx, step_commit: StepCommit) -> Committed | None:
        """Return what a commit in doubt has done, or None if it was rolled back; raises Superseded.

        It locks the instance first, and so waits until the database has committed or rolled back the commit.
        """
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
                is_certain=bool(rows) and not is_due,
            )
        if not is_held:
            raise Superseded(str(self._claim.ref))
        return None
