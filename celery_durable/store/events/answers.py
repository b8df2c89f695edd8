"""Answers to steps: an answer is stored as an event that only one step waits for.

A child's answer is written in the transaction that ends the child. Its parent is older, so its row is locked first.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import InstanceNotFound
from celery_durable.model import (
    NO_TRACE,
    OPEN_ITEMS,
    AnswerResult,
    AttemptOutcome,
    AttemptWrite,
    DueRun,
    ErrorTrace,
    InstanceRow,
    ItemRef,
    ItemStatus,
    Parent,
    RunOutcome,
    RunRef,
    Status,
    StepStatus,
    StepType,
    TaskReference,
    TaskSendingStep,
    WakeReason,
    WorkerProcess,
    decide_answered,
    from_us,
    is_answer_of_child,
    task_id,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.instances.item_senders import NOTHING_SENT, TASKS, ItemSender, SentWork
from celery_durable.store.runs import attempts, history, holds, items
from celery_durable.values import encode_child_answer, read_answer_error


@statement
def _waiting_parent(s: Store) -> Any:
    i, st = s.tables.instance.c, s.tables.step.c
    return (
        sa.select(i.workflow, i.instance_id, i.run_number, st.wait_event_type)
        .join_from(s.tables.instance, s.tables.step, sa.and_(st.instance_pk == i.id, st.run_number == i.run_number))
        .where(
            i.id == param("pk"),
            st.step_key == param("key"),
            st.type == constant(StepType.CHILD),
            st.status == constant(StepStatus.WAITING),
        )
    )


@statement
def _waiting_item(s: Store) -> Any:
    i = s.tables.instance
    item, sent = s.tables.item, s.tables.item.alias("sent_item")
    run = sa.and_(i.c.id == item.c.instance_pk, i.c.run_number == item.c.run_number)
    # The run that sent the attempt, or a later one to which the retry of a family has moved it.
    same = [sent.c[name] == item.c[name] for name in ("instance_pk", "step_key", "position", "attempt_token")]
    return (
        sa.select(i.c.workflow, i.c.instance_id, item.c.attempt_token)
        .select_from(items.join_step(s).join(i, run).join(sent, sa.and_(*same)))
        .where(sent.c.run_number == param("run", sa.Integer), *items.map_item_conditions(s))
    )


def find_waiting_parent(tx: Tx, parent: Parent | None, child: tuple[str, str]) -> list[tuple[int, str, str]]:
    """Return key, workflow and id of the instance whose step waits for this child's end; an empty list if none does."""
    row = None if parent is None else _find_waiting_step(tx, parent, child)
    return [] if parent is None or row is None else [(parent.pk, row.workflow, row.instance_id)]


def _find_waiting_step(tx: Tx, parent: Parent, child: tuple[str, str]) -> Any:
    """Return the step or item that waits for this child, of which ``child`` has workflow and instance id.

    A step waits in the run that created the child, or in a later one that waits for it again. A step of another run may
    wait for another child.
    """
    where = {"pk": parent.pk, "key": parent.step_key}
    if (item := parent.item) is not None:
        given = {"run": parent.run_number, "position": item.position, "attempt": item.attempt}
        return tx.run(_waiting_item, **where, **given).first()
    row = tx.run(_waiting_parent, **where).first()
    if row is None or row.run_number == parent.run_number:
        return row
    return row if is_answer_of_child(row.wait_event_type, child) else None


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """A step that waits for an answer: its locked instance, and the event type of the answer.

    ``token``: of the attempt, if an item of a map waits.
    """

    row: InstanceRow
    event_type: str
    token: str | None = None


def lock_parent(tx: Tx, parent: Parent | None, child: tuple[str, str]) -> WaitingStep | None:
    """Lock the instance whose step waits for this child's end, if one does. Call this before the child is locked."""
    step = None if parent is None else _find_waiting_step(tx, parent, child)
    if parent is None or step is None:
        return None
    try:
        row = instances.lock(tx, step.workflow, step.instance_id)
    except InstanceNotFound:  # it ended and was deleted after the read
        return None
    if (item := parent.item) is not None:  # `accept_answer` reads it again
        return WaitingStep(row, item.type, step.attempt_token)
    # Read again under the lock: the step may have ended after the first read.
    step = _find_waiting_step(tx, parent, child)
    return None if step is None else WaitingStep(row, step.wait_event_type)


