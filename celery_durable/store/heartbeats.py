"""Heartbeats: one row per process that sweeps or works, renewed every ten seconds, without locks and at best effort.

They explain to an operator why nothing moves. Only the search for lost tasks (`tasks.lost`) decides by them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa

from celery_durable.model import (
    MAX_SWEEP_AGE,
    Heartbeat,
    Outage,
    TaskReference,
    duration_us,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.schema import dialects

KEEP_SILENT_FOR = timedelta(hours=1)
"""How long the row of a silent process is kept."""

_STUCK = 0
_MAX_ROWS = 1000
_MAX_ERROR_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class HeartbeatUpdate:
    """The state that a process reports. Its durations are by its own monotonic clock."""

    id: str
    kind: Literal["dispatcher", "worker"]
    node: str
    pid: int
    queues: Sequence[str] = ()
    workflows: Sequence[str] = ()
    swept_ago: timedelta | None = None
    wakes_in: timedelta | None = None
    pool: str | None = None
    outages: Sequence[tuple[Outage, timedelta]] = ()


@statement
def _upsert(s: Store) -> Any:
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
        "next_sweep_at": now + param("wakes_us", sa.BigInteger),
        "pool": param("pool", sa.String),
        "outages": param("outages", sa.Text),
    }
    return dialects.insert_or_update(s.database, s.tables.heartbeat, values, ("id",), keep=("started_at",))


def upsert(tx: Tx, update: HeartbeatUpdate) -> None:
    """Insert or renew the row of a process."""
    tx.run(
        _upsert,
        id=update.id,
        kind=update.kind,
        node=update.node[:255],
        pid=update.pid,
        queues=json.dumps(list(update.queues)),
        workflows=json.dumps(list(update.workflows)),
        swept_us=None if update.swept_ago is None else duration_us(update.swept_ago),
        wakes_us=None if update.wakes_in is None else duration_us(update.wakes_in),
        pool=None if update.pool is None else update.pool[:255],
        outages=_to_json(update.outages, _read_now(tx)) if update.outages else None,
    )


def _to_json(outages: Sequence[tuple[Outage, timedelta]], now: datetime) -> str:
    found = [
        {
            "what": outage.what,
            "where": outage.where,
            "since_us": to_us(now - duration),
            "error": outage.error[:_MAX_ERROR_LENGTH],
            "failures": outage.failures,
        }
        for outage, duration in outages
    ]
    return json.dumps(found)


def _from_json(text: str | None) -> tuple[Outage, ...]:
    return tuple(
        Outage(
            what=each["what"],
            where=each["where"],
            since=from_us(each["since_us"]),
            error=each["error"],
            failures=each["failures"],
        )
        for each in json.loads(text or "[]")
    )


def delete(tx: Tx, id_: str) -> None:
    """Delete the row of a process that ends."""
    tx.execute(sa.delete(tx.t.heartbeat).where(tx.t.heartbeat.c.id == id_))


def delete_old(tx: Tx) -> None:
    """Delete the rows of processes that have been silent for `KEEP_SILENT_FOR`."""
    h = tx.t.heartbeat
    tx.execute(sa.delete(h).where(h.c.seen_at < tx.store.clock() - duration_us(KEEP_SILENT_FOR)))


def has_recent_sweep(tx: Tx, *, excluding: str) -> bool:
    """Whether a process has swept recently. The row ``excluding`` does not count."""
    h = tx.t.heartbeat.c
    since = tx.store.clock() - duration_us(MAX_SWEEP_AGE)
    return tx.execute(sa.select(h.id).where(h.id != excluding, h.swept_at >= since).limit(1)).first() is not None


def read(tx: Tx) -> tuple[datetime, tuple[Heartbeat, ...]]:
    """Return the database's time, and the processes, most recently seen first."""
    h, clock = tx.t.heartbeat, sa.select(tx.store.clock().label("now_us")).subquery()
    columns = [each for each in h.c if each.name != "held_tasks"]  # it may be long
    query = sa.select(clock.c.now_us, *columns).select_from(clock.outerjoin(h, sa.true()))
    rows = tx.execute(query.order_by(h.c.seen_at.desc(), h.c.id).limit(_MAX_ROWS)).all()
    return from_us(rows[0].now_us), tuple(
        Heartbeat(
            id=row.id,
            kind=row.kind,
            node=row.node,
            pid=row.pid,
            queues=tuple(json.loads(row.queues)),
            workflows=tuple(json.loads(row.workflows)),
            started_at=from_us(row.started_at),
            seen_at=from_us(row.seen_at),
            swept_at=from_us_or_none(row.swept_at),
            next_sweep_at=from_us_or_none(row.next_sweep_at),
            pool=row.pool,
            outages=_from_json(row.outages),
        )
        for row in rows
        if row.id is not None
    )


