"""Inventories: which workers are alive and which tasks they hold, in their heartbeat rows.

One process at a time searches for lost tasks. It starts an inventory by writing a number into its row. Every worker
answers in its own row, with the number and the ids of the tasks that it holds.

Before the inventory, the searching process sends a marker, a task that does nothing, to the queue that it searches. A
worker records the markers that it has received in its row. When a marker was received, all earlier messages of its
queue were received too (`tasks.lost.detection`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import from_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement

RENEW_INTERVAL = timedelta(seconds=2)
"""How often a worker renews its row and checks for an inventory."""
SILENT_AFTER = timedelta(seconds=10)
"""A worker that is silent for this time counts as dead."""
REPLACED_AFTER = timedelta(seconds=3)
"""A worker that is silent for this time counts as dead if another process replaced it.

That process has the same node name, started later, and was seen more recently.
"""


@statement
def _renew_worker(s: Store) -> Any:
    h = s.tables.heartbeat
    answered = sa.func.coalesce(h.c.answered_inventory, 0)
    return sa.update(h).where(h.c.id == param("id")).values(seen_at=s.clock(), answered_inventory=answered)


@statement
def _select_newest(s: Store) -> Any:
    return sa.select(sa.func.max(s.tables.heartbeat.c.inventory))


def renew_worker(tx: Tx, id_: str) -> int:
    """Renew a worker's row, and mark it as able to answer. Returns the number of the newest inventory, or 0.

    If the row does not exist yet, the ordinary heartbeat inserts it.
    """
    tx.run(_renew_worker, id=id_)
    return int(tx.run(_select_newest).scalar() or 0)


def record_received_markers(tx: Tx, id_: str, markers: Sequence[str]) -> None:
    """Record the markers that a worker has received."""
    h = tx.t.heartbeat
    tx.execute(sa.update(h).where(h.c.id == id_).values(received_markers=json.dumps(list(markers))))


def answer_inventory(tx: Tx, id_: str, number: int, held: Sequence[str]) -> None:
    """Answer an inventory with the tasks that a worker holds."""
    h = tx.t.heartbeat
    new: dict[str, Any] = {"answered_inventory": number, "held_tasks": json.dumps(list(held))}
    tx.execute(sa.update(h).where(h.c.id == id_).values(new))


def start_inventory(tx: Tx, id_: str) -> int | None:
    """Start an inventory as the process with this row. Returns its number, or None if the row does not exist.

    The number is above all numbers started or answered before, even if the database's clock went back. Otherwise a
    worker that had answered a higher number would seem to have answered this one.
    """
    h = tx.t.heartbeat
    started, answered = (
        sa.func.max(h.c.inventory).label("started"),
        sa.func.max(h.c.answered_inventory).label("answered"),
    )
    row: Any = tx.execute(sa.select(started, answered, tx.store.clock().label("now_us"))).one()
    number = max(row.now_us, (row.started or 0) + 1, (row.answered or 0) + 1)
    done = tx.execute(sa.update(h).where(h.c.id == id_).values(inventory=number))
    return number if done.rowcount else None


@statement
def _register_searcher(s: Store) -> Any:
    h = s.tables.heartbeat
    started = sa.func.coalesce(h.c.inventory, 0)
    return sa.update(h).where(h.c.id == param("id")).values(seen_at=s.clock(), inventory=started)


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process with a heartbeat row, alive or dead. ``since_seen`` is how long it has been silent.

    ``inventory`` is None if the process does not search for lost tasks.
    """

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


def register_searcher(tx: Tx, id_: str) -> list[ProcessRow]:
    """Mark the process with this row as one that can run the search for lost tasks. Returns all processes."""
    tx.run(_register_searcher, id=id_)
    h = tx.t.heartbeat.c
    columns = (h.id, h.kind, h.pool, h.node, h.queues, h.started_at, h.seen_at)
    more = (h.inventory, h.answered_inventory, h.held_tasks, h.received_markers)
    return [
        ProcessRow(
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
            received_markers=frozenset(json.loads(row.received_markers or "[]")),
        )
        for row in tx.execute(sa.select(*columns, *more, tx.store.clock().label("now_us")))
    ]
