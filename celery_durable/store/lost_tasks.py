"""Lost tasks: which tasks are out, and what happens if a worker, a machine or a queue loses one.

A lost task is sent again under the same task id and attempt, with the next delivery number: the item's ``loss_count``.
A report names the delivery that was lost, and only one of the newest delivery counts. The loss of a map's item locks
the item's row alone, not the instance's. It may race with an answer: the first write wins.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
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
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import items, outbox
from celery_durable.values import build_replying_task_message

_ENDED = [status.value for status in Status if status.is_terminal]
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
    item, st = tx.t.item.c, tx.t.step.c
    key = (item.sent_at, item.instance_pk, item.run_number, item.step_key, item.position)
    query = (
        _select_awaited(tx.store)
        .add_columns(item.missing_at, st.type, st.wait_event_type)
        .where(*_is_searched(tx), item.sent_at <= to_us(before), item.on_lost != _WAIT)
        .order_by(*key)
    )
    rows = tx.execute(query.limit(limit).offset(offset)).all()
    database_id = find_database_id(tx) if rows else None
    # Without an id, which only emptied tables lack, no answer to these tasks would be accepted.
    tasks = [] if database_id is None else [_sent_task(row, database_id) for row in rows]
    unsent: set[str] = set()
    for start in range(0, len(tasks), _CHUNK):
        unsent |= outbox.find_existing(tx, [each.id for each in tasks[start : start + _CHUNK]])
    return [each for each in tasks if each.id not in unsent], len(rows) == limit


def _is_searched(tx: Tx) -> tuple[sa.ColumnElement[bool], ...]:
    """The condition of the index of sent items."""
    item = tx.t.item.c
    return item.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"), item.sent_at > sa.literal_column("0")


def _select_awaited(s: Store) -> sa.Select[Any]:
    """Select the attempts of tasks with the steps of current runs that wait for them."""
    i, item, st = s.tables.instance, s.tables.item.c, s.tables.step.c
    columns = (
        item.instance_pk, item.run_number, item.step_key, item.position, item.attempts, item.loss_count,
        item.attempt_token, item.sent_at, item.on_lost, i.c.workflow, i.c.instance_id, st.name,
    )  # fmt: skip
    mine = sa.and_(i.c.id == item.instance_pk, i.c.run_number == item.run_number)
    is_awaited = (
        st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'"),
        i.c.status.not_in([sa.literal_column(f"'{status}'") for status in _ENDED]),
    )
    return sa.select(*columns).select_from(items.join_step(s).join(i, mine)).where(*is_awaited)


def read_oldest_sent(tx: Tx) -> list[tuple[str | None, str | None, datetime, int]]:
    """Return where the oldest tasks were sent (queue, or encoded task if its route decides), since when, how many."""
    item, i, st = tx.t.item, tx.t.instance, tx.t.step
    oldest = sa.select(item).where(*_is_searched(tx)).order_by(item.c.sent_at).limit(_MAX_OLDEST).subquery()
    o = oldest.c
    routed = sa.case((o.queue.is_(None), o.task)).label("routed")
    is_awaited = (i.c.status.not_in(_ENDED), st.c.status == StepStatus.WAITING.value)
    query = (
        sa.select(o.queue, routed, sa.func.min(o.sent_at).label("at"), sa.func.count().label("n"))
        .select_from(oldest)
        .join(i, sa.and_(i.c.id == o.instance_pk, i.c.run_number == o.run_number))
        .join(st, sa.and_(st.c.instance_pk == i.c.id, st.c.run_number == i.c.run_number, st.c.step_key == o.step_key))
        .where(*is_awaited)
        .group_by(o.queue, routed)
    )
    return [(row.queue, row.routed, from_us(row.at), row.n) for row in tx.execute(query)]


def _sent_task(row: Any, database_id: str) -> SentTask:
    event_type = row.wait_event_type
    if items.has_items(row):
        event_type = ItemRef(row.instance_pk, row.step_key, row.position, row.attempts).type
    ref = RunRef(row.workflow, row.instance_id, row.run_number)
    reference = TaskReference(database_id, ref, event_type, row.attempt_token, delivery=row.loss_count)
    missing_at = None if row.missing_at is None or row.missing_at < row.sent_at else from_us(row.missing_at)
    return SentTask(
        reference, (row.instance_pk, row.run_number, row.step_key), row.position, from_us(row.sent_at), missing_at
    )


def read_bodies(tx: Tx, tasks: Sequence[SentTask]) -> dict[StepKey, str]:
    """Return the stored body of one task of each step, for `values.build_replying_task_message`."""
    item = tx.t.item.c
    key = (item.instance_pk, item.run_number, item.step_key, item.position)
    firsts = list({each.step: (*each.step, each.position) for each in tasks}.values())
    found: dict[StepKey, str] = {}
    for start in range(0, len(firsts), _CHUNK):
        wanted = sa.tuple_(*key).in_(firsts[start : start + _CHUNK])
        for row in tx.execute(sa.select(*key, item.task).where(wanted)):
            found[row.instance_pk, row.run_number, row.step_key] = row.task
    return found


def read_last_answered(tx: Tx, step: StepKey) -> dict[datetime, int]:
    """Return by the time of sending the last position among the answered items of a map."""
    item = tx.t.item.c
    query = sa.select(item.sent_at, sa.func.max(item.position).label("last")).group_by(item.sent_at)
    is_answered = (item.status != ItemStatus.SENT.value, item.sent_at.is_not(None))
    return {from_us(row.sent_at): row.last for row in tx.execute(query.where(*_is_of_step(item, step), *is_answered))}


def record_missing(tx: Tx, step: StepKey, positions: Sequence[int]) -> None:
    """Record that no worker holds these tasks of a step, and that their messages have left the queue."""
    item = tx.t.item
    is_out = (item.c.position.in_(positions), item.c.status == ItemStatus.SENT.value)
    tx.execute(sa.update(item).where(*_is_of_step(item.c, step), *is_out).values(missing_at=tx.store.clock()))


def _is_of_step(columns: Any, step: StepKey) -> tuple[sa.ColumnElement[bool], ...]:
    return columns.instance_pk == step[0], columns.run_number == step[1], columns.step_key == step[2]


# --- what is lost -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resend:
    message: OutboxMessage


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The task is not sent again. ``name`` is the Celery task; ``loss_count`` includes this loss."""

    name: str
    loss_count: int


