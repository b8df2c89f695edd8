"""Inventories: who of the workers lives, and what it holds; in the rows of their heartbeats.

One process at a time searches for lost tasks. It calls the roll by writing a number into its row, and every worker
answers in its own: with the number, and with the ids of the tasks that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import from_us
from celery_durable.store.engine import Store, Tx, param, statement

BEAT = timedelta(seconds=2)
"""How often a worker says that it lives, and looks for a inventory."""
SILENT = timedelta(seconds=10)
"""A worker that is not heard of for so long counts as dead."""
REPLACED = timedelta(seconds=3)
"""The same where another process has begun since under the same node name."""


@statement
def _see(s: Store) -> Any:
    h = s.tables.heartbeat
    answered = sa.func.coalesce(h.c.answered_inventory, 0)
    return sa.update(h).where(h.c.id == param("id")).values(seen_at=s.clock(), answered_inventory=answered)


@statement
def _newest(s: Store) -> Any:
    return sa.select(sa.func.max(s.tables.heartbeat.c.inventory))


def beat(tx: Tx, id_: str) -> int:
    """A worker lives, and can answer a inventory; answers with the newest one, 0: there was none.

    A row that is not there yet is written by the ordinary heartbeat.
    """
    tx.run(_see, id=id_)
    return int(tx.run(_newest).scalar() or 0)


def note_passed(tx: Tx, id_: str, markers: Sequence[str]) -> None:
    """A worker has received these markers."""
    h = tx.t.heartbeat
    tx.execute(sa.update(h).where(h.c.id == id_).values(passed_markers=json.dumps(list(markers))))


def answer(tx: Tx, id_: str, number: int, held: Sequence[str]) -> None:
    """A worker answers a inventory: these tasks it holds."""
    h = tx.t.heartbeat
    new: dict[str, Any] = {"answered_inventory": number, "held_tasks": json.dumps(list(held))}
    tx.execute(sa.update(h).where(h.c.id == id_).values(new))


def call(tx: Tx, id_: str) -> int | None:
    """Call the roll, as the process with this row; None where it has none.

    The number is above all that anybody has called or answered, also after the database's clock went back: a worker
    that had answered a higher one would seem to have answered this.
    """
    h = tx.t.heartbeat
    called, answered = sa.func.max(h.c.inventory).label("called"), sa.func.max(h.c.answered_inventory).label("answered")
    row: Any = tx.execute(sa.select(called, answered, tx.store.clock().label("now_us"))).one()
    number = max(row.now_us, (row.called or 0) + 1, (row.answered or 0) + 1)
    done = tx.execute(sa.update(h).where(h.c.id == id_).values(inventory=number))
    return number if done.rowcount else None


@statement
def _stand(s: Store) -> Any:
    h = s.tables.heartbeat
    called = sa.func.coalesce(h.c.inventory, 0)
    return sa.update(h).where(h.c.id == param("id")).values(seen_at=s.clock(), inventory=called)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process, as its row says. ``silent``: for how long. ``inventory`` None: it does not search for lost tasks."""

    id: str
    is_worker: bool
    pool: str | None
    node: str
    queues: frozenset[str]
    started_at: datetime
    since_seen: timedelta
    inventory: int | None
    answered: int | None
    held: frozenset[str]
    received_markers: frozenset[str]


def stand(tx: Tx, id_: str) -> list[Peer]:
    """Say that the process with this row would search for lost tasks; answers with all processes."""
    tx.run(_stand, id=id_)
    h = tx.t.heartbeat.c
    columns = (h.id, h.kind, h.pool, h.node, h.queues, h.started_at, h.seen_at)
    more = (h.inventory, h.answered_inventory, h.held_tasks, h.passed_markers)
    return [
        Peer(
            id=row.id,
            is_worker=row.kind == "worker",
            pool=row.pool,
            node=row.node,
            queues=frozenset(json.loads(row.queues)),
            started_at=from_us(row.started_at),
            since_seen=timedelta(microseconds=row.now_us - row.seen_at),
            inventory=row.inventory,
            answered=row.answered_inventory,
            held=frozenset(json.loads(row.held_tasks or "[]")),
            received_markers=frozenset(json.loads(row.passed_markers or "[]")),
        )
        for row in tx.execute(sa.select(*columns, *more, tx.store.clock().label("now_us")))
    ]
