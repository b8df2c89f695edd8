"""Lost Celery tasks: a task that was lost with its worker, machine or queue is sent again or given up."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable import values
from celery_durable.model import OutboxMessage, TaskReference
from celery_durable.operations.lifecycle import LifecycleOperations
from celery_durable.store import lost_tasks
from celery_durable.store.engine import Tx
from celery_durable.store.lost_tasks import GiveUp, Resend

LostDelivery = tuple[TaskReference, int | None]
"""A lost delivery, and when its message was sent, in microseconds; None if the reporter does not know."""


class LostTaskOperations(LifecycleOperations):
    """The operations on tasks that never answer because they are lost."""

    def report_lost(self, lost: Sequence[LostDelivery], *, why: str) -> int:
        """Report lost deliveries: each task is sent again, or its step gets the error TaskLost.

        A task is given up if its step says ``on_lost="fail"``, or after ``durable_lost_limit`` losses.

        Args:
            lost: The lost deliveries.
            why: Becomes part of the error.

        Returns:
            How many tasks were sent again or given up. Deliveries that no step waits for do not count.
        """
        given_up: list[tuple[TaskReference, GiveUp]] = []

        def work(tx: Tx) -> list[OutboxMessage]:
            given_up.clear()
            messages = []
            for reference, sent_us in lost:
                limit = self._settings.lost_limit
                match lost_tasks.report_loss(tx, reference, sent_us=sent_us, limit=limit, grace=self._grace):
                    case Resend(message):
                        messages.append(message)
                    case GiveUp() as end:
                        given_up.append((reference, end))
            return messages

        messages = self._store.transact(work)
        if messages:
            self._send_messages(messages)
        for reference, end in given_up:
            # Not retryable: `retries` is about failures, and this task may have done its work.
            times = "" if end.loss_count == 1 else f" {end.loss_count} times"
            text = f"Celery task {end.name!r} was lost{times}: {why}"
            self.answer(reference, values.encode_error_answer("TaskLost", text, is_non_retryable=True))
        return len(messages) + len(given_up)