@statement
def _select_unanswered_step(s: Store) -> Any:
    st, e = s.tables.step.c, s.tables.event.c
    has_answer = sa.exists().where(
        e.instance_pk == st.instance_pk, e.run_number == st.run_number, e.type == st.wait_event_type
    )
    return sa.select(st.step_key).where(
        st.instance_pk == param("pk"),
        st.run_number == param("run"),
        st.status == constant(StepStatus.WAITING),
        st.wait_event_type == param("type"),
        ~has_answer,
    )


def store_answer(
    tx: Tx, waiting_step: WaitingStep, *, payload: str, event_id: str, grace: timedelta
) -> list[DueRun] | None:
    """Store an answer for a waiting step. Returns the runs that became due; a sweep publishes them after ``grace``.

    Returns None if the step does not wait for this answer any more, or has one already.
    """
    row = waiting_step.row
    is_unanswered = (
        tx.run(_select_unanswered_step, pk=row.pk, run=row.run_number, type=waiting_step.event_type).first() is not None
    )
    if row.status.is_terminal or not is_unanswered:
        return None
    run_events.insert_event(tx, row, type_=waiting_step.event_type, payload=payload, event_id=event_id)
    # If a worker holds the claim, it finds the event itself. Only a suspended run must be made due.
    is_suspended = run_events.is_awaited(tx, row, waiting_step.event_type)
    return [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=grace)] if is_suspended else []


# Answers of Celery tasks to the steps and map items that wait for them.
#
# The process that receives an answer writes it. It also sends the next item of a map that is ready, while the instance
# stays suspended. It wakes the instance when all items are finished, or when an item has failed that may be retried.
# The pass then decides what to do. All of this happens under the lock of the instance's row, with one exception.
#
# The result of an item takes one statement without that lock (`record_result`) if no other item waits to be sent. So
# the items of a map do not wait for each other. After its commit the process checks whether the map needs a pass
# (`may_need_pass`), and only then locks the instance and wakes it (`wake_for_map`). It may die before that: the run
# checks its maps itself from time to time (`RunLimits.next_check`).
#
# Three things fence an answer:
#
# * The token is random and belongs to one attempt, so it cannot be guessed.
# * The item must be out, so an attempt is answered only once.
# * A failure counts only from the newest delivery. An older delivery may fail because the newer one does its work. A
#   success counts from any delivery.


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """The result of an answer. The caller wakes ``due_runs``, and sends ``work``: the next item of a map."""

    result: AnswerResult
    due_runs: tuple[DueRun, ...] = ()
    work: SentWork = NOTHING_SENT


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """The error of a task for the record of its attempt, redacted before the transaction, which locks rows."""

    error_name: str
    error_message: str
    trace: ErrorTrace = NO_TRACE
    node: str | None = None
    pid: int | None = None
    child_id: str | None = None
    """Of the child that has failed."""


def accept_answer(
    tx: Tx,
    row: InstanceRow,
    reference: TaskReference,
    *,
    payload: str,
    event_id: str,
    grace: timedelta,
    failure: TaskFailure | None = None,
    sender: ItemSender | None = TASKS,
) -> AnswerOutcome:
    """Accept the answer of a task to a locked instance, once.

    ``failure``: the error in ``payload``, recorded in the same transaction, unless the answer of a step comes after its
    deadline. A late answer counts until a pass has decided on the attempt. While the instance is paused, or without
    ``sender``, a pass sends the further items. A sweep publishes due runs and messages after ``grace``.
    """
    item = ItemRef.read(reference.event_type)
    found = _find_attempt(tx, row, reference, item)
    if found is None or row.status.is_terminal:
        # A copy of an answer. The process that recorded the first one may have died before it woke the instance.
        due_runs = [] if item is None else wake_for_map(tx, row, reference, item, grace=grace)
        return AnswerOutcome(AnswerResult.NOT_AWAITED, tuple(due_runs))
    # Compared as bytes, since `compare_digest` accepts only ASCII in text.
    if not hmac.compare_digest(found.attempt_token.encode(), reference.token.encode()):
        return AnswerOutcome(AnswerResult.FORGED)
    if item is None:
        outcome = _answer_step(tx, row, reference, found, payload=payload, event_id=event_id, grace=grace)
    else:
        outcome = _answer_item(tx, row, item, reference, found, payload=payload, grace=grace, sender=sender)
    is_taken = outcome.result is AnswerResult.TAKEN
    if failure is not None and is_taken and (item is not None or _is_in_time(tx, row, found, event_id)):
        write = _build_attempt(row, reference, item, found, failure)
        attempts.insert(tx, row.pk, row.run_number, [write], now=from_us(found.now_us))
    return outcome