def report_loss(
    tx: Tx, reference: TaskReference, *, sent_by: datetime | None, limit: int, grace: timedelta
) -> Resend | GiveUp | None:
    """Report that a delivery of a task is lost. Returns whether the task is sent again or given up.

    Returns None if the attempt has ended, another delivery is under way, or the step says ``on_lost="wait"`` and the
    reporter did not see the task die. ``sent_by``: the lost message was sent by this time; a task that has since sent
    itself again is not lost. None: the reporter saw the task die. At its ``limit``-th loss a task is given up.

    A task that is sent again gets its time anew. The deadline of a task step is in the step's row, so the caller has
    locked the instance. A pass finds the later deadlines of a map's items by itself.
    """
    row = _find_attempt(tx, reference)
    if row is None or row.loss_count != reference.delivery:
        return None
    if sent_by is not None and (row.on_lost == _WAIT or row.sent_at is None or row.sent_at > to_us(sent_by)):
        return None
    if not hmac.compare_digest(row.attempt_token.encode(), reference.token.encode()):
        return None
    if row.on_lost == _FAIL or row.loss_count + 1 >= limit:
        return GiveUp(json.loads(row.task)["name"], row.loss_count + 1)
    where = {"pk": row.instance_pk, "run": row.run_number, "key": row.step_key, "position": row.position}
    mine = {"attempt": row.attempts, "delivery": reference.delivery, "sent_us": row.sent_at}
    if tx.run(_count_loss, **where, **mine).rowcount == 0:
        return None
    if ItemRef.read(reference.event_type) is None:
        _extend_wait(tx, (row.instance_pk, row.run_number, row.step_key))
    next_delivery = replace(reference, queue=None, delivery=reference.delivery + 1)
    id_ = task_id(reference.event_type, row.instance_pk, row.run_number)
    message = build_replying_task_message(row.task, id_=id_, reference=next_delivery)
    outbox.insert(tx, [message], pk=row.instance_pk, run_number=row.run_number, step_key=row.step_key, grace=grace)
    return Resend(message)


@statement
def _count_loss(s: Store) -> Any:
    item, now = s.tables.item, s.clock()
    return (
        sa.update(item)
        .where(
            item.c.instance_pk == param("pk", sa.BigInteger),
            item.c.run_number == param("run", sa.Integer),
            item.c.step_key == param("key", sa.String),
            item.c.position == param("position", sa.Integer),
            item.c.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"),
            item.c.attempts == param("attempt", sa.Integer),
            item.c.loss_count == param("delivery", sa.Integer),
            sa.func.coalesce(item.c.sent_at, 0) == sa.func.coalesce(param("sent_us", sa.BigInteger), 0),
        )
        .ordered_values(  # MariaDB lets later assignments see earlier ones
            (item.c.due_at, item.c.due_at + now - sa.func.coalesce(item.c.sent_at, now)),
            (item.c.sent_at, now),
            (item.c.loss_count, item.c.loss_count + 1),
        )
    )


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
    """Return the row of the attempt that a reference names, if its step still waits for it."""
    ref = reference.ref
    where = {"workflow": ref.workflow, "instance": ref.instance_id, "run": ref.run_number}
    return items.find_sent_attempt(
        tx, reference, step_statement=_unanswered_step, item_statement=_unanswered_item, **where
    )


def find_step_name(tx: Tx, reference: TaskReference) -> str | None:
    """Return the name of the step that waits for this attempt; None if no step does, or if the reference is forged."""
    row = _find_attempt(tx, reference)
    is_genuine = row is not None and hmac.compare_digest(row.attempt_token.encode(), reference.token.encode())
    return row.name if is_genuine else None


def is_unanswered(tx: Tx, reference: TaskReference) -> bool:
    """Return whether the step or the item still waits for this attempt."""
    return _find_attempt(tx, reference) is not None


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


# --- retries and replacements --------------------------------------------------------------------


def record_retry(tx: Tx, reference: TaskReference, *, sent_in: timedelta) -> None:
    """Record that the task sends itself again in ``sent_in`` (a retry), so earlier searches do not apply."""
    _update_sent_at(tx, reference, tx.store.clock() + duration_us(sent_in))


def record_replacement(tx: Tx, reference: TaskReference) -> None:
    """Record that other tasks do the work (`Task.replace`): no search can find them, and none looks for them."""
    _update_sent_at(tx, reference, None)


def _update_sent_at(tx: Tx, reference: TaskReference, sent_at: Any) -> None:
    row = _find_attempt(tx, reference)
    if row is None or row.loss_count != reference.delivery or row.sent_at is None:
        return
    item = tx.t.item.c
    mine = _is_of_step(item, (row.instance_pk, row.run_number, row.step_key))
    more = (item.position == row.position, item.attempts == row.attempts, item.loss_count == row.loss_count)
    tx.execute(sa.update(tx.t.item).where(*mine, *more, item.sent_at.is_not(None)).values(sent_at=sent_at))
