"""Lost tasks: which tasks are out, and what happens if a worker, a machine or a queue loses one.

A lost task is sent again under the same task id and attempt, with the next delivery number: the item's ``loss_count``.
A report names the delivery that was lost, and only one of the newest delivery counts. The loss of a map's item locks
the item's row alone, not the instance's. It may race with an answer: the first write wins.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    ItemRef,
    ItemStatus,
    OnLost,
    OutboxMessage,
    RunRef,
    Status,
    StepStatus,
    TaskReference,
    duration_us,
    from_us,
    task_id,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.server_info import find_database_id
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.runs import items, outbox
from celery_durable.values import build_replying_task_message

_CHUNK = 200
_MAX_OLDEST = 1000
_FAIL: OnLost = "fail"
_WAIT: OnLost = "wait"

StepKey = tuple[int, int, str]
"""The key of a step: the instance's row, the run's number, the step's key."""


@dataclass(frozen=True, slots=True)
class SentTask:
    """A task that is out. ``missing_at``: when a dispatcher found its newest message neither queued nor held."""

    reference: TaskReference
    step: StepKey
    position: int
    sent_at: datetime
    missing_at: datetime | None = None

    @property
    def id(self) -> str:
        return task_id(self.reference.event_type, *self.step[:2])

    @property
    def is_of_map(self) -> bool:
        return ItemRef.read(self.reference.event_type) is not None


# --- what is out --------------------------------------------------------------------------------


def read_sent(tx: Tx, *, before: datetime, limit: int, offset: int = 0) -> tuple[list[SentTask], bool]:
    """Return tasks sent before this time, oldest first, but not those in the outbox, and whether there are more."""
    item = tx.t.item.c
    is_wanted = (*_is_searched(tx), item.sent_at <= to_us(before), item.on_lost != _WAIT)
    query = _select_awaited(tx.store).where(*is_wanted).order_by(item.sent_at, *_key(item), item.position)
    rows = tx.execute(query.limit(limit).offset(offset)).all()
    database_id = find_database_id(tx) if rows else None
    # Without an id, which only emptied tables lack, no answer to these tasks would be accepted.
    tasks = [] if database_id is None else [_sent_task(row, database_id) for row in rows]
    unsent: set[str] = set()
    for start in range(0, len(tasks), _CHUNK):
        unsent |= outbox.find_existing(tx, [each.id for each in tasks[start : start + _CHUNK]])
    return [each for each in tasks if each.id not in unsent], len(rows) == limit


def read_oldest_sent(tx: Tx) -> list[tuple[str | None, str | None, datetime, int]]:
    """Return where the oldest tasks were sent (queue, or encoded task if its route decides), since when, how many."""
    item = tx.t.item.c
    routed = sa.case((item.queue.is_(None), item.task)).label("routed")
    query = _select_awaited(tx.store).with_only_columns(item.queue, routed, item.sent_at).where(*_is_searched(tx))
    oldest = query.order_by(item.sent_at).limit(_MAX_OLDEST).subquery().c
    columns = (oldest.queue, oldest.routed, sa.func.min(oldest.sent_at).label("at"), sa.func.count().label("n"))
    rows = tx.execute(sa.select(*columns).group_by(oldest.queue, oldest.routed))
    return [(row.queue, row.routed, from_us(row.at), row.n) for row in rows]


def _is_searched(tx: Tx) -> tuple[sa.ColumnElement[bool], ...]:
    """The condition of the index of sent items."""
    item = tx.t.item.c
    return item.status == constant(ItemStatus.SENT), item.sent_at > sa.literal_column("0")


def _select_awaited(s: Store) -> sa.Select[Any]:
    """Select the attempts of tasks with the steps of current runs that wait for them."""
    i, item, st = s.tables.instance, s.tables.item.c, s.tables.step.c
    columns = (
        *_key(item), item.position, item.attempts, item.loss_count, item.attempt_token, item.sent_at, item.missing_at,
        item.on_lost, i.c.workflow, i.c.instance_id, st.name, st.type, st.wait_event_type,
    )  # fmt: skip
    mine = sa.and_(i.c.id == item.instance_pk, i.c.run_number == item.run_number)
    is_awaited = (
        st.status == constant(StepStatus.WAITING),
        i.c.status.not_in([constant(status) for status in Status if status.is_terminal]),
    )
    return sa.select(*columns).select_from(items.join_step(s).join(i, mine)).where(*is_awaited)


def _key(columns: Any) -> tuple[sa.ColumnElement[Any], ...]:
    return columns.instance_pk, columns.run_number, columns.step_key