def _build_attempt(
    row: InstanceRow, reference: TaskReference, item: ItemRef | None, found: Any, failure: TaskFailure
) -> AttemptWrite:
    id_ = failure.child_id or task_id(reference.event_type, row.pk, row.run_number)
    return AttemptWrite(
        found.step_key,
        found.attempts,
        AttemptOutcome.FAILED,
        failure.error_name,
        failure.error_message,
        trace=failure.trace,
        worker=None if failure.node is None or failure.pid is None else WorkerProcess(failure.node, failure.pid, id_),
        item=None if item is None else item.position,
        task_id=id_,
    )


def _find_attempt(tx: Tx, row: InstanceRow, reference: TaskReference, item: ItemRef | None) -> Any:
    if item is not None and item.pk != row.pk:
        return None
    return items.find_sent_attempt(
        tx, reference, step_statement=_unanswered_step, item_statement=_unanswered_item, pk=row.pk, run=row.run_number
    )


def _select_unanswered(s: Store) -> sa.Select[Any]:
    item, st = s.tables.item.c, s.tables.step.c
    now_us = s.clock().label("now_us")
    columns = (
        st.step_key, st.max_attempts, st.timeout_ms, st.wake_at, item.attempts, item.attempt_token, now_us,
        holds.has_hold(s, item).label("is_limited"),
    )  # fmt: skip
    mine = (st.instance_pk == param("pk"), st.run_number == param("run"))
    return sa.select(*columns).select_from(items.join_step(s)).where(*mine)


@statement
def _unanswered_step(s: Store) -> Any:
    return _select_unanswered(s).where(*items.task_step_conditions(s))


@statement
def _unanswered_item(s: Store) -> Any:
    return _select_unanswered(s).where(*items.map_item_conditions(s))


_MAX_INTEGER = 2**31 - 1


def _delivery_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    """Conditions on the delivery, in the statement that writes: a report of a loss does not lock the instance."""
    loss_count = s.tables.item.c.loss_count
    return [loss_count >= param("first_delivery", sa.Integer), loss_count <= param("last_delivery", sa.Integer)]


def _delivery_parameters(payload: str, reference: TaskReference) -> dict[str, int]:
    """The range in which ``loss_count`` must be: any for a success, that of the answer's own delivery for a failure."""
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
    waiting_step = WaitingStep(row, reference.event_type)
    due_runs = store_answer(tx, waiting_step, payload=payload, event_id=event_id, grace=grace)
    return (
        AnswerOutcome(AnswerResult.NOT_AWAITED)
        if due_runs is None
        else AnswerOutcome(AnswerResult.TAKEN, tuple(due_runs))
    )


def _is_in_time(tx: Tx, row: InstanceRow, found: Any, event_id: str) -> bool:
    """Whether the next pass will take the stored answer. Otherwise that pass records the attempt, as timed out."""
    e = tx.t.event.c
    stored = (e.instance_pk == row.pk, e.run_number == row.run_number, e.event_id == event_id)
    return bool(tx.execute(sa.select(e.created_at <= found.wake_at).where(*stored)).scalar_one())


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
            item.c.status == constant(ItemStatus.SENT),
            item.c.position == param("position", sa.Integer),
            item.c.attempts == param("attempt", sa.Integer),
            *_delivery_conditions(s),
        )
        .values(status=param("new_status", sa.String), answer=param("new_answer", sa.Text), due_at=None)
    )


