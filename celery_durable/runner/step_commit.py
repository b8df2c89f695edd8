"""Step commits: the writes of user code, the guard and the engine's rows in one transaction (LAW 3 of docs/design.md).

A commit without the body's session is *retryable*: it is repeated after a deadlock. It is also repeated after a commit
in doubt, such as after a lost connection, if the database shows that the commit did not happen. A commit in the body's
session cannot be repeated: the body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from celery_durable import notify, values
from celery_durable.config import Settings
from celery_durable.errors import (
    StepCommitConflict,
    Superseded,
    TooManyLabels,
)
from celery_durable.model import (
    Claim,
    DueRun,
    LogLine,
    OpenWait,
    OutboxMessage,
    ReleaseOutcome,
    RunOutcome,
    RunRef,
    Status,
    StepRow,
    StepStatus,
    StepType,
)
from celery_durable.runner import step_effects
from celery_durable.runner.completion_messages import CompletionMessages, build_child_answer
from celery_durable.runner.lease import Lease
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.run_limits import RunLimits
from celery_durable.runner.step_effects import StepEffectFailed, StepEffects
from celery_durable.step import NewEmission, NewEvent, NewInstance
from celery_durable.store import (
    answers,
    claims,
    instances,
    items,
    labels,
    lifecycle,
    outbox,
    releases,
    run_events,
    run_logs,
    step_rows,
    topic_waits,
)
from celery_durable.store.claims import GuardResult
from celery_durable.store.engine import Store, Tx
from celery_durable.store.step_rows import StepWrite
from celery_durable.store.watchdog import PASS


class BodyRerunRequired(Exception):
    """The database lost the body's transaction, for example by a deadlock. The body has to run again."""


