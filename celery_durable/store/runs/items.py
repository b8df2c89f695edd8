"""The items of maps: which Celery tasks are out, which are still to be sent, and which have finished.

The attempt of a task step is an item too, at position 0 of its step, from when it is sent until it is answered or a
pass decides on it.

Changes happen under the lock of the instance's row, except two kinds, which lock the item's row alone: the result of an
item (see `events.answers`), and those of `lost_tasks`, which change only ``loss_count`` and ``sent_at``. So a pass
locks the items that it decides on. A write names the status and the attempt that it was decided for. A transaction that
ends a map's step or its run cancels the open items (`cancel_open`): a later result finds none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    OPEN_ITEMS,
    FailedItem,
    ItemRef,
    ItemStatus,
    MapState,
    OutboxMessage,
    RetryDecision,
    StepStatus,
    StepType,
    TaskReference,
    TaskSendingStep,
    are_items_of,
    from_us,
    task_id,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.server_info import ensure_database_id
from celery_durable.store.engine.statements import Statement, constant, param, statement
from celery_durable.store.runs import outbox
from celery_durable.store.schema import dialects
from celery_durable.store.schema.step_format import is_of_step
from celery_durable.values import build_replying_task_message, read_task_route


def key_parameters(step: TaskSendingStep) -> dict[str, Any]:
    """Return the parameters of `step_conditions`."""
    return {"pk": step.pk, "run": step.run_number, "key": step.step_key}


def step_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    """Conditions for the items of the step that `key_parameters` names."""
    item = s.tables.item.c
    return [
        item.instance_pk == param("pk", sa.BigInteger),
        item.run_number == param("run", sa.Integer),
        item.step_key == param("key", sa.String),
    ]


def has_status(s: Store, *statuses: ItemStatus) -> sa.ColumnElement[bool]:
    """Condition: an item has one of these statuses."""
    return s.tables.item.c.status.in_([constant(status) for status in statuses])


# --- send ---------------------------------------------------------------------------------------


def is_ready(s: Store) -> sa.ColumnElement[bool]:
    """Condition: a pending item may be sent now."""
    due_at = s.tables.item.c.due_at
    return sa.or_(due_at.is_(None), due_at <= s.clock())


def has_ready(s: Store) -> Any:
    """Condition: an item of the map may be sent now. It waits for room, or for the instance to be resumed."""
    item = s.tables.item.alias("ready_item")
    due_at = item.c.due_at
    return sa.exists().where(
        item.c.instance_pk == param("pk", sa.BigInteger),
        item.c.run_number == param("run", sa.Integer),
        item.c.step_key == param("key", sa.String),
        item.c.status == constant(ItemStatus.PENDING),
        sa.or_(due_at.is_(None), due_at <= s.clock()),
    )


@statement
def _select_ready(s: Store) -> Any:
    item = s.tables.item.c
    return (
        sa.select(item.position, item.attempts, item.task, s.clock().label("now_us"))
        .where(*step_conditions(s), has_status(s, ItemStatus.PENDING), is_ready(s))
        .order_by(item.position)
        .limit(param("limit", sa.Integer))
    )


@statement
def _select_ready_item(s: Store) -> Any:
    return _select_ready.build(s).where(s.tables.item.c.position == param("position", sa.Integer))


@statement
def _mark_sent(s: Store) -> Any:
    item = s.tables.item
    new: dict[str, Any] = {name: param(name, column.type) for name, column in _sent_columns(item).items()}
    return (
        sa.update(item)
        .where(
            *step_conditions(s),
            item.c.position == param("position", sa.Integer),
            has_status(s, ItemStatus.PENDING),
            item.c.attempts == param("attempts", sa.Integer) - 1,
        )
        .values(new | NEW_ATTEMPT_VALUES)
    )


NEW_ATTEMPT_VALUES: dict[str, Any] = {"status": ItemStatus.SENT.value, "loss_count": 0, "answer": None}


def _sent_columns(item: sa.Table) -> dict[str, sa.Column[Any]]:
    return {name: item.c[name] for name in ("attempts", "due_at", "attempt_token", "sent_at", "queue", "priority")}


_MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SentItem:
    """An attempt of an item that is marked as sent. ``body``: the encoded task or child, which the caller sends.

    ``reference``: under which a task answers.
    """

    item: ItemRef
    body: str
    reference: TaskReference

    @property
    def id(self) -> str:
        """The id of the Celery task, or of the child instance."""
        return self.item.work_id(self.reference.ref.run_number)


def mark_ready_as_sent(tx: Tx, step: TaskSendingStep, *, limit: int | None) -> list[SentItem]:
    """Mark ready items as sent, at most ``limit`` of them, and return them."""
    return mark_as_sent(tx, step, find_ready(tx, step, limit=limit))


def find_ready(tx: Tx, step: TaskSendingStep, *, limit: int | None) -> Sequence[Any]:
    """Return the rows of ready items, at most ``limit`` of them, for `mark_as_sent`."""
    limit = _MAX_INTEGER if limit is None else limit
    return tx.run(_select_ready, **key_parameters(step), limit=limit) if limit else []


def find_ready_in_queues(tx: Tx, step: TaskSendingStep, queued: Iterable[int], *, limit: int) -> Sequence[Any]:
    """The same, of a map with limits: first the items in queues, in this order, so that no grant is passed over."""
    key = key_parameters(step)
    rows = [row for each in queued for row in tx.run(_select_ready_item, **key, position=each, limit=1)]
    others = find_ready(tx, step, limit=limit + len(rows))
    return [*rows, *(row for row in others if row.position not in {each.position for each in rows})][:limit]


def mark_as_sent(
    tx: Tx, step: TaskSendingStep, found: Sequence[Any], tokens: Sequence[str | None] | None = None
) -> list[SentItem]:
    """Mark ready items as sent and return them. ``tokens``: of their attempts; None: new ones."""
    sent, marks = [], []
    for row, token in zip(found, tokens or [None] * len(found), strict=True):
        attempt, now = row.attempts + 1, from_us(row.now_us)
        each = _new_attempt(tx, step, row.task, position=row.position, attempt=attempt, token=token)
        sent.append(each)
        marks.append(
            key_parameters(step)
            | {"position": row.position}
            | attempt_values(row.task, each.reference, attempt, now=now, step=step)
        )
    tx.run_many(_mark_sent, marks)
    return sent


def _new_attempt(
    tx: Tx, step: TaskSendingStep, body: str, *, position: int, attempt: int, token: str | None = None
) -> SentItem:
    item, token = ItemRef(step.pk, step.step_key, position, attempt), token or tx.store.runtime.new_secret()
    reference = TaskReference(ensure_database_id(tx), step.ref, item.type, token)
    return SentItem(item, body, reference)


def attempt_values(
    body: str, reference: TaskReference, attempt: int, *, now: datetime, step: TaskSendingStep
) -> dict[str, Any]:
    """Return the columns that change with each attempt. A child has no ``sent_at``: no search looks for it."""
    route = read_task_route(body)
    queue, priority = route or (None, None)
    return {
        "attempts": attempt,
        "due_at": to_us(now + step.timeout),
        "attempt_token": reference.token,
        "sent_at": None if route is None else to_us(now),
        "queue": queue,
        "priority": priority,
    }


@statement
def _upsert_task_item(s: Store) -> Any:
    item = s.tables.item
    key: dict[str, Any] = {"instance_pk": param("pk"), "run_number": param("run"), "step_key": param("key")}
    key["position"] = sa.literal_column("0")
    given = {name: param(name, item.c[name].type) for name in ("task", "on_lost", *_sent_columns(item))}
    return dialects.insert_or_update(s.database, item, key | given | NEW_ATTEMPT_VALUES, tuple(key))


def mark_task_as_sent(
    tx: Tx, step: TaskSendingStep, body: str, *, event_type: str, attempt: int, token: str, now: datetime
) -> OutboxMessage:
    """Record that this attempt of a task step is out. Returns its message. ``body``: see `encode_step_task`."""
    reference = TaskReference(ensure_database_id(tx), step.ref, event_type, token)
    sent = attempt_values(body, reference, attempt, now=now, step=step)
    tx.run(_upsert_task_item, **key_parameters(step), task=body, on_lost=step.on_lost, **sent)
    return build_replying_task_message(body, id_=task_id(event_type, step.pk, step.run_number), reference=reference)


def delete_task_item(tx: Tx, pk: int, run_number: int, step_key: str) -> None:
    """Delete the item of a task step, which does not wait for its attempt any more."""
    tx.run(_delete_task_item, pk=pk, run=run_number, key=step_key)


@statement
def _delete_task_item(s: Store) -> Any:
    return sa.delete(s.tables.item).where(*step_conditions(s))


# --- decide on failed items, in a pass ----------------------------------------------------------


def _is_late(s: Store) -> sa.ColumnElement[bool]:
    return sa.and_(has_status(s, ItemStatus.SENT), s.tables.item.c.due_at <= param("now_us", sa.BigInteger))


def _has_failed_or_timed_out(s: Store) -> sa.ColumnElement[bool]:
    return sa.or_(has_status(s, ItemStatus.FAILED), _is_late(s))


@statement
def _select_failed_items(s: Store) -> Any:
    item = s.tables.item.c
    columns = (item.position, item.status, item.attempts, item.answer)
    return sa.select(*columns).where(*step_conditions(s), _has_failed_or_timed_out(s)).order_by(item.position)


@statement
def _lock_failed_items(s: Store) -> Any:
    # Locked, because a report of a loss does not lock the instance. The pass decides on what such a report has
    # committed.
    return _select_failed_items.build(s).with_for_update()


@statement
def _count_by_status(s: Store) -> Any:
    item, now = s.tables.item.c, param("now_us", sa.BigInteger)
    is_pending, is_sent = has_status(s, ItemStatus.PENDING), has_status(s, ItemStatus.SENT)
    # A pending item that is due already waits for room, which only an answer makes.
    is_timer = sa.or_(is_sent, sa.and_(is_pending, item.due_at > now))
    return (
        sa.select(
            item.status,
            sa.func.count().label("n"),
            sa.func.count(sa.case((_is_late(s), 1))).label("late"),
            sa.func.count(sa.case((sa.and_(is_pending, is_ready(s)), 1))).label("ready"),
            sa.func.min(sa.case((is_timer, item.due_at))).label("first_us"),
        )
        .where(*step_conditions(s))
        .group_by(item.status)
    )


def read_map_state(tx: Tx, step: TaskSendingStep, *, now: datetime) -> MapState:
    """Count the items of a map, and find its next timer."""
    rows = {ItemStatus(row.status): row for row in tx.run(_count_by_status, **key_parameters(step), now_us=to_us(now))}
    times = [row.first_us for row in rows.values() if row.first_us is not None]
    return MapState(
        counts={status: row.n for status, row in rows.items()},
        late=sum(row.late for row in rows.values()),
        ready=sum(row.ready for row in rows.values()),
        next_at=from_us(min(times)) if times else None,
    )


def read_failed_items(tx: Tx, step: TaskSendingStep, *, now: datetime) -> list[FailedItem]:
    """Return the items that have failed or timed out."""
    return _find_failed_items(tx, _select_failed_items, step, now=now)


def lock_failed_items(tx: Tx, step: TaskSendingStep, *, now: datetime) -> list[FailedItem]:
    """Lock and return the items that have failed or timed out."""
    return _find_failed_items(tx, _lock_failed_items, step, now=now)


def _find_failed_items(tx: Tx, query: Statement, step: TaskSendingStep, *, now: datetime) -> list[FailedItem]:
    rows = tx.run(query, **key_parameters(step), now_us=to_us(now))
    return [
        FailedItem(row.position, row.attempts, row.answer if row.status == ItemStatus.FAILED.value else None)
        for row in rows
    ]


@statement
def _apply_decision(s: Store) -> Any:
    item = s.tables.item
    return (
        sa.update(item)
        .where(
            *step_conditions(s),
            item.c.position == param("position", sa.Integer),
            item.c.status == param("old_status", sa.String),
            item.c.attempts == param("attempt", sa.Integer),
        )
        .values(
            status=param("new_status", sa.String),
            due_at=param("new_due_us", sa.BigInteger),
            answer=param("new_answer", sa.Text),
        )
    )


def apply_decisions(tx: Tx, step: TaskSendingStep, decisions: Sequence[RetryDecision]) -> None:
    """Write these decisions, each if its item has not changed. Messages of late tasks leave the outbox."""
    tx.run_many(_apply_decision, [key_parameters(step) | _decision_parameters(each) for each in decisions])
    late = [each.item for each in decisions if each.item.is_late]
    refs = [ItemRef(step.pk, step.step_key, each.position, each.attempts) for each in late]
    outbox.delete(tx, [task_id(ref.type, step.pk, step.run_number) for ref in refs])


def _decision_parameters(decision: RetryDecision) -> dict[str, Any]:
    item, next_retry_at = decision.item, decision.next_retry_at
    return {
        "position": item.position,
        "old_status": item.status.value,
        "attempt": item.attempts,
        "new_status": decision.status.value,
        "new_due_us": None if next_retry_at is None else to_us(next_retry_at),
        "new_answer": decision.answer,
    }


# --- read ---------------------------------------------------------------------------------------


@statement
def _select_any_open(s: Store) -> Any:
    return sa.select(s.tables.item.c.position).where(*step_conditions(s), has_status(s, *OPEN_ITEMS)).limit(1)


def are_all_finished(tx: Tx, pk: int, run_number: int, step_key: str) -> bool:
    """Return whether no item of a map is out or still to be sent."""
    return tx.run(_select_any_open, pk=pk, run=run_number, key=step_key).first() is None


@statement
def _select_answers(s: Store) -> Any:
    item = s.tables.item.c
    return sa.select(item.answer, item.attempts).where(*step_conditions(s)).order_by(item.position)


def read_answers(tx: Tx, pk: int, run_number: int, step_key: str) -> list[tuple[str, int]]:
    """Return the answer of each item as JSON text with its number of attempts, in the order of the items."""
    return [(row.answer, row.attempts) for row in tx.run(_select_answers, pk=pk, run=run_number, key=step_key)]


@statement
def _measure_answers(s: Store) -> Any:
    size = dialects.byte_length(s.database, s.tables.item.c.answer)
    return sa.select(sa.func.coalesce(sa.func.sum(size), 0)).where(*step_conditions(s))


def measure_answers(tx: Tx, step: TaskSendingStep) -> int:
    """Return the size of all answers of a map together, in bytes."""
    return int(tx.run(_measure_answers, **key_parameters(step)).scalar_one())


def find_first_error(tx: Tx, step: TaskSendingStep) -> tuple[int, str, int] | None:
    """Return position, answer and attempts of the first item that has failed permanently, or None."""
    return next(iter(read_errors(tx, step.pk, step.run_number, step.step_key, limit=1)), None)


def read_errors(tx: Tx, pk: int, run_number: int, step_key: str, *, limit: int) -> list[tuple[int, str, int]]:
    """Return position, answer and attempts of the first items of a map that have failed permanently."""
    item = tx.t.item.c
    mine = (item.instance_pk == pk, item.run_number == run_number, item.step_key == step_key)
    query = sa.select(item.position, item.answer, item.attempts).where(*mine, item.status == ItemStatus.DEAD.value)
    return [(row.position, row.answer, row.attempts) for row in tx.execute(query.order_by(item.position).limit(limit))]


def find_ids(
    tx: Tx, pk: int, run_number: int, step_key: str, status: ItemStatus, *, limit: int | None = None, last: bool = False
) -> dict[str, int]:
    """Return the ids of the tasks or children of the first items with this status, or of the last, with positions."""
    item = tx.t.item.c
    query = _select_attempts(tx, pk, run_number, step_key).where(item.status == status.value).limit(limit)
    query = query.order_by(None).order_by(item.position.desc()) if last else query
    runs = find_first_runs(tx, pk, run_number, step_key)
    return {
        ItemRef(pk, step_key, row.position, row.attempts).work_id(runs.get(row.position, run_number)): row.position
        for row in tx.execute(query)
    }


def find_open_ids(tx: Tx, pk: int, run_number: int, step_key: str) -> list[str]:
    """Return the ids of the children of a map that may be open. Those of late attempts may be: of each item, ten."""
    ids, runs = [], find_first_runs(tx, pk, run_number, step_key)
    for row in tx.execute(_select_attempts(tx, pk, run_number, step_key)):
        last = row.attempts - 1 if row.status == ItemStatus.DONE.value else row.attempts
        refs = [ItemRef(pk, step_key, row.position, attempt) for attempt in range(max(1, last - 9), last + 1)]
        ids += [ref.work_id(runs.get(row.position, run_number)) for ref in refs]
    return ids


def find_first_runs(tx: Tx, pk: int, run_number: int, step_key: str) -> dict[int, int]:
    """Return in which earlier run an item's current attempt was sent, by position; an item of this run is left out.

    A retry copies items into the next run with their tokens. The id of a task or child is derived from the first run.
    """
    found: dict[int, int] = {}
    tokens = _read_tokens(tx, pk, run_number, step_key) if run_number > 1 else {}
    for run in range(run_number - 1, 0, -1):
        before = _read_tokens(tx, pk, run, step_key)
        tokens = {position: token for position, token in tokens.items() if before.get(position) == token}
        if not tokens:
            break
        found |= dict.fromkeys(tokens, run)
    return found


def _read_tokens(tx: Tx, pk: int, run_number: int, step_key: str) -> dict[int, str]:
    query = _select_attempts(tx, pk, run_number, step_key).where(tx.t.item.c.attempt_token.is_not(None))
    return {row.position: row.attempt_token for row in tx.execute(query)}


def _select_attempts(tx: Tx, pk: int, run_number: int, step_key: str) -> sa.Select[Any]:
    item = tx.t.item.c
    mine = (item.instance_pk == pk, item.run_number == run_number, item.step_key == step_key)
    return sa.select(item.position, item.attempts, item.status, item.attempt_token).where(*mine).order_by(item.position)


# Attempts that are out: rows of tasks that were sent and have not ended, with the steps that wait for them.
#
# The transaction that answers an attempt has locked the instance. The one that reports a loss has not, so it joins the
# instance's row as well.


def join_step(s: Store) -> sa.Join:
    """Join each row of a task with its step."""
    return s.tables.item.join(s.tables.step, is_of_step(s.tables.item, s.tables.step))


def _unanswered_conditions(s: Store) -> tuple[sa.ColumnElement[bool], ...]:
    st, item = s.tables.step.c, s.tables.item.c
    return (
        st.status == constant(StepStatus.WAITING),
        item.status == constant(ItemStatus.SENT),
    )


def task_step_conditions(s: Store) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions for the attempt of a task step. Parameter: ``type``."""
    st = s.tables.step.c
    is_task = st.type == constant(StepType.TASK)
    return (*_unanswered_conditions(s), is_task, st.wait_event_type == param("type", sa.String))