def _answer_item(
    tx: Tx,
    row: InstanceRow,
    item: ItemRef,
    reference: TaskReference,
    found: Any,
    *,
    payload: str,
    grace: timedelta,
    sender: ItemSender | None,
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
    work = NOTHING_SENT
    if found.is_limited:  # a pass asks for the limits of the next item
        sender = None
    if sender is not None and not is_paused and (sent := items.mark_ready_as_sent(tx, step, limit=1)):
        work = sender.send(tx, step, sent, grace=grace)
    step_key = (row.pk, row.run_number, item.step_key)
    needs_pass = (
        status is ItemStatus.FAILED
        or sender is None
        or (work == NOTHING_SENT and items.are_all_finished(tx, *step_key))
    )
    is_suspended = row.is_suspended
    due_runs = (
        [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=grace)] if needs_pass and is_suspended else []
    )
    return AnswerOutcome(AnswerResult.TAKEN, tuple(due_runs), work)


# --- the answer of a child ----------------------------------------------------------------------


def answer_parent(
    tx: Tx,
    parent: Parent | None,
    child: RunRef,
    *,
    payload: str,
    event_id: str,
    grace: timedelta,
    sender: ItemSender | None = None,
) -> AnswerOutcome:
    """Answer the step or the item that waits for the end of ``child``. `lock_parent` has locked its instance.

    Without ``sender``, a pass of the parent creates the next child of a map. A parent that began to wait for the child
    again after `lock_parent` is locked only now, against the order of the locks. A deadlock that results is retried.
    """
    waiting_step = lock_parent(tx, parent, (child.workflow, child.instance_id))
    if waiting_step is None:
        return AnswerOutcome(AnswerResult.NOT_AWAITED)
    if waiting_step.token is None:
        due_runs = store_answer(tx, waiting_step, payload=payload, event_id=event_id, grace=grace)
        return AnswerOutcome(AnswerResult.TAKEN, tuple(due_runs or ()))
    failure, error = None, read_answer_error(payload)
    if error is not None:  # its text may need redaction, and the child has it
        text = f"Instance {child.instance_id!r} of workflow {child.workflow!r} has failed"
        failure = TaskFailure(error.name, text, child_id=child.instance_id)
    row = waiting_step.row
    reference = TaskReference("", row.ref, waiting_step.event_type, waiting_step.token)
    options: Any = {"payload": payload, "event_id": event_id, "grace": grace, "failure": failure, "sender": sender}
    return accept_answer(tx, row, reference, **options)


def answer_from_child(tx: Tx, child: InstanceRow, *, event_id: str, grace: timedelta) -> None:
    """Answer the new run that waits for this locked child again, and is due, if the child has ended meanwhile."""
    if not child.status.is_terminal:
        return
    run = history.read_run(tx, child.pk, child.run_number)
    assert run is not None
    outcome = RunOutcome(child.status, run.output, run.error_name, run.error_message, reason=run.reason)
    payload = encode_child_answer(child.ref, outcome)
    parent = instances.find_parent(tx, child.workflow, child.instance_id)
    answer_parent(tx, parent, child.ref, payload=payload, event_id=event_id, grace=grace)


# --- the result of an item, without the instance's lock -----------------------------------------


def _waiting_map_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    st = s.tables.step.c
    return [
        st.instance_pk == param("pk", sa.BigInteger),
        st.run_number == param("run", sa.Integer),
        st.step_key == param("key", sa.String),
        items.is_map(s),
        st.status == constant(StepStatus.WAITING),
    ]


@statement
def _record_result(s: Store) -> Any:
    item = s.tables.item
    return (
        sa.update(item)
        .where(
            *items.step_conditions(s),
            items.has_status(s, ItemStatus.SENT),
            item.c.position == param("position", sa.Integer),
            item.c.attempts == param("attempt", sa.Integer),
            # Not in constant time, unlike `accept_answer`. The time of an index search tells a forger nothing.
            item.c.attempt_token == param("token", sa.String),
        )
        .values(status=ItemStatus.DONE.value, answer=param("answer", sa.Text), due_at=sa.null())
    )


