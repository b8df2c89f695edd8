"""Lost tasks: which tasks are out, and what happens if a worker, a machine or a queue loses one.

A lost task is sent again under the same task id and attempt, with the next delivery number. This number is the item's
``loss_count``: 0 for the first message of an attempt, and 1 more for each loss. A report of a loss names the delivery
that was lost. Only a report of the newest delivery counts, so several reports have one effect. A loss locks the item's
row alone, not the instance's. It may race with an answer: the first write wins.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
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
    StepType,
    TaskReference,
    duration_us,
    from_us,
    task_id,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.server_info import find_database_id
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import items, outbox
from celery_durable.store.schema.step_format import is_of_step
from celery_durable.values import build_replying_task_message

_ENDED = [status.value for status in Status if status.is_terminal]
_CHUNK = 200
_MAX_OLDEST = 1000
_FAIL: OnLost = "fail"
_WAIT: OnLost = "wait"


@dataclass(frozen=True, slots=True)
class SentTask:
    """A task that is out according to the database. ``sent_us`` is when its newest message was sent."""

    reference: TaskReference
    pk: int
    step_key: str
    position: int
    sent_us: int

    @property
    def id(self) -> str:
        """The Celery task id."""
        return task_id(self.reference.event_type, self.pk, self.reference.ref.run_number)

    @property
    def key(self) -> tuple[int, int, str, int]:
        return (self.pk, self.reference.ref.run_number, self.step_key, self.position)


# --- what is out --------------------------------------------------------------------------------


SentCursor = tuple[int, int, int, str, int]
"""The end of a page of tasks: when the last task was sent, and its key."""


@dataclass(frozen=True, slots=True)
class SentPage:
    """One page of tasks that are out. ``next`` is where the next page starts, or None after the last."""

    tasks: Sequence[SentTask]
    next: SentCursor | None


def read_sent(tx: Tx, *, age: timedelta, after: SentCursor | None, limit: int) -> SentPage:
    """Return tasks to search for: those whose newest message was sent at least ``age`` ago, oldest first.

    The items of a run that has ended may stay ``sent`` forever. They count towards ``limit`` but are left out of the
    page, so a page may be empty and still have a ``next``.
    """
    item, i, st = tx.t.item, tx.t.instance, tx.t.step
    key = (item.c.sent_at, item.c.instance_pk, item.c.run_number, item.c.step_key, item.c.position)
    query = (
        sa.select(*key, item.c.attempts, item.c.loss_count, item.c.attempt_token, i.c.workflow, i.c.instance_id)
        .add_columns(i.c.run_number.label("current"), i.c.status, st.c.type, st.c.status.label("step_status"))
        .add_columns(st.c.wait_event_type)
        .select_from(item.outerjoin(i, i.c.id == item.c.instance_pk).outerjoin(st, is_of_step(item, st)))
        .where(
            item.c.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"), item.c.sent_at > sa.literal_column("0")
        )
        .where(item.c.sent_at <= tx.store.clock() - duration_us(age))
        .where(item.c.on_lost != _WAIT)
        .order_by(*key)
        .limit(limit)
    )
    if after is not None:
        later = sa.and_(key[0] == after[0], sa.tuple_(*key[1:]) > after[1:])
        query = query.where(key[0] >= after[0], sa.or_(key[0] > after[0], later))
    rows = tx.execute(query).all()
    last = rows[-1] if len(rows) == limit else None
    awaited = [row for row in rows if _is_awaited(row)]
    database_id = find_database_id(tx) if awaited else None
    # Without an id, which only emptied tables lack, no answer to these tasks would be accepted.
    tasks = [] if database_id is None else [_sent_task(row, database_id) for row in awaited]
    return SentPage(tasks, None if last is None else _cursor_at(last))


def read_oldest_sent(tx: Tx) -> list[tuple[str | None, str | None, datetime, int]]:
    """Return where the oldest tasks that are out were sent: the queue, or the encoded task if its route decides.

    Each comes with the time of the oldest task and how many there are.
    """
    item, i, st = tx.t.item, tx.t.instance, tx.t.step
    oldest = (
        sa.select(item)
        .where(
            item.c.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"), item.c.sent_at > sa.literal_column("0")
        )
        .order_by(item.c.sent_at)
        .limit(_MAX_OLDEST)
        .subquery()
    )
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


def _cursor_at(row: Any) -> SentCursor:
    return row.sent_at, row.instance_pk, row.run_number, row.step_key, row.position


def _is_awaited(row: Any) -> bool:
    is_current = row.current == row.run_number and row.status not in _ENDED
    return is_current and row.step_status == StepStatus.WAITING.value


def _sent_task(row: Any, database_id: str) -> SentTask:
    event_type = row.wait_event_type
    if row.type == StepType.MAP.value:
        event_type = ItemRef(row.instance_pk, row.step_key, row.position, row.attempts).type
    ref = RunRef(row.workflow, row.instance_id, row.run_number)
    reference = TaskReference(database_id, ref, event_type, row.attempt_token, delivery=row.loss_count)
    return SentTask(reference, row.instance_pk, row.step_key, row.position, row.sent_at)


def _item_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    item = s.tables.item.c
    return [
        item.instance_pk == param("pk", sa.BigInteger),
        item.run_number == param("run", sa.Integer),
        item.step_key == param("key", sa.String),
        item.position == param("position", sa.Integer),
    ]


def exclude_unsent(tx: Tx, tasks: Sequence[SentTask]) -> list[SentTask]:
    """Return the tasks whose message has left the outbox. A message that is still there is not lost."""
    left: list[SentTask] = []
    for start in range(0, len(tasks), _CHUNK):
        part = tasks[start : start + _CHUNK]
        there = outbox.find_existing(tx, [each.id for each in part])
        left += [each for each in part if each.id not in there]
    return left


def read_bodies(tx: Tx, tasks: Sequence[SentTask]) -> dict[tuple[int, int, str, int], str]:
    """Return the stored bodies of these tasks by their keys, for `values.build_replying_task_message`."""
    item = tx.t.item.c
    key = (item.instance_pk, item.run_number, item.step_key, item.position)
    found: dict[tuple[int, int, str, int], str] = {}
    for start in range(0, len(tasks), _CHUNK):
        wanted = [each.key for each in tasks[start : start + _CHUNK]]
        for row in tx.execute(sa.select(*key, item.task).where(sa.tuple_(*key).in_(wanted))):
            found[row.instance_pk, row.run_number, row.step_key, row.position] = row.task
    return found


# --- what is lost -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resend:
    """The task is sent again: ``message`` is in the outbox."""

    message: OutboxMessage


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The task is not sent again. ``name`` is the Celery task; ``loss_count`` includes this loss."""

    name: str
    loss_count: int


