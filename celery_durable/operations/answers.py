"""Answers of Celery tasks to the steps that sent them. A lost task is sent again, or its step gets an error."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable import notify, values
from celery_durable.errors import InstanceNotFound
from celery_durable.model import AnswerResult, ItemRef, OutboxMessage, TaskReference, is_task_event_type
from celery_durable.operations.context import OperationContext
from celery_durable.store import lost_tasks, task_answers
from celery_durable.store.database_identity import read_database_id
from celery_durable.store.engine import Tx
from celery_durable.store.lost_tasks import GiveUp, Resend
from celery_durable.store.task_answers import AnswerOutcome
from celery_durable.store.watchdog import DIRECT

LostDelivery = tuple[TaskReference, int | None]
"""A lost delivery, and when its message was sent, in microseconds; None if the reporter does not know."""


class AnswerOperations:
    """The operations by which steps get the answers of their Celery tasks."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read_database_id(self) -> str:
        """Return the random id of the database, which references in task messages contain."""
        store = self._context.store
        return store.database_id or store.transact_once(read_database_id, timeouts=DIRECT)

    def accept(self, reference: TaskReference, payload: str, *, may_retry: bool = True) -> AnswerResult:
        """Accept the answer of a Celery task for the step or map item that waits for it, once.

        Args:
            reference: The reference that the task's message carried.
            payload: The answer, as `values.encode_answer` returns it.
            may_retry: If False, there is one try of up to 2 s, and any error is raised.

        Returns:
            TAKEN; NOT_AWAITED if the step, its run or its instance is gone or already has an answer; FORGED if the step
            has no answer, but ``reference`` does not belong to its current attempt.
        """
        context, ref, event_type = self._context, reference.ref, reference.event_type
        event_id = context.runtime.new_id()
        if ItemRef.read(event_type) is None and not is_task_event_type(event_type):
            return AnswerResult.NOT_AWAITED

        def work(tx: Tx) -> AnswerOutcome:
            try:
                row = context.lock_row(tx, ref.workflow, ref.instance_id)
            except InstanceNotFound:
                return AnswerOutcome(AnswerResult.NOT_AWAITED)
            if row.run_number != ref.run_number:
                return AnswerOutcome(AnswerResult.NOT_AWAITED)
            grace = context.grace
            return task_answers.accept_answer(tx, row, reference, payload=payload, event_id=event_id, grace=grace)

        store = context.store
        accepted = store.transact(work) if may_retry else store.transact_once(work, timeouts=DIRECT)
        context.publish_runs(accepted.due_runs)
        if accepted.messages:
            context.send_messages(accepted.messages)
        if accepted.result is AnswerResult.FORGED:
            notify.send_answer_refused(ref)
        return accepted.result

    def report_lost(self, lost: Sequence[LostDelivery], *, why: str) -> int:
        """Report lost deliveries: each task is sent again, or its step gets the error TaskLost.

        A task is given up if its step says ``on_lost="fail"``, or after ``durable_lost_limit`` losses.

        Args:
            lost: The lost deliveries.
            why: Becomes part of the error.

        Returns:
            How many tasks were sent again or given up. Deliveries that no step waits for do not count.
        """
        settings = self._context.settings
        given_up: list[tuple[TaskReference, GiveUp]] = []

        def work(tx: Tx) -> list[OutboxMessage]:
            given_up.clear()
            messages = []
            for reference, sent_us in lost:
                limit, grace = settings.lost_limit, self._context.grace
                match lost_tasks.report_loss(tx, reference, sent_us=sent_us, limit=limit, grace=grace):
                    case Resend(message):
                        messages.append(message)
                    case GiveUp() as end:
                        given_up.append((reference, end))
            return messages

        messages = self._context.store.transact(work)
        if messages:
            self._context.send_messages(messages)
        for reference, end in given_up:
            # Not retryable: `retries` is about failures, and this task may have done its work.
            times = "" if end.loss_count == 1 else f" {end.loss_count} times"
            text = f"Celery task {end.name!r} was lost{times}: {why}"
            self.accept(reference, values.encode_error_answer("TaskLost", text, is_non_retryable=True))
        return len(messages) + len(given_up)