def has_items(step: Any) -> bool:
    """Return whether a step, or a row with its type, is a map. A step of one task has a row here, but no items."""
    return bool(step.type == StepType.MAP)


def is_map(s: Store) -> sa.ColumnElement[bool]:
    """The condition that a step is a map."""
    return s.tables.step.c.type == constant(StepType.MAP)


def map_item_conditions(s: Store) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions for the attempt of a map's item. Parameters: ``pk``, ``key``, ``position``, ``attempt``."""
    st, item = s.tables.step.c, s.tables.item.c
    return (
        *_unanswered_conditions(s),
        is_map(s),
        st.step_key == param("key", sa.String),
        item.instance_pk == param("pk", sa.BigInteger),
        item.position == param("position", sa.Integer),
        item.attempts == param("attempt", sa.Integer),
    )


def find_sent_attempt(
    tx: Tx, reference: TaskReference, *, step_statement: Any, item_statement: Any, **where: Any
) -> Any:
    """Return the row of the attempt that a reference names, by the statement for its kind of step."""
    item_ref = ItemRef.read(reference.event_type)
    if item_ref is None:
        return tx.run(step_statement, **where, type=reference.event_type).first()
    given = {"pk": item_ref.pk, "key": item_ref.step_key, "position": item_ref.position, "attempt": item_ref.attempt}
    return tx.run(item_statement, **given | where).first()


