"""The items of maps: which Celery tasks are out, which are to be sent, and what came of those that have answered.

An answer is written by whoever takes it, who also sends the next item that is due: the instance sleeps on. It is
woken when all have answered, or one has failed that may be tried again; what then is to be done its pass decides.
Everything happens under the lock of the instance's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    OPEN_ITEMS,
    Due,
    InstanceRow,
    ItemCounts,
    ItemRef,
    ItemStatus,
    Outgoing,
    Status,
    StepStatus,
    StepType,
    Wake,
    from_us,
    task_id,
    to_us,
)
from celery_durable.store import instances, outbox
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.values import answering_task, error_in

_OPEN = [status.value for status in OPEN_ITEMS]


@dataclass(frozen=True, slots=True)
class Map:
    """The map step of a run. ``timeout``: of each attempt. ``at_once``: how many may be out, None: all."""

    workflow: str
    instance_id: str
    pk: int
    run_number: int
    step_key: str
    timeout: timedelta
    at_once: int | None = None

    @property
    def where(self) -> dict[str, Any]:
        return {"pk": self.pk, "run": self.run_number, "key": self.step_key}


def _of(s: Store) -> list[sa.ColumnElement[bool]]:
    item = s.tables.item.c
    return [
        item.instance_pk == param("pk", sa.BigInteger),
        item.run_number == param("run", sa.Integer),
        item.step_key == param("key", sa.String),
    ]


def _in(s: Store, *statuses: ItemStatus) -> sa.ColumnElement[bool]:
    return s.tables.item.c.status.in_([sa.literal_column(f"'{status.value}'") for status in statuses])


# --- begin --------------------------------------------------------------------------------------


@statement
def _insert(s: Store) -> Any:
    values = {
        "instance_pk": param("pk"),
        "run_number": param("run"),
        "step_key": param("key"),
        "place": param("place"),
        "status": ItemStatus.PENDING.value,
        "attempts": 0,
        "body": param("body"),
    }
    return sa.insert(s.tables.item).values(values).inline()


def insert(tx: Tx, map_: Map, bodies: Sequence[str]) -> None:
    """All items of a map that begins, to be sent; ``bodies``: of their tasks, as `values.map_task` makes them.

    What a retried run had done is there already, and stays, unless the items are others by now.
    """
    item = tx.t.item
    mine = (item.c.instance_pk == map_.pk, item.c.run_number == map_.run_number, item.c.step_key == map_.step_key)
    kept = {row.place: row.body for row in tx.execute(sa.select(item.c.place, item.c.body).where(*mine))}
    if any(place >= len(bodies) or bodies[place] != body for place, body in kept.items()):
        tx.execute(sa.delete(item).where(*mine))
        kept = {}
    new = [{"place": place, "body": body} for place, body in enumerate(bodies) if place not in kept]
    tx.run_many(_insert, [map_.where | each for each in new])


# --- send ---------------------------------------------------------------------------------------


@statement
def _ready(s: Store) -> Any:
    item = s.tables.item.c
    is_ready = sa.or_(item.due_at.is_(None), item.due_at <= s.clock())
    return (
        sa.select(item.place, item.attempts, item.body, s.clock().label("now_us"))
        .where(*_of(s), _in(s, ItemStatus.PENDING), is_ready)
        .order_by(item.place)
        .limit(param("limit", sa.Integer))
    )


@statement
def _mark(s: Store) -> Any:
    item = s.tables.item
    return (
        sa.update(item)
        .where(*_of(s), item.c.place == param("nth", sa.Integer))
        .values(
            status=param("new_status", sa.String),
            attempts=param("new_attempts", sa.Integer),
            due_at=param("new_due_us", sa.BigInteger),
            answer=param("new_answer", sa.Text),
        )
    )


_MOST = 2**31 - 1


def send(tx: Tx, map_: Map, *, room: int | None) -> list[Outgoing]:
    """Mark what is ready as sent, up to ``room`` items; answers with the letters, for the outbox."""
    limit = _MOST if room is None else max(room, 0)
    found = tx.run(_ready, **map_.where, limit=limit).all() if limit else []
    letters, marks = [], []
    for row in found:
        attempt = row.attempts + 1
        asked = ItemRef(map_.pk, map_.step_key, row.place, attempt).type
        id_ = task_id(asked, map_.pk, map_.run_number)
        letters.append(
            answering_task(row.body, id_=id_, answers=(map_.workflow, map_.instance_id, map_.run_number, asked))
        )
        deadline = from_us(row.now_us) + map_.timeout
        marks.append(_as(map_, row.place, ItemStatus.SENT, attempts=attempt, due_at=deadline))
    tx.run_many(_mark, marks)
    return letters


def _as(
    map_: Map,
    place: int,
    status: ItemStatus,
    *,
    attempts: int,
    due_at: datetime | None = None,
    answer: str | None = None,
) -> dict[str, Any]:
    due_us = None if due_at is None else to_us(due_at)
    new = {"new_status": status.value, "new_attempts": attempts, "new_due_us": due_us, "new_answer": answer}
    return map_.where | {"nth": place} | new


# --- judge, in a pass ---------------------------------------------------------------------------


def _has_fallen(s: Store) -> sa.ColumnElement[bool]:
    is_late = sa.and_(_in(s, ItemStatus.SENT), s.tables.item.c.due_at <= param("now_us", sa.BigInteger))
    return sa.or_(_in(s, ItemStatus.FAILED), is_late)


@statement
def _any_to_judge(s: Store) -> Any:
    return sa.select(s.tables.item.c.place).where(*_of(s), _has_fallen(s)).limit(1)


@statement
def _to_judge(s: Store) -> Any:
    item = s.tables.item.c
    columns = (item.place, item.status, item.attempts, item.answer)
    return sa.select(*columns).where(*_of(s), _has_fallen(s)).order_by(item.place)


@statement
def _standing(s: Store) -> Any:
    item = s.tables.item.c
    is_timer = sa.or_(
        _in(s, ItemStatus.SENT),
        # What could have been sent by now waits for room, which an answer makes.
        sa.and_(_in(s, ItemStatus.PENDING), item.due_at > param("now_us", sa.BigInteger)),
    )
    first = sa.func.min(sa.case((is_timer, item.due_at)))
    count = sa.func.count().label("n")
    return sa.select(item.status, count, first.label("first_us")).where(*_of(s)).group_by(item.status)


@dataclass(frozen=True, slots=True)
class Standing:
    """How many items are out, and open in all; and when there is something to do without an answer, None: never."""

    sent: int
    open: int
    next_at: datetime | None


def standing(tx: Tx, map_: Map, *, now: datetime) -> Standing:
    """How a map stands."""
    rows = {row.status: row for row in tx.run(_standing, **map_.where, now_us=to_us(now))}
    times = [row.first_us for row in rows.values() if row.first_us is not None]
    return Standing(
        sent=sum(row.n for status, row in rows.items() if status == ItemStatus.SENT.value),
        open=sum(row.n for status, row in rows.items() if status in _OPEN),
        next_at=from_us(min(times)) if times else None,
    )


@dataclass(frozen=True, slots=True)
class Fallen:
    """An item whose attempt has failed; ``answer`` None: its time is over."""

    place: int
    attempts: int
    answer: str | None


def to_judge(tx: Tx, map_: Map, *, now: datetime) -> list[Fallen]:
    """What has failed, or is late."""
    rows = tx.run(_to_judge, **map_.where, now_us=to_us(now))
    return [
        Fallen(row.place, row.attempts, row.answer if row.status == ItemStatus.FAILED.value else None) for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of an item that has fallen: it is sent again, not ``again_at`` before, or (None) has failed."""

    fallen: Fallen
    answer: str
    again_at: datetime | None


