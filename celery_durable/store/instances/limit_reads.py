"""Reads of limits for operators, without locks. Each examines at most 10,000 rows of a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    LIMITS_KEY,
    Count,
    HoldState,
    LimitDetails,
    LimitHold,
    LimitRecord,
    LimitWait,
    from_us,
)
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.instances.instances import read_clock
from celery_durable.store.runs import holds, limits
from celery_durable.store.runs.holds import STEP, LimitKey

_MAX_HOLDERS, _MAX_WAITING, _MAX_WAITS = 100, 20, 3


def read_limits(tx: Tx, *, name: str | None = None, after: LimitKey | None = None, limit: int) -> list[LimitRecord]:
    """Return limits in the order of their names and keys, from the first one after ``after``."""
    c = tx.t.limit.c
    query = sa.select(c.name, c.key).order_by(c.name, c.key).limit(limit)
    if name is not None:
        query = query.where(c.name == name)
    if after is not None:
        query = query.where(sa.or_(c.name > after.name, sa.and_(c.name == after.name, c.key > after.key)))
    return [read_limit(tx, LimitKey(row.name, row.key)) for row in tx.execute(query).all()]


def read_limit(tx: Tx, key: LimitKey) -> LimitRecord:
    """Return one limit and key, which exists."""
    c, h = tx.t.limit.c, tx.t.hold.c
    row = tx.execute(sa.select(tx.t.limit).where(c.name == key.name, c.key == key.key)).one()
    is_its = [h.name == key.name, h.key == key.key]
    held = sa.select(sa.func.count()).where(*is_its, holds.is_active(h), holds.counts(tx.store, h))
    asked_at = [head.asked_at for head in limits.find_heads(tx, key)]
    return LimitRecord(
        name=row.name,
        key=row.key,
        at_once=row.set_at_once or row.at_once,
        rate=row.set_rate or row.rate,
        set_by=row.set_by,
        held=tx.execute(held).scalar_one(),
        waiting=_count(tx, [*is_its, _is_waiting(h)]) if asked_at else Count(0),
        longest_wait=read_clock(tx) - from_us(min(asked_at)) if asked_at else None,
    )


def read_details(tx: Tx, key: LimitKey) -> LimitDetails:
    """Return a limit and key, which exists, with its holders and the first that wait."""
    h = tx.t.hold.c
    is_its = [h.name == key.name, h.key == key.key]
    active = [*is_its, holds.is_active(h), holds.counts(tx.store, h)]
    holders = _read_holds(tx, active, [h.granted_at, h.seq], _MAX_HOLDERS)
    heads = sorted(limits.find_heads(tx, key), key=lambda row: (row.turn, row.seq))
    if len(heads) == 1:
        is_next = [*is_its, _is_waiting(h), h.fair_key == heads[0].fair_key]
        waiting = _read_holds(tx, is_next, [h.seq], _MAX_WAITING)
    else:
        seqs = [head.seq for head in heads[:_MAX_WAITING]]
        waiting = _read_holds(tx, [*is_its, _is_waiting(h), h.seq.in_(seqs)], [h.turn, h.seq], _MAX_WAITING)
    return LimitDetails(limit=read_limit(tx, key), holders=tuple(holders), waiting=tuple(waiting))


def find_waits(tx: Tx, pk: int, run: int) -> list[LimitWait]:
    """Return the first three steps of a run that wait for limits, and at which place."""
    h = tx.t.hold.c
    query = sa.select(tx.t.hold).where(h.instance_pk == pk, h.run_number == run, _is_waiting(h)).order_by(h.seq)
    found = []
    for row in tx.execute(query.limit(_MAX_WAITS)).all():
        key = LimitKey(row.name, row.key)
        is_its = [h.name == key.name, h.key == key.key]
        before = [*is_its, _is_waiting(h), h.fair_key == row.fair_key, h.seq < row.seq]
        place = _count(tx, before)
        active = [*is_its, holds.is_active(h), holds.counts(tx.store, h)]
        holders = _read_holds(tx, active, [h.granted_at, h.seq], 1)
        found.append(
            LimitWait(
                row.step_key,
                read_limit(tx, key),
                Count(place.count + 1, place.is_exact),
                bool(row.fair_key),
                holders[0] if holders else None,
            )
        )
    return found


def _is_waiting(h: Any) -> sa.ColumnElement[bool]:
    return h.state == sa.literal_column("'waiting'")  # type: ignore[no-any-return]


def _count(tx: Tx, conditions: Sequence[sa.ColumnElement[bool]]) -> Count:
    bound = bounds.MAX_EXAMINED
    rows = sa.select(tx.t.hold.c.seq).where(*conditions).limit(bound).subquery()
    n = tx.execute(sa.select(sa.func.count()).select_from(rows)).scalar_one()
    return Count(n, n < bound)


def _read_holds(tx: Tx, conditions: Sequence[Any], order: Sequence[Any], limit: int) -> list[LimitHold]:
    h, i = tx.t.hold, tx.t.instance
    query = sa.select(h, i.c.workflow, i.c.instance_id.label("id")).join(i, i.c.id == h.c.instance_pk)
    return [
        LimitHold(
            key=row.key,
            workflow=row.workflow,
            instance_id=row.id,
            run_number=row.run_number,
            step_key=None if row.step_key == LIMITS_KEY else row.step_key,
            position=None if row.position == STEP else row.position,
            state=HoldState(row.state),
            fair_key=row.fair_key,
            since=from_us(row.granted_at or row.asked_at),
        )
        for row in tx.execute(query.where(*conditions).order_by(*order).limit(limit))
    ]


# --- what operators set --------------------------------------------------------------------------


def exists(tx: Tx, name: str, key: str | None) -> bool:
    """Whether a step has asked for a limit, with this key if it is not None."""
    c = tx.t.limit.c
    query = sa.select(c.name).where(c.name == name, *([] if key is None else [c.key == key]))
    return tx.execute(query.limit(1)).first() is not None


def set_numbers(tx: Tx, name: str, key: str | None, values: dict[str, Any]) -> None:
    """Set numbers of a limit, for all its keys if ``key`` is None, also for those that come later."""
    limit, now = tx.t.limit, tx.store.clock()
    is_it = [limit.c.name == name, *([] if key is None else [limit.c.key == key])]
    tx.execute(sa.update(limit).where(*is_it).values(**values, updated_at=now))
    if key is None:
        limits.insert_all_keys(tx, name, values)
