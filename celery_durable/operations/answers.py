"""Accepting the answers of Celery tasks, for `step.task` and `step.map`; the last one wakes the workflow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from celery_durable import notify, values
from celery_durable.errors import InstanceNotFound
from celery_durable.model import (
    AnswerResult,
    DueRun,
    ItemRef,
    OutboxMessage,
    RunRef,
    TaskReference,
    is_task_event_type,
)
from celery_durable.operations.context import OperationContext
from celery_durable.store import lost_tasks
from celery_durable.store.engine import Tx
from celery_durable.store.engine.server_info import find_database_id
from celery_durable.store.engine.time_limits import DIRECT, ORDINARY, TimeBudget, Timeouts
from celery_durable.store.events import answers
from celery_durable.store.events.answers import AnswerOutcome, TaskFailure
from celery_durable.store.instances.item_senders import TASKS
from celery_durable.store.lost_tasks import GiveUp

LostDelivery = tuple[TaskReference, datetime | None]
"""A lost delivery, and by when its message had been sent; None if the reporter saw the task die."""


@dataclass(frozen=True, slots=True)
class TaskException:
    """The exception of a Celery task, in the process that ran the task. ``node``: the name of its worker."""

    error: BaseException
    node: str
    pid: int


class AnswerOperations:
    """The operations by which steps get the answers of their Celery tasks."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def find_database_id(self) -> str | None:
        """Return the random id of the database, which references in task messages contain; None if it has none."""
        store = self._context.store
        return store.database_id or store.read(find_database_id, timeouts=DIRECT)

    def is_superfluous(self, reference: TaskReference, *, may_be_copy: bool) -> bool:
        """Return whether no step will take the answer of a task.

        Its run was terminated, or another run has replaced it, or a cancel has ended its step. If its message
        ``may_be_copy``, also whether no step waits for it any more. Other tasks are not asked that: a server of a
        cluster may lack the commit that sent the task.
        """

        def work(tx: Tx) -> bool:
            if may_be_copy:
                return lost_tasks.find_awaiting_step(tx, reference) is None
            return lost_tasks.is_abandoned(tx, reference)

        return self._context.store.read(work, timeouts=DIRECT)

    def accept(
        self,
        reference: TaskReference,
        payload: str,
        *,
        is_direct: bool = False,
        exception: TaskException | None = None,
    ) -> AnswerResult:
        """Accept the answer of a Celery task for the step or map item that waits for it, once.

        ``payload``: of `values.encode_answer`. ``is_direct``: the caller is the process of the task, which waits for 2
        s in all. ``exception``: what the task raised in this process.
        """
        context, ref, event_type = self._context, reference.ref, reference.event_type
        event_id, item = context.runtime.new_id(), ItemRef.read(event_type)
        if item is None and not is_task_event_type(event_type):
            return AnswerResult.NOT_AWAITED
        timeouts = DIRECT if is_direct else ORDINARY
        if item is not None and self._record_result(reference, item, payload, timeouts):
            return AnswerResult.TAKEN
        failure = self._describe_failure(reference, payload, exception, timeouts)
        sender = TASKS if context.settings.is_execution_enabled else None

        def work(tx: Tx) -> AnswerOutcome:
            try:
                row = context.lock_row(tx, ref.workflow, ref.instance_id)
            except InstanceNotFound:
                return AnswerOutcome(AnswerResult.NOT_AWAITED)
            if row.run_number != ref.run_number:
                return AnswerOutcome(AnswerResult.NOT_AWAITED)
            return answers.accept_answer(
                tx,
                row,
                reference,
                payload=payload,
                event_id=event_id,
                grace=context.grace,
                failure=failure,
                sender=sender,
            )

        accepted = context.store.transact(work, timeouts=timeouts)

        def notify_and_wake() -> None:
            context.publish_runs(accepted.due_runs)
            if accepted.work.messages:
                context.send_messages(accepted.work.messages)
            if accepted.result is AnswerResult.FORGED:
                notify.send_answer_refused(ref)

        context.after_commit(notify_and_wake)
        return accepted.result

    def _describe_failure(
        self, reference: TaskReference, payload: str, exception: TaskException | None, timeouts: Timeouts
    ) -> TaskFailure | None:
        """Describe the error of a failed task as its attempt stores it; None if the task has not failed.

        This calls the application's redaction, so it comes before the transaction that locks the instance. Only an
        answer in the process of the task has a traceback: a worker that sends one may lack the redaction of errors.
        """
        error = values.read_answer_error(payload)
        if error is None:
            return None
        context, ref = self._context, reference.ref
        step = context.store.read(lambda tx: lost_tasks.find_awaiting_step(tx, reference), timeouts=timeouts)
        redaction = context.make_redaction(ref.workflow, ref.instance_id)
        text = redaction.clean_error(error.name, error.message, step)
        if exception is None:
            return TaskFailure(*text)
        trace = redaction.clean_trace(exception.error, context.settings.tracebacks, step)
        return TaskFailure(*text, trace, exception.node, exception.pid)

    def _record_result(self, reference: TaskReference, item: ItemRef, payload: str, timeouts: Timeouts) -> bool:
        """Record the result of a map item without the instance's lock; returns False if `accept` must take the lock.

        Whether the map needs a pass is checked after the commit: of two results at the same time, neither transaction
        sees the other one, but the later check sees both. The wake-up is a transaction of its own, since a pass locks
        the instance first and its items then.
        """
        if values.read_answer_error(payload) is not None:
            return False
        context, store = self._context, self._context.store
        budget = TimeBudget(timeouts)
        record = functools.partial(answers.record_result, reference=reference, item=item, payload=payload)
        if not store.run_statement(record, timeouts=budget):
            return False
        check = functools.partial(answers.may_need_pass, item=item, run_number=reference.ref.run_number)
        if store.run_statement(check, timeouts=budget):
            wake = functools.partial(self._wake_for_map, reference=reference, item=item)
            context.publish_runs(store.transact(wake, timeouts=budget))
        return True

    def _wake_for_map(self, tx: Tx, reference: TaskReference, item: ItemRef) -> list[DueRun]:
        try:
            row = self._context.lock_row(tx, reference.ref.workflow, reference.ref.instance_id)
        except InstanceNotFound:
            return []
        return answers.wake_for_map(tx, row, reference, item, grace=self._context.grace)

    def report_lost(self, lost: Sequence[LostDelivery], *, why: str) -> int:
        """Report lost deliveries: each task is sent again, or its step gets the error TaskLost. Returns how many.

        A task is given up if its step says ``on_lost="fail"``, or after ``durable_lost_limit`` losses. While execution
        is off, what is to be sent again stays in the outbox.
        """
        settings = self._context.settings
        given_up: list[tuple[TaskReference, GiveUp]] = []
        resent: list[RunRef] = []

        def work(tx: Tx) -> list[OutboxMessage]:
            given_up.clear()
            resent.clear()
            messages = []
            for reference, sent_by in lost:
                if ItemRef.read(reference.event_type) is None and not self._lock(tx, reference.ref):
                    continue
                limit, grace = settings.lost_limit, self._context.grace
                match lost_tasks.report_loss(tx, reference, sent_by=sent_by, limit=limit, grace=grace):
                    case OutboxMessage() as message:
                        messages.append(message)
                        resent.append(reference.ref)
                    case GiveUp() as end:
                        given_up.append((reference, end))
            return messages

        messages = self._context.store.transact(work)
        if messages and settings.is_execution_enabled:
            self._context.send_messages(messages)
        for ref in resent:
            notify.send_task_lost(ref, outcome="resent")
        failed = 0
        for reference, end in given_up:
            # Not retryable: `retries` is about failures, and this task may have done its work.
            times = "" if end.loss_count == 1 else f" {end.loss_count} times"
            text = f"Celery task {end.name!r} was lost{times}: {why}"
            accepted = self.accept(reference, values.encode_error_answer("TaskLost", text, is_non_retryable=True))
            if accepted is AnswerResult.TAKEN:  # else its own answer, or another report of this loss, came first
                failed += 1
                notify.send_task_lost(reference.ref, outcome="failed")
        return len(messages) + failed

    def record_sent_again(self, reference: TaskReference, when: datetime | float | None) -> None:
        """Record that a task sends itself again, in these seconds or at this time. None: other tasks do its work."""
        if isinstance(when, datetime):
            aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
            when = (aware - self._context.runtime.wall_clock()).total_seconds()
        sent_in = None if when is None else timedelta(seconds=max(0.0, when))
        self._context.store.transact_once(lambda tx: lost_tasks.record_sent_again(tx, reference, sent_in))

    def _lock(self, tx: Tx, ref: RunRef) -> bool:
        try:
            self._context.lock_row(tx, ref.workflow, ref.instance_id)
        except InstanceNotFound:
            return False
        return True