def _takes_results(s: Store) -> Any:
    """Condition: the map waits in the current run of this instance, its item has no limits, and no item is ready."""
    i = s.tables.instance.c
    is_waiting = sa.exists().where(
        i.id == param("pk", sa.BigInteger),
        i.workflow == param("workflow", sa.String),
        i.instance_id == param("instance", sa.String),
        i.run_number == param("run", sa.Integer),
        i.status.not_in([constant(status) for status in Status if status.is_terminal]),
        *_waiting_map_conditions(s),
    )
    h = s.tables.hold.c
    has_limits = sa.exists().where(
        h.instance_pk == param("pk", sa.BigInteger),
        h.run_number == param("run", sa.Integer),
        h.step_key == param("key", sa.String),
        h.position == param("position", sa.Integer),
    )
    return sa.and_(is_waiting, ~items.has_ready(s), ~has_limits)


@statement
def _select_takes_results(s: Store) -> Any:
    return sa.select(_takes_results(s).label("takes_results"))


@statement
def _record_result_if_taken(s: Store) -> Any:
    return _record_result.build(s).where(_takes_results(s))


def record_result(tx: Tx, reference: TaskReference, item: ItemRef, payload: str) -> bool:
    """Record the result of a map item, locking the item's row alone. If it returns False, call `accept_answer`."""
    ref = reference.ref
    where = {"pk": item.pk, "run": ref.run_number, "key": item.step_key}
    named = {"workflow": ref.workflow, "instance": ref.instance_id, "token": reference.token}
    mine = {"position": item.position, "attempt": item.attempt, "answer": payload}
    recorded = tx.run_combined(_record_result_if_taken, **where, **named, **mine)
    if recorded is None:  # MariaDB would lock the rows that a subquery of an UPDATE reads, among them the instance's
        if not tx.run(_select_takes_results, **where, **named, position=item.position).scalar():
            return False
        recorded = tx.run(_record_result, **where, **named, **mine)
    return recorded.rowcount == 1


@statement
def _select_progress(s: Store) -> Any:
    item = s.tables.item.c
    # The last items in the order of the index: those at its beginning have ended first, and their entries may still be
    # in the index.
    open_items = (
        sa.select(item.position)
        .where(*items.step_conditions(s), items.has_status(s, *OPEN_ITEMS))
        .order_by(item.status.desc(), item.position.desc())
        .limit(sa.literal_column(str(_FEW_ITEMS)))
        .subquery()
    )
    count = sa.select(sa.func.count()).select_from(open_items).scalar_subquery()
    return sa.select(count.label("open_count"), items.has_ready(s).label("has_ready"))


_FEW_ITEMS = 2


def may_need_pass(tx: Tx, item: ItemRef, *, run_number: int) -> bool:
    """Return whether a map may need a pass: none or one of its items is open, or an item is ready to be sent.

    `accept_answer` may be answering the one open item now: under the lock of the instance, and without seeing results
    that are not committed yet. `wake_for_map` waits for that lock, and then sees both.
    """
    row = tx.run(_select_progress, pk=item.pk, run=run_number, key=item.step_key).one()
    return row.open_count < _FEW_ITEMS or bool(row.has_ready)


@statement
def _select_waiting_map(s: Store) -> Any:
    st = s.tables.step.c
    return sa.select(st.step_key).where(*_waiting_map_conditions(s))


def wake_for_map(
    tx: Tx, row: InstanceRow, reference: TaskReference, item: ItemRef, *, grace: timedelta
) -> list[DueRun]:
    """Make a locked instance due if it is suspended and this map needs a pass. Returns the runs that became due."""
    where = {"pk": row.pk, "run": row.run_number, "key": item.step_key}
    is_named = (row.pk, row.run_number) == (item.pk, reference.ref.run_number)
    if not is_named or not row.is_suspended or tx.run(_select_waiting_map, **where).first() is None:
        return []
    progress = tx.run(_select_progress, **where).one()
    if progress.open_count and not progress.has_ready:
        return []
    return [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=grace)]