def judge(tx: Tx, map_: Map, verdicts: Sequence[Verdict]) -> None:
    """Carry these out. A task that is late and has not even left need not do so any more."""
    marks = []
    for each in verdicts:
        status = ItemStatus.DEAD if each.again_at is None else ItemStatus.PENDING
        attempts, answer = each.fallen.attempts, each.answer
        marks.append(_as(map_, each.fallen.place, status, attempts=attempts, due_at=each.again_at, answer=answer))
    tx.run_many(_mark, marks)
    late = [each.fallen for each in verdicts if each.fallen.answer is None]
    refs = [ItemRef(map_.pk, map_.step_key, each.place, each.attempts) for each in late]
    outbox.recall(tx, [task_id(ref.type, map_.pk, map_.run_number) for ref in refs])


def wants_a_pass(tx: Tx, map_: Map, *, now: datetime) -> bool:
    """Whether there is something to do that no answer will bring about."""
    if tx.run(_any_to_judge, **map_.where, now_us=to_us(now)).first() is not None:
        return True
    stands = standing(tx, map_, now=now)
    if not stands.open:
        return True
    is_full = map_.at_once is not None and stands.sent >= map_.at_once
    return not is_full and tx.run(_ready, **map_.where, limit=1).first() is not None


# --- answers ------------------------------------------------------------------------------------