def _sent_task(row: Any, database_id: str) -> SentTask:
    event_type = row.wait_event_type
    if items.has_items(row):
        event_type = ItemRef(row.instance_pk, row.step_key, row.position, row.attempts).type
    ref = RunRef(row.workflow, row.instance_id, row.run_number)
    reference = TaskReference(database_id, ref, event_type, row.attempt_token, delivery=row.loss_count)
    missing_at = None if row.missing_at is None or row.missing_at < row.sent_at else from_us(row.missing_at)
    step = (row.instance_pk, row.run_number, row.step_key)
    return SentTask(reference, step, row.position, from_us(row.sent_at), missing_at)


def read_bodies(tx: Tx, tasks: Sequence[SentTask]) -> dict[StepKey, str]:
    """Return the stored body of one task of each step, for `values.build_replying_task_message`."""
    item = tx.t.item.c
    key, firsts = (*_key(item), item.position), {each.step: (*each.step, each.position) for each in tasks}
    rows = _select_among(tx, sa.select(*key, item.task), key, list(firsts.values()))
    return {(row.instance_pk, row.run_number, row.step_key): row.task for row in rows}


def read_last_answered(tx: Tx, steps: Sequence[StepKey]) -> dict[tuple[StepKey, datetime], int]:
    """Return the last position among the answered items of each map that were sent at the same time, and once.

    Of several deliveries, the answer may be an older one's.
    """
    item = tx.t.item.c
    is_answered = (item.status != ItemStatus.SENT.value, item.sent_at.is_not(None), item.loss_count == 0)
    query = sa.select(*_key(item), item.sent_at, sa.func.max(item.position).label("last")).where(*is_answered)
    rows = _select_among(tx, query.group_by(*_key(item), item.sent_at), _key(item), steps)
    return {((row.instance_pk, row.run_number, row.step_key), from_us(row.sent_at)): row.last for row in rows}


def record_missing(tx: Tx, tasks: Sequence[SentTask]) -> None:
    """Record that no worker holds these tasks, and that their messages have left the queue."""
    item = tx.t.item
    for step in {each.step for each in tasks}:
        is_out = (item.c.position.in_([each.position for each in tasks if each.step == step]), *_is_searched(tx))
        tx.execute(sa.update(item).where(*_is_of_step(item.c, step), *is_out).values(missing_at=tx.store.clock()))


def _select_among(tx: Tx, query: sa.Select[Any], key: Sequence[Any], wanted: Sequence[Any]) -> Iterator[sa.Row[Any]]:
    """Return the rows of a query that have one of these keys."""
    for start in range(0, len(wanted), _CHUNK):
        yield from tx.execute(query.where(sa.tuple_(*key).in_(wanted[start : start + _CHUNK])))


def _is_of_step(columns: Any, step: StepKey) -> list[sa.ColumnElement[bool]]:
    return [column == value for column, value in zip(_key(columns), step, strict=True)]


# --- what is lost -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The task is not to be sent again. ``name`` is the Celery task; ``loss_count`` includes this loss."""

    name: str
    loss_count: int


def report_loss(
    tx: Tx, reference: TaskReference, *, sent_by: datetime | None, limit: int, grace: timedelta
) -> OutboxMessage | GiveUp | None:
    """Report that a delivery of a task is lost. Returns the message that sends the task again, with its time anew.

    Returns None if the attempt has ended or has sent another message, or its step says ``on_lost="wait"`` and the
    reporter did not see the task die. ``sent_by``: the lost message was sent by this time; None: the reporter saw the
    task die. The caller has locked the instance of a task step, whose row has the deadline.
    """
    row = _find_attempt(tx, reference)
    if row is None or row.loss_count != reference.delivery:
        return None
    if sent_by is not None and (row.on_lost == _WAIT or row.sent_at is None or row.sent_at > to_us(sent_by)):
        return None
    if row.on_lost == _FAIL or row.loss_count + 1 >= limit:
        return GiveUp(json.loads(row.task)["name"], row.loss_count + 1)
    item, now = tx.t.item, tx.store.clock()
    new_values = (  # ordered: MariaDB lets later assignments see earlier ones
        (item.c.due_at, item.c.due_at + now - sa.func.coalesce(item.c.sent_at, now)),
        (item.c.sent_at, now),
        (item.c.loss_count, item.c.loss_count + 1),
    )
    if tx.execute(sa.update(item).where(*_is_same_delivery(tx, row)).ordered_values(*new_values)).rowcount == 0:
        return None
    if ItemRef.read(reference.event_type) is None:
        _extend_wait(tx, (row.instance_pk, row.run_number, row.step_key))
    next_delivery = replace(reference, queue=None, delivery=reference.delivery + 1)
    id_ = task_id(reference.event_type, row.instance_pk, row.run_number)
    message = build_replying_task_message(row.task, id_=id_, reference=next_delivery)
    outbox.insert(tx, [message], pk=row.instance_pk, run_number=row.run_number, step_key=row.step_key, grace=grace)
    return message


