"""Writes one commit of a run in a transaction: the writes of user code, the guard, the rows, the effects, the ending.

The order is the lock order of `docs/design.md`. The transaction may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from celery_durable import notify
from celery_durable.errors import InstanceNotFound, Superseded, TooManyLabels
from celery_durable.model import (
    DueRun,
    OutboxMessage,
    Release,
    ReleaseOutcome,
    RunOutcome,
    Status,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
    parse_topic_event_type,
)
from celery_durable.runner import step_effects
from celery_durable.runner.completion_messages import CompletionMessages, build_child_answer
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.step_commit import Committed, Decision, StepCommit
from celery_durable.runner.step_effects import EncodedEffects, StepEffectFailed, StepEffects
from celery_durable.store.engine import Tx
from celery_durable.store.engine.sessions import StepTransaction
from celery_durable.store.events import answers
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs import attempts, claims, items, outbox, outputs, releases, step_rows, topic_waits
from celery_durable.store.runs.claims import GuardResult


class CommitWriter:
    """Writes the commits of one run. ``remaining_logs``: how many log lines the run may still store."""

    def __init__(self, env: Environment, run: ClaimedRun, published: PublishedValues) -> None:
        settings, claim = env.settings, run.lease.claim
        self._env, self._lease, self._claim, self._limits = env, run.lease, claim, run.limits
        self._published = published
        self._effects = StepEffects(settings, env.runtime, claim)
        self._completion_messages = CompletionMessages(run.definition, claim, settings.limits)
        self._grace = timedelta(seconds=settings.grace_seconds)
        """How long a sweep leaves a message to this process, which publishes it after the commit."""
        self.remaining_logs = settings.max_logs - run.state.log_count
        self._is_start_recorded = run.state.is_start_recorded
        self.may_have_open_maps = any(
            row.type is StepType.MAP and row.status is StepStatus.WAITING for row in run.state.steps
        )
        """Whether the end of the run may have items of maps to cancel."""

    def build_last_messages(self, step_commit: StepCommit) -> list[OutboxMessage]:
        """Build the completion messages of a commit that ends the run, before its transaction locks anything."""
        if not isinstance(step_commit.ending, RunOutcome):
            return []
        return self._completion_messages.build(step_commit.ending)

    def encode_effects(self, step_commit: StepCommit) -> EncodedEffects:
        """Encode the values of a commit's effects, before its transaction; raises StepEffectFailed."""
        try:
            with self._lease.user_code():
                return self._effects.encode(step_commit.instances, step_commit.events, step_commit.emissions)
        except Exception as exc:
            if self._env.stops_process(exc):
                raise
            raise StepEffectFailed(exc) from exc

    def write(
        self,
        tx: Tx,
        step_commit: StepCommit,
        last_messages: Sequence[OutboxMessage],
        effects: EncodedEffects,
        transaction: StepTransaction | None = None,
    ) -> Committed:
        """Write everything: the rows of user code first, then the instances' rows, locked by ascending id.

        With the guard first, this would deadlock with a web transaction that updates an application row and then sends
        an event.
        """
        self._run_user_writes(tx, step_commit, transaction)
        targets = self._find_lock_targets(tx, step_commit)
        _lock_instances(tx, [target for target in targets if target[0] <= self._claim.pk])
        guard_result, decision, rows = self._write_rows(tx, step_commit)
        self._write_failures(tx, guard_result, decision)
        self._merge_labels(tx, step_commit)
        outputs.write_logs(tx, self._claim, guard_result, step_commit.logs, remaining=self.remaining_logs)
        self._published.flush(tx)
        messages = [*step_commit.messages, *decision.messages]
        step_key = decision.writes[0].key if decision.writes else None
        self._insert_messages(tx, messages, step_key=step_key)
        _lock_instances(tx, [target for target in targets if target[0] > self._claim.pk])
        received: list[notify.AcceptedEvent] = []
        created = self._effects.create(tx, effects.instances, by_step=step_key or "")
        due_runs = [*created, *self._effects.send(tx, effects.events, received)]
        self._effects.emit(tx, effects.emissions)
        ending = step_commit.ending(rows) if callable(step_commit.ending) else step_commit.ending
        released, until, run_outcome = None, None, None
        if isinstance(ending, Release):
            released, until = self._release(tx, guard_result, ending)
            due_runs += [DueRun(self._claim.ref, self._claim.queue)] if released is ReleaseOutcome.DUE else []
        elif ending is not None:
            run_outcome = ending
            due_runs += self._end_run(tx, ending, last_messages)
            messages += last_messages
        return Committed(
            rows,
            pause_requested=guard_result.pause_requested,
            released=released,
            until=until,
            run_outcome=run_outcome,
            due_runs=due_runs,
            messages=messages,
            writes=decision.writes,
            failures=decision.failures,
            created=[due.ref for due in created],
            received=received,
        )

    def fits_one_statement(self, step_commit: StepCommit) -> bool:
        """Whether `write_single_row` can write a commit."""
        if step_commit.ending or not step_commit.is_single_row:
            return False
        lines = len(step_commit.logs)
        return not lines or (
            self._env.store.database.can_combine_writes and lines <= min(outputs.MAX_WITH_STEP, self.remaining_logs)
        )

    def changes_instance(self, write: StepWrite) -> bool:
        """Whether the guard of a single row writes to the instance's row: only what has to change (LAW 2)."""
        adds_finished_step = write.replaces is None and write.status is StepStatus.COMPLETED
        return not adds_finished_step or self._claim.crash_count > 0 or self._lease.is_renewal_due

    def write_single_row(self, tx: Tx, step_commit: StepCommit) -> Committed:
        """Write one row, and its log lines: the statement that writes them also checks the claim."""
        self._limits.reset_suspension()
        [write], logs = step_commit.writes, step_commit.logs
        changes_instance = self.changes_instance(write)
        written = step_rows.guard_and_write_step(
            tx,
            self._claim,
            write,
            lease=self._lease.length,
            log_lines=logs,
            changes_instance=changes_instance,
        )
        return Committed([written.row], written.pause_requested, writes=[write], renews_lease=changes_instance)

    def fits_sleep_statement(self, step_commit: StepCommit) -> bool:
        """Whether `write_sleep` can write a commit: the run sleeps, and no limit may wake it earlier."""
        return step_commit.is_sleep and self._env.store.database.can_combine_writes and not self._limits.is_limited

    def write_sleep(self, tx: Tx, step_commit: StepCommit) -> Committed:
        """Suspend the run for a sleep: the statement that writes the row also checks and ends the claim."""
        self._limits.reset_suspension()
        suspended = releases.suspend_for_sleep(tx, self._claim, step_commit.writes[0])
        return Committed(
            [suspended.row], released=suspended.released, until=suspended.row.wake_at, writes=step_commit.writes
        )

    def write_bare_outcome(self, tx: Tx, run_outcome: RunOutcome, last_messages: Sequence[OutboxMessage]) -> Committed:
        """End the run with nothing else to write: the statement that ends it checks the claim by itself.

        It is a single statement on a database that can combine writes, if there is no parent and no message.
        """
        answers.lock_parent(tx, self._claim.parent)
        due_runs = self._end_run(tx, run_outcome, last_messages)
        return Committed(run_outcome=run_outcome, messages=last_messages, due_runs=due_runs)

    # --- locks ----------------------------------------------------------------------------------

    def _find_lock_targets(self, tx: Tx, step_commit: StepCommit) -> list[tuple[int, str, str]]:
        """Find the instances to lock besides the guard's: (database id, workflow, instance id), by ascending id."""
        targets = set(step_effects.find_event_targets(tx, step_commit.events, new_instances=step_commit.instances))
        if isinstance(step_commit.ending, RunOutcome):
            targets.update(answers.find_waiting_parent(tx, self._claim.parent))
            if step_commit.ending.status is Status.TERMINATED:
                # InnoDB locks the index entry by which a statement finds a row, then the row. Other transactions find
                # this row by its instance id, and the guard finds it by its primary key. Locking the id's entry after
                # the guard would deadlock with a transaction that holds the entry and waits for the row.
                targets.add((self._claim.pk, self._claim.ref.workflow, self._claim.ref.instance_id))
        return sorted(targets)

    # --- rows -----------------------------------------------------------------------------------

    def _write_rows(self, tx: Tx, step_commit: StepCommit) -> tuple[GuardResult, Decision, list[StepRow]]:
        with self._env.store.conflict_as_superseded():
            guard_result = claims.guard(
                tx, self._claim, lease=self._lease.length, resets_crash_count=step_commit.resets_crash_count
            )
            decision = Decision(step_commit.writes, failures=step_commit.failures)
            if step_commit.decide is not None:
                decided = step_commit.decide(tx, guard_result)
                failures = [*step_commit.failures, *decided.failures]
                decision = Decision([*step_commit.writes, *decided.writes], decided.messages, failures)
            if decision.writes:
                self._limits.reset_suspension()
            return guard_result, decision, [self._write_row(tx, guard_result, write) for write in decision.writes]

    def _write_row(self, tx: Tx, guard_result: GuardResult, write: StepWrite) -> StepRow:
        """Write a row, and what depends on it: the wait on a topic, the attempt of a task, the items of a map."""
        has_lost_race = write.status is StepStatus.CANCELLED
        if write.type is StepType.TASK and has_lost_race:
            items.delete_task_item(tx, self._claim.pk, self._claim.ref.run_number, write.key)
        elif write.type is StepType.MAP:
            self.may_have_open_maps = True
            if has_lost_race:
                items.cancel_open(tx, self._claim.pk, self._claim.ref.run_number, write.key)
        elif write.type is StepType.WAIT:
            topic = None if write.event_type is None else parse_topic_event_type(write.event_type)
            if has_lost_race or (topic is not None and write.is_finished):
                topic_waits.close_wait(tx, self._claim, key=write.key)
            elif topic is not None:
                topic_waits.open_wait(tx, self._claim, guard_result, key=write.key, topic=topic)
        return step_rows.write_step(tx, self._claim, guard_result, write)

    def _write_failures(self, tx: Tx, guard_result: GuardResult, decision: Decision) -> None:
        if decision.failures:
            writes, claim = [failed.write for failed in decision.failures], self._claim
            attempts.insert(tx, claim.pk, claim.ref.run_number, writes, now=guard_result.now)

    def _merge_labels(self, tx: Tx, step_commit: StepCommit) -> None:
        """Change the labels of the instance. The guard has locked its row."""
        try:
            if step_commit.labels:
                instances.merge_labels(tx, self._claim.pk, step_commit.labels)
        except TooManyLabels as exc:
            raise StepEffectFailed(exc) from exc

    # --- effects --------------------------------------------------------------------------------

    def _run_user_writes(self, tx: Tx, step_commit: StepCommit, transaction: StepTransaction | None) -> None:
        store = self._env.store
        try:
            if transaction is not None:
                transaction.run_writes(step_commit.user_writes)
            elif step_commit.user_writes:
                store.step_transactions.run_writes(tx.conn, step_commit.user_writes)
        except BaseException as exc:
            if store.is_transient(exc) or isinstance(exc, Superseded) or self._env.stops_process(exc):
                raise
            raise StepEffectFailed(exc) from exc

    def _insert_messages(self, tx: Tx, messages: Sequence[OutboxMessage], *, step_key: str | None) -> None:
        pk, run_number = self._claim.pk, self._claim.ref.run_number
        outbox.insert(tx, messages, pk=pk, run_number=run_number, step_key=step_key, grace=self._grace)

    # --- the ending -----------------------------------------------------------------------------

    def _release(self, tx: Tx, guard_result: GuardResult, ending: Release) -> tuple[ReleaseOutcome, datetime | None]:
        if not self._is_start_recorded:
            releases.mark_started(tx, self._claim)
        if not ending.waits:
            return releases.release(tx, self._claim, guard_result, grace=self._grace), None
        waits = [*ending.waits, *self._limits.deadlines(guard_result.now)]
        if any(wait.map_step is not None for wait in ending.waits):
            waits.append(self._limits.next_map_check(guard_result.now))
        until = min(wait.due_at for wait in ending.waits)
        return releases.suspend(tx, self._claim, guard_result, waits, grace=self._grace), until

    def _end_run(self, tx: Tx, run_outcome: RunOutcome, last_messages: Sequence[OutboxMessage]) -> list[DueRun]:
        """End the run, store its completion messages, and answer the parent's step. Returns the runs that became due.

        The caller has locked the parent.
        """
        claim = self._claim
        if run_outcome.status is Status.TERMINATED:
            row = instances.lock(tx, claim.ref.workflow, claim.ref.instance_id)
            lifecycle.terminate(tx, row, reason=run_outcome.reason)
        else:
            releases.end_run(tx, claim, run_outcome)
            if self.may_have_open_maps:
                items.cancel_open_of_run(tx, claim.pk, claim.ref.run_number)
        self._insert_messages(tx, last_messages, step_key=None)
        if claim.parent is None:
            return []
        payload, event_id = build_child_answer(claim.ref, run_outcome), self._env.runtime.new_id()
        return answers.answer_parent(tx, claim.parent, payload=payload, event_id=event_id, grace=self._grace)


def _lock_instances(tx: Tx, targets: Sequence[tuple[int, str, str]]) -> None:
    for _, workflow, instance_id in targets:
        with suppress(InstanceNotFound):  # deleted after it was found; what writes to it finds that, too
            instances.lock(tx, workflow, instance_id)
