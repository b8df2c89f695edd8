"""Answers of Celery tasks to the steps and map items that wait for them.

The process that receives an answer writes it. It also sends the next item of a map that is ready, while the instance
stays suspended. It wakes the instance when all items are finished, or when an item has failed that may be retried.
The pass then decides what to do. All of this happens under the lock of the instance's row.

Three things fence an answer:

* The token is random and belongs to one attempt, so it cannot be guessed.
* The item must be out, so an attempt is answered only once.
* A failure counts only from the newest delivery. An older delivery may fail because the newer one does its work. A
  success counts from any delivery.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    AnswerResult,
    DueRun,
    InstanceRow,
    ItemRef,
    ItemStatus,
    OutboxMessage,
    Status,
    TaskReference,
    TaskSendingStep,
    WakeReason,
    decide_answered,
)
from celery_durable.store import answers, items, lifecycle, outbox, sent_attempts
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.values import read_answer_error


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """The result of an answer. The caller wakes ``due_runs`` and sends ``messages``."""

    result: AnswerResult
    due_runs: tuple[DueRun, ...] = ()
    messages: tuple[OutboxMessage, ...] = ()


def accept_answer(
    tx: Tx, row: InstanceRow, reference: TaskReference, *, payload: str, event_id: str, grace: timedelta
) -> AnswerOutcome:
    """Accept the answer of a task to a locked instance, once.

    A late answer counts until a pass has decided on the attempt. While the instance is paused, no further item is
    sent. If the caller fails to publish the due runs and messages, a sweep publishes them after ``grace``.
    """
    item = ItemRef.read(reference.event_type)
    found = _find_attempt(tx, row, reference, item)
    if found is None or row.status.is_terminal:
        return AnswerOutcome(AnswerResult.NOT_AWAITED)
    # Compared as bytes, since `compare_digest` accepts only ASCII in text.
    if not hmac.compare_digest(found.attempt_token.encode(), reference.token.encode()):
        return AnswerOutcome(AnswerResult.FORGED)
    if item is None:
        return _answer_step(tx, row, reference, found, payload=payload, event_id=event_id, grace=grace)
    return _answer_item(tx, row, item, reference, found, payload=payload, grace=grace)


def _find_attempt(tx: Tx, row: InstanceRow, reference: TaskReference, item: ItemRef | None) -> Any:
    if item is not None and item.pk != row.pk:
        return None
    return sent_attempts.find(
        tx, reference, step_statement=_unanswered_step, item_statement=_unanswered_item, pk=row.pk, run=row.run_number
    )


def _select_unanswered(s: Store) -> sa.Select[Any]:
    item, st = s.tables.item.c, s.tables.step.c
    columns = (st.step_key, st.max_attempts, st.timeout_ms, item.attempt_token)
    mine = (st.instance_pk == param("pk"), st.run_number == param("run"))
    return sa.select(*columns).select_from(sent_attempts.join_step(s)).where(*mine)


@statement
def _unanswered_step(s: Store) -> Any:
    return _select_unanswered(s).where(*sent_attempts.task_step_conditions(s))


@statement
def _unanswered_item(s: Store) -> Any:
    return _select_unanswered(s).where(*sent_attempts.map_item_conditions(s))


_MAX_INTEGER = 2**31 - 1


def _delivery_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    """Conditions on the delivery, checked in the statement that writes the row.

    A report of a loss does not take the lock of the instance. So it may change ``loss_count`` after an earlier read.
    """
    loss_count = s.tables.item.c.loss_count
    return [loss_count >= param("first_delivery", sa.Integer), loss_count <= param("last_delivery", sa.Integer)]


def _delivery_parameters(payload: str, reference: TaskReference) -> dict[str, int]:
    """The range in which the item's ``loss_count`` must be for an answer to count.

    A success counts for any number. A failure counts only for the number of the delivery that the answer names, so the
    failure of an older delivery has no effect.
    """
    if read_answer_error(payload) is None:
        return {"first_delivery": 0, "last_delivery": _MAX_INTEGER}
    return {"first_delivery": reference.delivery, "last_delivery": reference.delivery}


# --- a task step --------------------------------------------------------------------------------


def _answer_step(
    tx: Tx, row: InstanceRow, reference: TaskReference, found: Any, *, payload: str, event_id: str, grace: timedelta
) -> AnswerOutcome:
    """Store the answer as an event that only this step waits for. The next pass consumes it."""
    where = {"pk": row.pk, "run": row.run_number, "key": found.step_key}
    if tx.run(_delete_task_item, **where, **_delivery_parameters(payload, reference)).rowcount == 0:
        return AnswerOutcome(AnswerResult.NOT_AWAITED)
    waiting_step = answers.WaitingStep(row, reference.event_type)
    due_runs = answers.store_answer(tx, waiting_step, payload=payload, event_id=event_id, grace=grace)
    return (
        AnswerOutcome(AnswerResult.NOT_AWAITED)
        if due_runs is None
        else AnswerOutcome(AnswerResult.TAKEN, tuple(due_runs))
    )


@statement
def _delete_task_item(s: Store) -> Any:
    item = s.tables.item
    return sa.delete(item).where(*items.step_conditions(s), *_delivery_conditions(s))


# --- an item of a map ---------------------------------------------------------------------------


@statement
def _update_item(s: Store) -> Any:
    item = s.tables.item
    return (
        sa.update(item)
        .where(
            *items.step_conditions(s),
            item.c.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"),
            item.c.position == param("position", sa.Integer),
            item.c.attempts == param("attempt", sa.Integer),
            *_delivery_conditions(s),
        )
        .values(status=param("new_status", sa.String), answer=param("new_answer", sa.Text), due_at=None)
    )


def _answer_item(
    tx: Tx, row: InstanceRow, item: ItemRef, reference: TaskReference, found: Any, *, payload: str, grace: timedelta
) -> AnswerOutcome:
    timeout = timedelta(milliseconds=found.timeout_ms)
    step = TaskSendingStep(row.workflow, row.instance_id, row.pk, row.run_number, item.step_key, timeout)
    error = read_answer_error(payload)
    status = decide_answered(
        is_error=error is not None,
        is_retryable=error is not None and not error.is_non_retryable,
        attempt=item.attempt,
        max_attempts=found.max_attempts,
    )
    given = {"position": item.position, "attempt": item.attempt, "new_status": status.value, "new_answer": payload}
    if (
        tx.run(_update_item, **items.key_parameters(step), **given, **_delivery_parameters(payload, reference)).rowcount
        == 0
    ):
        return AnswerOutcome(AnswerResult.NOT_AWAITED)
    is_paused = row.status is Status.PAUSED or row.pause_requested
    messages = [] if is_paused else items.mark_ready_as_sent(tx, step, limit=1)
    outbox.insert(tx, messages, pk=row.pk, run_number=row.run_number, step_key=item.step_key, grace=grace)
    step_key = (row.pk, row.run_number, item.step_key)
    needs_pass = status is ItemStatus.FAILED or (not messages and items.are_all_finished(tx, *step_key))
    is_suspended = row.is_suspended
    due_runs = (
        [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=grace)] if needs_pass and is_suspended else []
    )
    return AnswerOutcome(AnswerResult.TAKEN, tuple(due_runs), tuple(messages))