def report_loss(
    tx: Tx, reference: TaskReference, *, sent_us: int | None, limit: int, grace: timedelta
) -> Resend | GiveUp | None:
    """Report that a delivery of a task is lost. Returns whether the task is sent again or given up.

    Returns None if there is nothing to do: the attempt has ended, another delivery is under way, or the step says
    ``on_lost="wait"`` and the reporter did not see the task die.

    ``sent_us`` is when the message was sent, as the reporter read it. A task that has since sent itself again (a
    retry) is not lost. None means that the reporter saw the task die. At its ``limit``-th loss a task is given up.
    """
    row = _find_attempt(tx, reference)
    if row is None or row.loss_count != reference.delivery or sent_us not in (None, row.sent_at):
        return None
    if not hmac.compare_digest(row.attempt_token.encode(), reference.token.encode()):
        return None
    if row.on_lost == _WAIT and sent_us is not None:
        return None
    if row.on_lost == _FAIL or row.loss_count + 1 >= limit:
        return GiveUp(json.loads(row.task)["name"], row.loss_count + 1)
    where = {"pk": row.instance_pk, "run": row.run_number, "key": row.step_key, "position": row.position}
    mine = {"attempt": row.attempts, "delivery": reference.delivery}
    if sent_us is None:
        updated = tx.run(_count_loss, **where, **mine)
    else:
        updated = tx.run(_count_loss_if_sent_at, **where, **mine, sent=sent_us)
    if updated.rowcount == 0:
        return None
    next_delivery = TaskReference(
        reference.database_id, reference.ref, reference.event_type, row.attempt_token, delivery=reference.delivery + 1
    )
    id_ = task_id(reference.event_type, row.instance_pk, row.run_number)
    message = build_replying_task_message(row.task, id_=id_, reference=next_delivery)
    outbox.insert(tx, [message], pk=row.instance_pk, run_number=row.run_number, step_key=row.step_key, grace=grace)
    return Resend(message)


@statement
def _count_loss(s: Store) -> Any:
    item = s.tables.item
    return (
        sa.update(item)
        .where(
            *_item_conditions(s),
            item.c.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"),
            item.c.attempts == param("attempt", sa.Integer),
            item.c.loss_count == param("delivery", sa.Integer),
        )
        .values(loss_count=item.c.loss_count + 1, sent_at=s.clock())
    )


@statement
def _count_loss_if_sent_at(s: Store) -> Any:
    return _count_loss.build(s).where(s.tables.item.c.sent_at == param("sent", sa.BigInteger))


def _select_unanswered(s: Store) -> sa.Select[Any]:
    i, item = s.tables.instance, s.tables.item
    columns = (
        "instance_pk",
        "run_number",
        "step_key",
        "position",
        "attempts",
        "loss_count",
        "attempt_token",
        "sent_at",
        "on_lost",
    )
    mine = sa.and_(i.c.id == item.c.instance_pk, i.c.run_number == item.c.run_number)
    return (
        sa.select(*[item.c[name] for name in columns], item.c.task, s.tables.step.c.name)
        .select_from(items.join_step(s).join(i, mine))
        .where(
            i.c.workflow == param("workflow", sa.String),
            i.c.instance_id == param("instance", sa.String),
            i.c.run_number == param("run", sa.Integer),
            i.c.status.not_in([sa.literal_column(f"'{status}'") for status in _ENDED]),
        )
    )


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


# --- retries and replacements --------------------------------------------------------------------


def record_retry(tx: Tx, reference: TaskReference, *, sent_in: timedelta) -> None:
    """Record that the task has sent itself again (a retry).

    A search that started earlier does not apply to this message. ``sent_in`` is the countdown of the retry: the
    broker may hold the message until then.
    """
    _update_sent_at(tx, reference, tx.store.clock() + duration_us(sent_in))


def record_replacement(tx: Tx, reference: TaskReference) -> None:
    """Record that other tasks do the work now (`Task.replace`).

    These tasks may have other ids, and their messages need not refer to the step. A search could not find them, so the
    item is not searched for any more.
    """
    _update_sent_at(tx, reference, None)


def _update_sent_at(tx: Tx, reference: TaskReference, sent_at: Any) -> None:
    row = _find_attempt(tx, reference)
    if row is None or row.loss_count != reference.delivery or row.sent_at is None:
        return
    item = tx.t.item.c
    mine = (item.instance_pk == row.instance_pk, item.run_number == row.run_number, item.step_key == row.step_key)
    more = (item.position == row.position, item.attempts == row.attempts, item.loss_count == row.loss_count)
    tx.execute(sa.update(tx.t.item).where(*mine, *more, item.sent_at.is_not(None)).values(sent_at=sent_at))