# The items of a map that starts, inserted in few statements: the instance is locked meanwhile.


_NEW_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "position": sa.Integer(),
    "task": sa.Text(),
    "status": sa.String(),
    "attempts": sa.Integer(),
    "due_at": sa.BigInteger(),
    "attempt_token": sa.String(),
    "sent_at": sa.BigInteger(),
    "queue": sa.String(),
    "priority": sa.Integer(),
}


@statement
def _insert_new(s: Store) -> Any:
    new = dialects.build_rows(s.database, param("rows", sa.Text), _NEW_COLUMNS)
    common = {
        "instance_pk": param("pk", sa.BigInteger),
        "run_number": param("run", sa.Integer),
        "step_key": param("key", sa.String),
        "on_lost": param("on_lost", sa.String),
        "loss_count": sa.literal_column("0"),
    }
    source = sa.select(*common.values(), *(new.c[name] for name in _NEW_COLUMNS))
    return sa.insert(s.tables.item).from_select([*common, *_NEW_COLUMNS], source)


def start_map(tx: Tx, step: TaskSendingStep, bodies: Sequence[str], *, now: datetime) -> list[SentItem]:
    """Insert the items of a map that starts, and return those that are sent.

    A retried run keeps completed items, unless the bodies have changed.
    """
    item = tx.t.item
    mine = (item.c.instance_pk == step.pk, item.c.run_number == step.run_number, item.c.step_key == step.step_key)
    kept = {row.position: row.task for row in tx.execute(sa.select(item.c.position, item.c.task).where(*mine))}
    if not are_items_of(bodies, kept):
        tx.execute(sa.delete(item).where(*mine))
        kept = {}
    new = [position for position in range(len(bodies)) if position not in kept]
    sent, rows = [], []
    for position in new[: step.max_concurrency]:
        each = _new_attempt(tx, step, bodies[position], position=position, attempt=1)
        sent.append(each)
        columns = {"status": ItemStatus.SENT.value} | attempt_values(each.body, each.reference, 1, now=now, step=step)
        rows.append({"position": position, "task": each.body} | columns)
    pending = {"status": ItemStatus.PENDING.value, "attempts": 0}
    rows += [{"position": position, "task": bodies[position]} | pending for position in new[len(sent) :]]
    for part in dialects.encode_rows_in_parts(rows):
        tx.run(_insert_new, rows=part, on_lost=step.on_lost, **key_parameters(step))
    return sent


