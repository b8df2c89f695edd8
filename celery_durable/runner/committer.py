"""Commits under one claim, each in the fastest way that is safe.

A commit without the body's transaction is *retryable*: it is repeated after a deadlock. It is also repeated after a
commit in doubt, such as after a lost connection, if the database shows that the commit did not happen. A commit in the
body's transaction cannot be repeated: the body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from celery_durable import notify
from celery_durable.errors import Superseded
from celery_durable.model import OutboxMessage, Release, ReleaseOutcome, RunOutcome, Status, StepWrite
from celery_durable.runner.commit_writer import CommitWriter
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.failure_logs import log_attempts, log_end
from celery_durable.runner.group_commit import GroupCommit
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.store.engine import Tx
from celery_durable.store.engine.sessions import StepTransaction
from celery_durable.store.engine.time_limits import PASS
from celery_durable.store.runs import claims, step_rows
from celery_durable.store.runs.step_groups import GroupedStep


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
        transaction = None if attempt is None else attempt.buffer.transaction
        has_user_code = transaction is not None or bool(step_commit.user_writes)
        if has_user_code:  # it may take any length of time (LAW 7)
            lease.enter_user_code(step_commit)
        try:
            run, work = self._choose_way(step_commit, transaction)
            committed = run(work)
        except (Superseded, Exception) as error:  # noqa: BLE001  # `_recover` raises it
            committed = self._recover(error, step_commit, transaction)
        finally:
            if has_user_code:
                lease.exit_user_code(step_commit)
        if published.flushing:
            published.mark_flushed()
        if committed.renews_lease:
            lease.extend(requested_at=requested_at)
        if transaction is not None and attempt is not None:
            attempt.close_transaction()
        self._writer.remaining_logs -= len(step_commit.logs)
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
        for ref in committed.created:
            notify.send_workflow_created(ref)
        for event in committed.received:
            notify.send_event_received(event)
        if (run_outcome := committed.run_outcome) is not None:
            if run_outcome.status is Status.ERRORED:
                log_end(self._claim.ref, run_outcome, failures)
            notify.send_run_ended(self._claim, run_outcome, lambda: self._lease.now - self._run.state.created_at)
        elif committed.released is not None:
            notify.send_workflow_suspended(self._claim, committed.released, committed.until)
        if committed.due_runs:  # after the signals, so that those of the woken runs are sent later
            self._env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self._env.send_messages(list(committed.messages))

    # --- the ways to commit ---------------------------------------------------------------------

    def _choose_way(
        self, step_commit: StepCommit, transaction: StepTransaction | None
    ) -> tuple[Callable[..., Committed], Callable[[Tx], Committed]]:
        """Return how to run the transaction of a commit, and what to do in it."""
        writer, store = self._writer, self._store
        last_messages = () if step_commit.ending is None else writer.build_last_messages(step_commit)
        if transaction is not None:
            write = self._build_write(step_commit, last_messages, transaction)
            return functools.partial(store.transact_step, transaction), write
        find_committed = functools.partial(self._find_committed, step_commit=step_commit)
        if not self._published.pending:
            run_statement = functools.partial(store.run_statement, find_committed=find_committed, timeouts=PASS)
            if writer.fits_one_statement(step_commit):
                write_row = functools.partial(writer.write_single_row, step_commit=step_commit)
                group_commit, [row] = self._env.group_commit, step_commit.writes
                if group_commit is None or step_commit.logs or writer.changes_instance(row):
                    return run_statement, write_row
                return functools.partial(self._commit_in_group, group_commit, row, run_statement), write_row
            if writer.fits_sleep_statement(step_commit):
                return run_statement, functools.partial(writer.write_sleep, step_commit=step_commit)
            if (run_outcome := step_commit.bare_outcome) is not None:
                end = functools.partial(writer.write_bare_outcome, run_outcome=run_outcome, last_messages=last_messages)
                if not last_messages and self._claim.parent is None and not writer.may_have_open_maps:
                    return run_statement, end
                return functools.partial(store.transact, find_committed=find_committed, timeouts=PASS), end
        write = self._build_write(step_commit, last_messages)
        if step_commit.user_writes:
            return functools.partial(store.transact_user_writes, find_committed=find_committed), write
        return functools.partial(store.transact, find_committed=find_committed, timeouts=PASS), write

    def _build_write(
        self,
        step_commit: StepCommit,
        last_messages: Sequence[OutboxMessage],
        transaction: StepTransaction | None = None,
    ) -> Callable[[Tx], Committed]:
        return functools.partial(
            self._writer.write,
            step_commit=step_commit,
            last_messages=last_messages,
            effects=self._writer.encode_effects(step_commit),
            transaction=transaction,
        )

    def _commit_in_group(
        self,
        group_commit: GroupCommit,
        write: StepWrite,
        run_statement: Callable[..., Committed],
        work: Callable[[Tx], Committed],
    ) -> Committed:
        """Commit a finished step together with those of other passes of this process."""
        result = group_commit.commit(GroupedStep(self._claim, write), lambda: run_statement(work))
        if isinstance(result, Committed):
            return result
        self._run.limits.reset_suspension()
        return Committed([result.row], result.pause_requested, writes=[write], renews_lease=False)

    def _recover(self, error: BaseException, step_commit: StepCommit, transaction: StepTransaction | None) -> Committed:
        """Return what a commit has done although it failed with ``error``. Otherwise raise the error that it means."""
        store, find_committed = self._store, functools.partial(self._find_committed, step_commit=step_commit)
        is_in_doubt = transaction is not None and store.is_commit_in_doubt(error)
        # A single statement may have superseded this pass itself: the first try timed out, but the database applied it
        # before the second one.
        is_statement = step_commit.is_sleep or (step_commit.is_single_row and not step_commit.ending)
        if is_in_doubt or (isinstance(error, Superseded) and transaction is None and is_statement):
            found = store.transact(find_committed)
            if found is not None:
                return found
        if isinstance(error, (Superseded, StepEffectFailed)):
            raise error
        if is_in_doubt or (transaction is not None and store.is_transient(error)):
            raise BodyRerunRequired(str(error)) from error
        if (transaction is not None or step_commit.user_writes) and store.is_rejection(error):
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
                failures=step_commit.failures,
                is_certain=bool(rows) and not is_due,
                renews_lease=False,
            )
        if not is_held:
            raise Superseded(str(self._claim.ref))
        return None