@dataclass(slots=True)
class StepCommit:
    """The content of one commit.

    ``writes``: the rows to write, at least one. ``decide``: called after the guard has locked the instance; returns the
    writes to use instead, with the same key and commit id. An empty list leaves the row unchanged.

    ``waits_after_commit``: returns the waits for which the commit suspends the instance; with none the pass continues.
    ``run_outcome``: the commit ends the run with it.
    """

    writes: list[StepWrite]
    logs: list[LogLine] = field(default_factory=list)
    user_writes: Sequence[Callable[[Session], object]] = ()
    instances: Sequence[NewInstance] = ()
    events: Sequence[NewEvent] = ()
    emissions: Sequence[NewEmission] = ()
    messages: Sequence[OutboxMessage] = ()
    labels: Mapping[str, str | None] = field(default_factory=dict)
    decide: Callable[[Tx, GuardResult], list[StepWrite]] | None = None
    waits_after_commit: Callable[[list[StepRow]], list[OpenWait]] | None = None
    run_outcome: RunOutcome | None = None

    @property
    def resets_crash_count(self) -> bool:
        """Whether the commit advances the run, which shows that its crashes are over."""
        return any(write.resets_crash_count for write in self.writes)

    @property
    def is_single_write(self) -> bool:
        """Whether the commit is one row and nothing else, so that one statement can write it."""
        return (
            len(self.writes) == 1
            and not (self.logs or self.user_writes or self.instances or self.events or self.emissions or self.messages)
            and self.waits_after_commit is None
            and self.decide is None
            and self.run_outcome is None
            and not self.labels
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did. ``rows``: as recorded, in the order of the writes.

    ``released``: the state of the instance if the commit released it. ``until``: when its earliest wait is due.
    ``writes``, ``created`` and ``received``: the rows, instances and events for which `notify` sends signals.
    """

    rows: list[StepRow]
    pause_requested: bool = False
    released: ReleaseOutcome | None = None
    until: datetime | None = None
    due_runs: tuple[DueRun, ...] = ()
    messages: tuple[OutboxMessage, ...] = ()
    writes: Sequence[StepWrite] = ()
    created: Sequence[RunRef] = ()
    received: Sequence[notify.AcceptedEvent] = ()

    def notify(self, claim: Claim) -> None:
        """Send the signals of this commit. Call it before waking other runs, so that their signals are sent later."""
        notify.send_steps_recorded(claim, self.writes)
        for ref in self.created:
            notify.send_workflow_created(ref)
        for event in self.received:
            notify.send_event_received(event)


@dataclass(frozen=True, slots=True)
class _EndResult:
    """The run has ended. ``due_runs`` became due. If not ``is_certain``, another worker may have ended the run."""

    due_runs: list[DueRun] = field(default_factory=list)
    is_certain: bool = True


class Committer:
    """Commits the steps and the end of one run, under one claim."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        lease: Lease,
        run_limits: RunLimits,
        published: PublishedValues,
        *,
        is_start_recorded: bool,
        remaining_logs: int,
        run_created_at: datetime,
        stops_process: Callable[[BaseException], bool],
        completion_messages: CompletionMessages,
        send_messages: Callable[[list[OutboxMessage]], None],
        publish_runs: Callable[[list[DueRun]], None],
    ) -> None:
        self._store, self._settings, self._lease, self._run_limits = store, settings, lease, run_limits
        self.published = published
        self._run_created_at, self._completion_messages, self._send_messages, self._publish_runs = (
            run_created_at,
            completion_messages,
            send_messages,
            publish_runs,
        )
        self._stops_process = stops_process
        self._is_start_recorded, self._remaining_logs = is_start_recorded, remaining_logs
        self._grace = timedelta(seconds=settings.grace_seconds)
        """How long a sweep leaves a message to this process, which publishes it after the commit."""
        self._effects = StepEffects(settings, store.runtime, lease.claim)

    @property
    def claim(self) -> Claim:
        return self._lease.claim

    # --- step commits ---------------------------------------------------------------------------

    def commit(self, step_commit: StepCommit, *, session: Session | None = None) -> Committed:
        """Run one commit. Raises Superseded, StepEffectFailed and, with a session, BodyRerunRequired.

        ``session``: the session that the body used, whose transaction becomes this commit.
        """
        requested_at = self._lease.mark_progress()
        self._run_limits.reset_suspension()
        if session is not None or step_commit.user_writes:
            committed = self._commit_with_user_writes(step_commit, session)
        elif step_commit.is_single_write and not self.published.has_pending:
            committed = self._commit_single(step_commit)
        else:
            committed = self._commit_retryable(step_commit)
        self._remaining_logs -= len(step_commit.logs)
        self.published.mark_flushed()
        self._lease.extend(requested_at=requested_at)
        if committed.released is not None:
            self._is_start_recorded = True
        return committed

    def _commit_with_user_writes(self, step_commit: StepCommit, session: Session | None) -> Committed:
        """Commit with statements of user code, which may take any length of time (LAW 7)."""
        self._lease.enter_user_code(step_commit.writes[0].commit_id)
        try:
            if session is None:
                return self._commit_retryable(step_commit)
            return self._commit_session(step_commit, session)
        finally:
            self._lease.exit_user_code(step_commit.writes[0].commit_id)

    def _commit_single(self, step_commit: StepCommit) -> Committed:
        def work(tx: Tx) -> Committed:
            with self._store.conflict_as_superseded():
                written = step_rows.guard_and_write_step(
                    tx, self.claim, step_commit.writes[0], lease=self._lease.length
                )
            return Committed([written.row], pause_requested=written.pause_requested, writes=step_commit.writes)

        find_committed = self._build_find_committed(step_commit)
        try:
            return self._store.transact(work, find_committed=find_committed, is_single_statement=True, timeouts=PASS)
        except Superseded:
            # This pass may have superseded itself: the first try timed out, but the database applied it before the
            # second one.
            found = self._store.transact(find_committed)
            if found is None:
                raise
            return found

    def _write_in_lock_order(self, tx: Tx, step_commit: StepCommit, session: Session | None) -> Committed:
        """Write everything: the rows of user code first, then the instances' rows, locked by ascending id.

        With the guard first, this would deadlock with a web transaction that updates an application row and then sends
        an event.
        """
        self._run_user_writes(tx, step_commit, session)
        event_targets = step_effects.find_event_targets(tx, step_commit.events, new_instances=step_commit.instances)
        if step_commit.run_outcome is not None:
            event_targets = sorted({*event_targets, *answers.find_waiting_parent(tx, self.claim.parent)})
        # Lock order: rows with a lower id before the guard, which locks this instance, and the others after it.
        for pk, workflow, instance_id in event_targets:
            if pk <= self.claim.pk:  # includes this instance, because the guard uses another index (see `terminate`)
                instances.lock(tx, workflow, instance_id)
        with self._store.conflict_as_superseded():
            guard_result = claims.guard(
                tx, self.claim, lease=self._lease.length, resets_crash_count=step_commit.resets_crash_count
            )
            writes = step_commit.writes if step_commit.decide is None else step_commit.decide(tx, guard_result)
            rows = [self._write_row(tx, guard_result, write) for write in writes]
        self._merge_labels(tx, step_commit)
        run_logs.write_logs(tx, self.claim, guard_result, step_commit.logs, remaining=self._remaining_logs)
        self.published.flush(tx)
        outbox.insert(
            tx,
            step_commit.messages,
            pk=self.claim.pk,
            run_number=self.claim.ref.run_number,
            step_key=step_commit.writes[0].key,
            grace=self._grace,
        )
        for pk, workflow, instance_id in event_targets:
            if pk > self.claim.pk:
                instances.lock(tx, workflow, instance_id)
        received: list[notify.AcceptedEvent] = []
        created = self._effects.create(tx, step_commit.instances, by_step=step_commit.writes[0].key)
        due_runs = [*created, *self._effects.send(tx, step_commit.events, received)]
        self._effects.emit(tx, step_commit.emissions)
        released, until = None, None
        if step_commit.waits_after_commit is not None and (waits := step_commit.waits_after_commit(rows)):
            until = min(wait.due_at for wait in waits)
            released = self._suspend(tx, guard_result, waits)
        messages = tuple(step_commit.messages)
        if step_commit.run_outcome is not None:
            releases.end_run(tx, self.claim, step_commit.run_outcome)
            messages += self._insert_messages(tx, self._completion_messages.build(step_commit.run_outcome))
            due_runs += self._answer_parent(tx, step_commit.run_outcome)
        if released is ReleaseOutcome.DUE:
            due_runs.append(DueRun(self.claim.ref, self.claim.queue))
        return Committed(
            rows,
            guard_result.pause_requested,
            released,
            until,
            tuple(due_runs),
            messages,
            writes=writes,
            created=[due.ref for due in created],
            received=received,
        )

    def _write_row(self, tx: Tx, guard_result: GuardResult, write: StepWrite) -> StepRow:
        if write.status is StepStatus.CANCELLED:  # it lost a race
            if write.type is StepType.WAIT:
                topic_waits.close_wait(tx, self.claim, key=write.key)
            elif write.type is StepType.TASK:
                items.delete_task_item(tx, self.claim.pk, self.claim.ref.run_number, write.key)
        return step_rows.write_step(tx, self.claim, guard_result, write)

    def _merge_labels(self, tx: Tx, step_commit: StepCommit) -> None:
        """Change the labels of the instance. The guard has locked its row."""
        try:
            if step_commit.labels:
                labels.merge(tx, self.claim.pk, step_commit.labels)
        except TooManyLabels as exc:
            raise StepEffectFailed(exc) from exc

    def _run_user_writes(self, tx: Tx, step_commit: StepCommit, session: Session | None) -> None:
        try:
            if session is not None:
                session.flush()
            if step_commit.user_writes:
                self._store.run_user_writes(tx, step_commit.user_writes, session)
        except BaseException as exc:
            if self._store.is_transient(exc) or isinstance(exc, Superseded) or self._stops_process(exc):
                raise
            raise self._convert_to_effect_failure(step_commit, exc) from exc

    def _convert_to_effect_failure(self, step_commit: StepCommit, exc: BaseException) -> StepEffectFailed:
        if self._store.is_unique_violation(exc):
            return StepEffectFailed(
                StepCommitConflict(step_commit.writes[0].name, values.sanitize_text(values.get_error_text(exc), 500))
            )
        return StepEffectFailed(exc)

    def _commit_retryable(self, step_commit: StepCommit) -> Committed:
        try:
            return self._store.transact(
                lambda tx: self._write_in_lock_order(tx, step_commit, None),
                find_committed=self._build_find_committed(step_commit),
                timeouts=None if step_commit.user_writes else PASS,
            )
        except Exception as exc:
            if step_commit.user_writes and self._store.is_rejection(exc):  # a deferred constraint, refused at COMMIT
                raise self._convert_to_effect_failure(step_commit, exc) from exc
            raise

    def _commit_session(self, step_commit: StepCommit, session: Session) -> Committed:
        """Commit in the body's own transaction; raises BodyRerunRequired if the transaction did not happen."""
        find_committed = self._build_find_committed(step_commit)
        try:
            return self._store.transact_session(session, lambda tx: self._write_in_lock_order(tx, step_commit, session))
        except StepEffectFailed:
            raise
        except Exception as exc:
            if self._store.is_commit_in_doubt(exc):
                found = self._store.transact(find_committed)
                if found is not None:
                    return found
            elif self._store.is_rejection(exc):  # a deferred constraint, or an error that the body ignored
                raise self._convert_to_effect_failure(step_commit, exc) from exc
            elif not self._store.is_transient(exc):
                raise
            raise BodyRerunRequired(str(exc)) from exc

    def _build_find_committed(self, step_commit: StepCommit) -> Callable[[Tx], Committed | None]:
        """Build the check that runs after a commit in doubt. It looks for the rows with this commit's ids.

        It locks the instance first, and so waits until the database has committed or rolled back the commit in doubt.
        """

        def find_committed(tx: Tx) -> Committed | None:
            is_held = claims.is_held(tx, self.claim)
            rows = [
                step_rows.find_commit(tx, self.claim, key=write.key, commit_id=write.commit_id)
                for write in step_commit.writes
            ]
            found = [row for row in rows if row is not None]
            if len(found) == len(step_commit.writes):
                is_released = step_commit.waits_after_commit is not None and not (
                    is_held and step_commit.decide is not None
                )
                return Committed(
                    found, released=ReleaseOutcome.WAITING if is_released else None, writes=step_commit.writes
                )
            if not is_held:
                raise Superseded(str(self.claim.ref))
            return None

        return find_committed

    # --- waits ----------------------------------------------------------------------------------

    def commit_wait(
        self,
        *,
        event_type: str,
        topic: str | None,
        deadline: Callable[[GuardResult], datetime],
        write: Callable[[GuardResult, run_events.StoredEvent | None], list[StepWrite]],
        logs: list[LogLine],
        key: str,
        commit_id: str,
        suspends: bool,
        message_id_to_cancel: str | None = None,
    ) -> Committed:
        """Look for the event of a wait under the lock, and record the result, in one transaction.

        Args:
            deadline: Returns the deadline of the wait.
            write: Returns the rows to write for the event, or for the passed deadline if the event is None. An empty
                list leaves the wait unchanged.
            topic: The topic that the step waits on, if it waits on one.
            suspends: The pass waits for nothing else. If the wait is not over, this commit suspends the instance.
            message_id_to_cancel: An outbox message to delete if the deadline has passed.
        """

        def work(tx: Tx) -> Committed:
            with self._store.conflict_as_superseded():
                guard_result = claims.guard(tx, self.claim, lease=self._lease.length)
                until = deadline(guard_result)
                event = run_events.find_oldest_event(tx, self.claim, event_type, deadline=until)
                writes = write(guard_result, event)
                if writes:
                    self._run_limits.reset_suspension()
                if event is not None:
                    run_events.consume(tx, self.claim, guard_result, event, key=key)
                rows = [self._write_row(tx, guard_result, each) for each in writes]
                if message_id_to_cancel is not None and event is None and until <= guard_result.now:
                    outbox.delete(tx, [message_id_to_cancel])
                    items.delete_task_item(tx, self.claim.pk, self.claim.ref.run_number, key)
                if topic is not None and writes and not writes[0].is_finished:
                    topic_waits.open_wait(tx, self.claim, guard_result, key=key, topic=topic)
                elif topic is not None and writes:
                    topic_waits.close_wait(tx, self.claim, key=key)
            run_logs.write_logs(tx, self.claim, guard_result, logs, remaining=self._remaining_logs)
            self.published.flush(tx)
            is_open = not writes or not writes[0].is_finished
            released = None
            if (
                suspends
            ):  # if the wait ended after the unlocked check, the instance is due now, and the next pass continues
                waits = [OpenWait(until, event_type)]
                if rows:
                    until = rows[0].next_retry_at or until
                    waits = [OpenWait(until, rows[0].wait_event_type)]
                released = self._suspend(tx, guard_result, waits if is_open else [])
            due_runs = (DueRun(self.claim.ref, self.claim.queue),) if released is ReleaseOutcome.DUE else ()
            return Committed(rows, guard_result.pause_requested, released, until, due_runs, writes=writes)

        def find_committed(tx: Tx) -> Committed | None:
            is_held = claims.is_held(tx, self.claim)
            row = step_rows.find_commit(tx, self.claim, key=key, commit_id=commit_id)
            if row is not None:
                until = row.next_retry_at or row.wake_at
                return Committed([row], released=None if is_held else ReleaseOutcome.WAITING, until=until)
            if not is_held:
                raise Superseded(str(self.claim.ref))
            return None

        requested_at = self._lease.mark_progress()
        committed = self._store.transact(work, find_committed=find_committed, timeouts=PASS)
        self._remaining_logs -= len(logs)
        self.published.mark_flushed()
        self._lease.extend(requested_at=requested_at)
        return committed

    # --- the end of a pass ----------------------------------------------------------------------

    def _suspend(self, tx: Tx, guard_result: GuardResult, waits: list[OpenWait]) -> ReleaseOutcome:
        if not self._is_start_recorded:
            releases.mark_started(tx, self.claim)
        if not waits:
            return releases.release(tx, self.claim, guard_result, grace=self._grace)
        waits = [*waits, *self._run_limits.deadlines(guard_result.now)]
        return releases.suspend(tx, self.claim, guard_result, waits, grace=self._grace)

    def release(
        self,
        logs: list[LogLine],
        waits: list[OpenWait],
        writes: Sequence[StepWrite] = (),
        *,
        resets_crash_count: bool | None = None,
    ) -> ReleaseOutcome:
        """Release the instance: suspended until one of ``waits``, or due at once if there are none.

        ``resets_crash_count``: whether the pass made progress, by default True if there are ``waits``.
        """
        must_reset = bool(waits) if resets_crash_count is None else resets_crash_count

        def work(tx: Tx) -> ReleaseOutcome:
            guard_result = claims.guard(tx, self.claim, lease=self._lease.length, resets_crash_count=must_reset)
            for write in writes:
                step_rows.write_step(tx, self.claim, guard_result, write)
            run_logs.write_logs(tx, self.claim, guard_result, logs, remaining=self._remaining_logs)
            self.published.flush(tx)
            return self._suspend(tx, guard_result, waits)

        is_certain = True

        def find_committed(tx: Tx) -> ReleaseOutcome | None:
            nonlocal is_certain
            is_certain = claims.is_held(tx, self.claim)
            # If the claim is gone after a commit in doubt, this pass released it or another worker took over. In both
            # cases this pass is over.
            return None if is_certain else ReleaseOutcome.WAITING

        released = self._store.transact(work, find_committed=find_committed, timeouts=PASS)
        if is_certain:
            notify.send_workflow_suspended(self.claim, released, min((wait.due_at for wait in waits), default=None))
        return released

    def terminate(self, reason: str) -> None:
        """Terminate the run because it exceeded one of its limits."""
        run_outcome = RunOutcome(Status.TERMINATED)
        messages = self._completion_messages.build(run_outcome, reason=reason)

        def work(tx: Tx) -> _EndResult:
            answers.lock_parent(tx, self.claim.parent)
            # Lock order: InnoDB locks the index entry by which a statement finds a row, then the row. Other
            # transactions find this row by its instance id, and the guard finds it by its primary key. Locking the
            # id's entry after the guard would deadlock with a transaction that holds the entry and waits for the row.
            row = instances.lock(tx, self.claim.ref.workflow, self.claim.ref.instance_id)
            claims.guard(tx, self.claim, lease=self._lease.length)
            lifecycle.terminate(tx, row, reason=reason)
            self._insert_messages(tx, messages)
            return _EndResult(self._answer_parent(tx, run_outcome, reason=reason))

        self._commit_end(work, messages, lambda: notify.send_workflow_terminated(self.claim.ref, reason=reason))

    def end_run(self, run_outcome: RunOutcome, logs: list[LogLine]) -> None:
        """End the run with ``run_outcome``, and send its completion messages."""
        messages = self._completion_messages.build(run_outcome)
        needs_guard = bool(logs or self.published.has_pending)  # otherwise `releases.end_run` checks the token

        def work(tx: Tx) -> _EndResult:
            answers.lock_parent(tx, self.claim.parent)
            if needs_guard:
                guard_result = claims.guard(tx, self.claim, lease=self._lease.length)
                run_logs.write_logs(tx, self.claim, guard_result, logs, remaining=self._remaining_logs)
                self.published.flush(tx)
            releases.end_run(tx, self.claim, run_outcome)
            self._insert_messages(tx, messages)
            return _EndResult(self._answer_parent(tx, run_outcome))

        is_single_statement = not needs_guard and not messages and self.claim.parent is None
        notify_end = functools.partial(
            notify.send_run_ended, self.claim, run_outcome, lambda: self._lease.now - self._run_created_at
        )
        self._commit_end(work, messages, notify_end, is_single_statement=is_single_statement)

    def _commit_end(
        self,
        work: Callable[[Tx], _EndResult],
        messages: list[OutboxMessage],
        on_committed: Callable[[], None],
        *,
        is_single_statement: bool = False,
    ) -> None:
        """Commit the end of the run. Then send its signal, unless another worker may have ended the run."""
        ended = self._store.transact(
            work, find_committed=self._find_end, is_single_statement=is_single_statement, timeouts=PASS
        )
        if not ended.is_certain:  # a sweep finds the messages to send and the runs to wake
            return
        on_committed()
        if messages:
            self._send_messages(messages)
        if ended.due_runs:
            self._publish_runs(ended.due_runs)

    def _answer_parent(self, tx: Tx, run_outcome: RunOutcome, *, reason: str | None = None) -> list[DueRun]:
        """Answer the parent's step, in the transaction that ends this child.

        Lock order: the caller has locked the parent's row before the guard locked this instance.
        """
        if self.claim.parent is None:
            return []
        payload = build_child_answer(self.claim.ref, run_outcome, reason=reason)
        event_id = self._store.runtime.new_id()
        return answers.answer_parent(tx, self.claim.parent, payload=payload, event_id=event_id, grace=self._grace)

    def _insert_messages(self, tx: Tx, messages: list[OutboxMessage]) -> tuple[OutboxMessage, ...]:
        """Insert the completion messages into the outbox."""
        outbox.insert(
            tx, messages, pk=self.claim.pk, run_number=self.claim.ref.run_number, step_key=None, grace=self._grace
        )
        return tuple(messages)

    def _find_end(self, tx: Tx) -> _EndResult | None:
        """Check after a commit in doubt. If the claim is gone, this pass ended the run or another worker took over."""
        return None if claims.is_held(tx, self.claim) else _EndResult(is_certain=False)