# The items of a map whose step or run ends before all of them have answered: they are cancelled.
#
# The row of an item is the fence against a late result, which does not lock the instance (see `events.answers`).


@statement
def _cancel_open(s: Store) -> Any:
    return (
        sa.update(s.tables.item)
        .where(*step_conditions(s), has_status(s, *OPEN_ITEMS))
        .values(status=ItemStatus.CANCELLED.value, due_at=sa.null())
    )


def cancel_open(tx: Tx, pk: int, run_number: int, step_key: str) -> None:
    """Cancel the open items of a map that ends. It waits for an answer that is being recorded."""
    tx.run(_cancel_open, pk=pk, run=run_number, key=step_key)


@statement
def _select_open_senders(s: Store) -> Any:
    st = s.tables.step.c
    types: list[Any] = [constant(each) for each in (StepType.MAP, StepType.TASK)]
    return sa.select(st.step_key, st.type).where(
        st.instance_pk == param("pk", sa.BigInteger),
        st.run_number == param("run", sa.Integer),
        st.type.in_(types),
        st.status == constant(StepStatus.WAITING),
    )


def end_open_of_run(tx: Tx, pk: int, run_number: int) -> None:
    """Cancel the open items of all maps of a run that ends in this transaction, and delete those of its task steps."""
    for row in tx.run(_select_open_senders, pk=pk, run=run_number):
        end = cancel_open if row.type == StepType.MAP.value else delete_task_item
        end(tx, pk, run_number, row.step_key)
