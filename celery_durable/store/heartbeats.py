"""Who sweeps, who works, and what they know: a row per process that it renews each ten seconds.

For people who ask why nothing moves, and for nothing else: nobody decides anything by these rows, so they are written
without locks and at best effort.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa

from celery_durable.model import Heartbeat, from_us, span_us
from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.store.journal import maybe_at

KEPT = timedelta(hours=1)
"""How long the row of a process stays that is heard of no more."""

_MOST = 1000


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a process says of itself. ``swept_ago``, ``wakes_in``: on its own steady clock, told as lengths of time."""

    id: str
    kind: Literal["dispatcher", "worker"]
    node: str
    pid: int
    queues: Sequence[str] = ()
    workflows: Sequence[str] = ()
    swept_ago: timedelta | None = None
    wakes_in: timedelta | None = None


@statement
def _beat(s: Store) -> Any:
    now = s.clock()
    values = {
        "id": param("id", sa.String),
        "kind": param("kind", sa.String),
        "node": param("node", sa.String),
        "pid": param("pid", sa.BigInteger),
        "queues": param("queues", sa.Text),
        "workflows": param("workflows", sa.Text),
        "started_at": now,
        "seen_at": now,
        "swept_at": now - param("swept_us", sa.BigInteger),
        "next_wake_at": now + param("wakes_us", sa.BigInteger),
    }
    return dialects.insert_or_update(s.database, s.tables.heartbeat, values, ("id",), keep=("started_at",))


def upsert(tx: Tx, pulse: Pulse) -> None:
    """Insert the process's row, or renew it."""
    tx.run(
        _beat,
        id=pulse.id,
        kind=pulse.kind,
        node=pulse.node[:255],
        pid=pulse.pid,
        queues=json.dumps(list(pulse.queues)),
        workflows=json.dumps(list(pulse.workflows)),
        swept_us=None if pulse.swept_ago is None else span_us(pulse.swept_ago),
        wakes_us=None if pulse.wakes_in is None else span_us(pulse.wakes_in),
    )


def delete(tx: Tx, id_: str) -> None:
    """Remove the row of a process that ends."""
    tx.execute(sa.delete(tx.t.heartbeat).where(tx.t.heartbeat.c.id == id_))


def delete_old(tx: Tx) -> None:
    """Remove the rows of processes that nobody has heard of for `KEPT`."""
    h = tx.t.heartbeat
    tx.execute(sa.delete(h).where(h.c.seen_at < tx.store.clock() - span_us(KEPT)))


def read(tx: Tx) -> tuple[datetime, tuple[Heartbeat, ...]]:
    """The database's time, and the processes, those seen last first."""
    now = from_us(tx.execute(sa.select(tx.store.clock())).scalar_one())
    h = tx.t.heartbeat
    rows = tx.execute(sa.select(h).order_by(h.c.seen_at.desc(), h.c.id).limit(_MOST))
    return now, tuple(
        Heartbeat(
            id=row.id,
            kind=row.kind,
            node=row.node,
            pid=row.pid,
            queues=tuple(json.loads(row.queues)),
            workflows=tuple(json.loads(row.workflows)),
            started_at=from_us(row.started_at),
            seen_at=from_us(row.seen_at),
            swept_at=maybe_at(row.swept_at),
            next_wake_at=maybe_at(row.next_wake_at),
        )
        for row in rows
    )