def record_sent_again(tx: Tx, reference: TaskReference, sent_in: timedelta | None) -> None:
    """Record that a task sends itself again (a retry) in this time, so that earlier searches do not apply.

    None: other tasks do its work (`Task.replace`). No search could find them, so none looks for them.
    """
    row = _find_attempt(tx, reference)
    if row is not None and row.loss_count == reference.delivery and row.sent_at is not None:
        sent_at = None if sent_in is None else tx.store.clock() + duration_us(sent_in)
        tx.execute(sa.update(tx.t.item).where(*_is_same_delivery(tx, row)).values(sent_at=sent_at))


def _is_same_delivery(tx: Tx, row: Any) -> list[sa.ColumnElement[bool]]:
    """Conditions for the item of an attempt: it is out, and was not sent again after ``row`` was read."""
    item = tx.t.item.c
    names = ("instance_pk", "run_number", "step_key", "position", "attempts", "loss_count", "sent_at")
    return [item.status == ItemStatus.SENT.value, *(item[name] == getattr(row, name) for name in names)]


def _extend_wait(tx: Tx, step: StepKey) -> None:
    """Give a task step the new deadline of its task."""
    item, st, i = tx.t.item.c, tx.t.step, tx.t.instance
    due_at = sa.select(item.due_at).where(*_is_of_step(item, step)).scalar_subquery()
    tx.execute(sa.update(st).where(*_is_of_step(st.c, step)).values(wake_at=due_at))
    tx.execute(sa.update(i).where(i.c.id == step[0]).values(version=i.c.version + 1))


def _select_unanswered(s: Store) -> sa.Select[Any]:
    i = s.tables.instance.c
    named = (i.workflow == param("workflow", sa.String), i.instance_id == param("instance", sa.String))
    query = _select_awaited(s).add_columns(s.tables.item.c.task)
    return query.where(*named, i.run_number == param("run", sa.Integer))


@statement
def _unanswered_step(s: Store) -> Any:
    return _select_unanswered(s).where(*items.task_step_conditions(s))


@statement
def _unanswered_item(s: Store) -> Any:
    return _select_unanswered(s).where(*items.map_item_conditions(s))


def _find_attempt(tx: Tx, reference: TaskReference) -> Any:
    """Return the row of the attempt that a reference names; None if no step waits for it, or if it is forged."""
    ref = reference.ref
    where = {"workflow": ref.workflow, "instance": ref.instance_id, "run": ref.run_number}
    row = items.find_sent_attempt(
        tx, reference, step_statement=_unanswered_step, item_statement=_unanswered_item, **where
    )
    is_genuine = row is not None and hmac.compare_digest(row.attempt_token.encode(), reference.token.encode())
    return row if is_genuine else None


def find_awaiting_step(tx: Tx, reference: TaskReference) -> str | None:
    """Return the name of the step that waits for this attempt; None if no step does, or if the reference is forged."""
    row = _find_attempt(tx, reference)
    return None if row is None else row.name


@statement
def _select_abandoned(s: Store) -> Any:
    """Select a row if no step will take the answer of a task. Only of a cancelled run, the steps are searched."""
    i, r, st = s.tables.instance.c, s.tables.run.c, s.tables.step.c
    number = param("run", sa.Integer)
    is_its_step = sa.or_(st.step_key == param("step_key", sa.String), st.wait_event_type == param("type", sa.String))
    is_cancelled = sa.exists().where(
        r.instance_pk == i.id, r.run_number == i.run_number, r.cancel_requested_at.is_not(None),
        st.instance_pk == r.instance_pk, st.run_number == r.run_number,
        st.status == StepStatus.CANCELLED.value, is_its_step,
    )  # fmt: skip
    is_over = sa.or_(i.status == Status.TERMINATED.value, is_cancelled)
    named = (i.workflow == param("workflow", sa.String), i.instance_id == param("instance", sa.String))
    return sa.select(i.id).where(*named, sa.or_(i.run_number > number, sa.and_(i.run_number == number, is_over)))


def is_abandoned(tx: Tx, reference: TaskReference) -> bool:
    """Return whether the run of a task was terminated or replaced, or a cancel has ended its step."""
    ref, item = reference.ref, ItemRef.read(reference.event_type)
    task = {"step_key": None if item is None else item.step_key, "type": reference.event_type}
    run = {"workflow": ref.workflow, "instance": ref.instance_id, "run": ref.run_number}
    return tx.run(_select_abandoned, **run, **task).first() is not None