@statement
def _asking(s: Store) -> Any:
    st = s.tables.step.c
    return sa.select(st.max_attempts, st.timeout_ms).where(
        st.instance_pk == param("pk"),
        st.run_number == param("run"),
        st.step_key == param("key"),
        st.type == sa.literal_column(f"'{StepType.MAP.value}'"),
        st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'"),
    )


@statement
def _answer(s: Store) -> Any:
    item = s.tables.item
    return (
        sa.update(item)
        .where(
            *_of(s),
            _in(s, ItemStatus.SENT),
            item.c.place == param("nth", sa.Integer),
            item.c.attempts == param("attempt", sa.Integer),
        )
        .values(status=param("new_status", sa.String), answer=param("new_answer", sa.Text), due_at=None)
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """An answer was taken: ``dues`` is to be woken, ``letters`` are to be sent."""

    dues: list[Due]
    letters: list[Outgoing]


def answer(
    tx: Tx,
    row: InstanceRow,
    item: ItemRef,
    *,
    payload: str,
    grace: timedelta,
) -> Taken | None:
    """Take what the task of an item of a locked instance answers; None where nobody waits for it, or has it already.

    Late or not, it counts until a pass has judged the item. While the instance is paused nothing is sent after it.
    """
    key = item.step_key
    asking = tx.run(_asking, pk=row.pk, run=row.run_number, key=key).first()
    if asking is None or row.status.is_terminal or item.pk != row.pk:
        return None
    timeout = timedelta(milliseconds=asking.timeout_ms)
    map_ = Map(row.workflow, row.instance_id, row.pk, row.run_number, key, timeout)
    status = ItemStatus.DONE
    if (error := error_in(payload)) is not None:
        is_last = asking.max_attempts is not None and item.attempt >= asking.max_attempts
        status = ItemStatus.DEAD if is_last or error.is_final else ItemStatus.FAILED
    given = {"nth": item.place, "attempt": item.attempt, "new_status": status.value, "new_answer": payload}
    if tx.run(_answer, **map_.where, **given).rowcount == 0:
        return None
    is_paused = row.status is Status.PAUSED or row.pause_requested
    letters = [] if is_paused else send(tx, map_, room=1)
    outbox.insert(tx, letters, pk=row.pk, run_number=row.run_number, step_key=key, grace=grace)
    wants = status is ItemStatus.FAILED or (not letters and is_over(tx, row.pk, row.run_number, key))
    is_asleep = row.status is Status.WAITING and row.claim_token is None
    dues = [instances.make_due(tx, row, wake=Wake.WAKE, grace=grace)] if wants and is_asleep else []
    return Taken(dues, letters)


@statement
def _any_open(s: Store) -> Any:
    return sa.select(s.tables.item.c.place).where(*_of(s), _in(s, *OPEN_ITEMS)).limit(1)


def is_over(tx: Tx, pk: int, run_number: int, step_key: str) -> bool:
    """Whether no item of a map is under way any more, or to be sent."""
    return tx.run(_any_open, pk=pk, run=run_number, key=step_key).first() is None


# --- read ---------------------------------------------------------------------------------------


def answers(tx: Tx, pk: int, run_number: int, step_key: str) -> list[tuple[str, int]]:
    """What each item answered, as JSON text, and after how many attempts; in their order."""
    item = tx.t.item.c
    mine = (item.instance_pk == pk, item.run_number == run_number, item.step_key == step_key)
    rows = tx.execute(sa.select(item.answer, item.attempts).where(*mine).order_by(item.place))
    return [(row.answer, row.attempts) for row in rows]


def first_error(tx: Tx, map_: Map) -> tuple[int, str, int] | None:
    """Place, answer and attempts of the first item that has failed for good."""
    item = tx.t.item.c
    mine = (item.instance_pk == map_.pk, item.run_number == map_.run_number, item.step_key == map_.step_key)
    query = sa.select(item.place, item.answer, item.attempts).where(*mine, item.status == ItemStatus.DEAD.value)
    row = tx.execute(query.order_by(item.place).limit(1)).first()
    return None if row is None else (row.place, row.answer, row.attempts)


def counts(tx: Tx, pk: int, run_number: int) -> dict[str, ItemCounts]:
    """How far each map of a run has come, by step key."""
    item = tx.t.item.c
    query = (
        sa.select(
            item.step_key,
            sa.func.count().label("total"),
            sa.func.count(sa.case((item.status == ItemStatus.DONE.value, 1))).label("done"),
            sa.func.count(sa.case((item.status == ItemStatus.DEAD.value, 1))).label("failed"),
        )
        .where(item.instance_pk == pk, item.run_number == run_number)
        .group_by(item.step_key)
    )
    return {row.step_key: ItemCounts(row.total, row.done, row.failed) for row in tx.execute(query)}