# --- the tasks that workers hold ----------------------------------------------------------------


@statement
def _renew(s: Store) -> Any:
    h = s.tables.heartbeat
    listed_at = sa.case(
        (param("is_stuck", sa.Boolean), _STUCK), (param("is_current", sa.Boolean), h.c.seen_at), else_=h.c.listed_at
    )
    return (
        sa.update(h)
        .where(h.c.id == param("id", sa.String))
        .ordered_values(  # MariaDB lets later assignments see earlier ones
            (h.c.listed_at, listed_at),
            (h.c.seen_at, s.clock()),
            (h.c.held_tasks, sa.func.coalesce(param("held", sa.Text), h.c.held_tasks)),
        )
    )


def renew_worker(tx: Tx, id_: str, *, held: str | None, is_current: bool, is_stuck: bool = False) -> bool:
    """Renew a worker's row. Returns False if it does not exist yet: the ordinary heartbeat inserts it.

    ``held``: the tasks that the worker holds, None if unchanged. ``is_current``: the list has all that had reached the
    worker when the row was last renewed.
    """
    return bool(tx.run(_renew, id=id_, held=held, is_current=is_current, is_stuck=is_stuck).rowcount)


def encode_held(references: Sequence[TaskReference]) -> str:
    """Encode the tasks that a worker holds, for `renew_worker`."""
    return json.dumps([each.to_json() for each in references])


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker with a heartbeat row, alive or dead. ``listed_at``: its list has all that had reached it by this time.

    ``is_stuck``: its main loop neither receives nor starts tasks. ``silent_at``: when a dispatcher noticed its silence.
    """

    id: str
    node: str
    queues: frozenset[str]
    seen_at: datetime
    listed_at: datetime | None
    silent_at: datetime | None
    is_stuck: bool
    has_list: bool


def read_workers(tx: Tx) -> tuple[datetime, list[WorkerRow]]:
    """Return the database's time, and all workers."""
    h = tx.t.heartbeat.c
    columns = (h.id, h.node, h.queues, h.seen_at, h.listed_at, h.silent_at, h.held_tasks.is_not(None).label("has_list"))
    rows = tx.execute(sa.select(*columns).where(h.kind == "worker"))
    return _read_now(tx), [
        WorkerRow(
            row.id,
            row.node,
            frozenset(json.loads(row.queues)),
            from_us(row.seen_at),
            from_us_or_none(row.listed_at),
            None if row.silent_at is None or row.silent_at < row.seen_at else from_us(row.silent_at),
            row.listed_at == _STUCK,
            bool(row.has_list),
        )
        for row in rows
    ]


def read_held(tx: Tx, ids: Sequence[str]) -> dict[str, list[TaskReference]]:
    """Return the tasks that these workers hold, by the worker's id."""
    h = tx.t.heartbeat.c
    rows = tx.execute(sa.select(h.id, h.held_tasks).where(h.id.in_(ids), h.held_tasks.is_not(None)))
    held = {row.id: map(TaskReference.read, json.loads(row.held_tasks)) for row in rows}
    return {id_: [each for each in references if each is not None] for id_, references in held.items()}


def record_silence(tx: Tx, ids: Sequence[str], *, since: datetime) -> None:
    """Record that these workers are silent, if none has been seen after ``since``."""
    h = tx.t.heartbeat
    tx.execute(sa.update(h).where(h.c.id.in_(ids), h.c.seen_at <= to_us(since)).values(silent_at=tx.store.clock()))


def forget_held(tx: Tx, id_: str) -> None:
    """Forget the list of a dead worker, whose tasks have been reported. If it lives after all, it writes another."""
    h = tx.t.heartbeat
    tx.execute(sa.update(h).where(h.c.id == id_).values(held_tasks=None))


def _read_now(tx: Tx) -> datetime:
    return from_us(tx.execute(sa.select(tx.store.clock())).scalar_one())
