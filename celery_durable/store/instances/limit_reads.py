"""Reads of limits for operators, without locks. Each examines at most 10,000 rows of a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
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
from celery_durable.store.engine.statements import constant
from celery_durable.store.runs import holds, limits
from celery_durable.store.runs.holds import STEP, LimitKey

_MAX_HOLDERS, _MAX_WAITING, _MAX_WAITS, _MAX_ANCESTORS = 100, 20, 3, 10


def read_limits(
    tx: Tx, *, name: str | None = None, after: LimitKey | None = None, is_awaited: bool = False, limit: int
) -> list[LimitRecord]:
    """Return limits in the order of their names and keys, from the first one after ``after``.

    ``is_awaited``: only those for which steps wait, among the first 10,000.
    """
    c, h = tx.t.limit.c, tx.t.hold.c
    query: sa.Select[Any] = (
        sa.select(tx.t.limit).order_by(c.name, c.key).limit(bounds.MAX_EXAMINED if is_awaited else limit)
    )
    if name is not None:
        query = query.where(c.name == name)
    if after is not None:
        query = query.where(sa.or_(c.name > after.name, sa.and_(c.name == after.name, c.key > after.key)))
    if is_awaited:
        # One search of the index for each limit. Without this order PostgreSQL may read the table for each of them, and
        # it may turn EXISTS into a join with all that wait.
        of = query.subquery().c
        waiting = sa.select(h.seq).where(h.name == of.name, h.key == of.key, _is_waiting(h))
        first = waiting.order_by(h.fair_key, h.seq).limit(1).scalar_subquery()
        query = sa.select(*of).where(first.is_not(None)).order_by(of.name, of.key).limit(limit)
    return _describe(tx, tx.execute(query).all())


def _describe(tx: Tx, rows: Sequence[Any]) -> list[LimitRecord]:
    keys = [LimitKey(row.name, row.key) for row in rows]
    held, waiting = _read_held(tx, keys), _count_waiting(tx, [_is_awaited(tx, key) for key in keys])
    return [_to_record(*each, held) for each in zip(rows, waiting, strict=True)]


def _to_record(row: Any, waiting: _Waiting, held: Mapping[LimitKey, _Held]) -> LimitRecord:
    its = held.get(LimitKey(row.name, row.key))
    return LimitRecord(
        name=row.name,
        key=row.key,
        at_once=row.set_at_once or row.at_once,
        rate=row.set_rate or row.rate,
        set_by=row.set_by,
        held=0 if its is None else its.count,
        waiting=waiting.count,
        longest_wait=waiting.longest,
    )


def read_details(tx: Tx, key: LimitKey) -> LimitDetails | None:
    """Return a limit and key with its holders and the first that wait; None if no step has asked for it."""
    c, h = tx.t.limit.c, tx.t.hold.c
    rows = tx.execute(sa.select(tx.t.limit).where(c.name == key.name, c.key == key.key)).all()
    if not rows:
        return None
    active = [h.name == key.name, h.key == key.key, holds.is_active(h), holds.counts(tx.store, h)]
    holders = _read_holds(tx, active, [h.granted_at, h.seq], _MAX_HOLDERS)
    heads = sorted(limits.find_heads(tx, key), key=lambda row: (row.turn, row.seq))
    is_next, order = h.seq.in_([head.seq for head in heads[:_MAX_WAITING]]), [h.turn, h.seq]
    if len(heads) == 1:
        is_next, order = h.fair_key == heads[0].fair_key, [h.seq]
    waiting = _read_holds(tx, [*_is_awaited(tx, key), is_next], order, _MAX_WAITING)
    return LimitDetails(limit=_describe(tx, rows)[0], holders=tuple(holders), waiting=tuple(waiting))


def find_waits(tx: Tx, pk: int, run: int) -> list[LimitWait]:
    """Return the first three steps of a run that wait for limits, and at which place."""
    limit, hold = tx.t.limit, tx.t.hold
    h = hold.c
    query: sa.Select[Any] = sa.select(h.step_key, h.fair_key, h.seq, *limit.c)
    query = query.join_from(hold, limit, sa.and_(limit.c.name == h.name, limit.c.key == h.key))
    query = query.where(h.instance_pk == pk, h.run_number == run, _is_waiting(h)).order_by(h.seq).limit(_MAX_WAITS)
    rows = tx.execute(query).all()
    keys = [LimitKey(row.name, row.key) for row in rows]
    held, ancestors = _read_held(tx, keys), _read_held(tx, keys, of=_find_ancestors(tx, pk) if keys else [])
    awaited = [_is_awaited(tx, key) for key in keys]
    before = [[*each, h.fair_key == row.fair_key, h.seq < row.seq] for each, row in zip(awaited, rows, strict=True)]
    counted = _count_waiting(tx, [*awaited, *before])
    return [
        LimitWait(
            row.step_key,
            _to_record(row, waiting, held),
            Count(place.count.count + 1, place.count.is_exact),
            bool(row.fair_key),
            longest_holder=held[key].longest if key in held else None,
            ancestor=ancestors[key].longest if key in ancestors else None,
        )
        for row, key, waiting, place in zip(rows, keys, counted, counted[len(rows) :], strict=False)
    ]


def _find_ancestors(tx: Tx, pk: int) -> list[int]:
    """Return the instances that wait for the end of this one: its parent, the parent of that, and so on."""
    i, p = tx.t.instance.alias("child").c, tx.t.instance.alias("parent").c
    found: list[int] = []
    while len(found) < _MAX_ANCESTORS:
        is_parent = [i.id == pk, p.id == i.parent_pk, p.run_number == i.parent_run_number]
        parent = tx.execute(sa.select(p.id).where(*is_parent)).scalar()
        if parent is None:
            break
        found.append(pk := parent)
    return found


@dataclass(frozen=True, slots=True)
class _Held:
    count: int
    longest: LimitHold


def _read_held(tx: Tx, keys: Sequence[LimitKey], *, of: Sequence[int] | None = None) -> dict[LimitKey, _Held]:
    """Return how many hold each of these limits, and which the longest. Limits that nothing holds are left out.

    ``of``: only holders of these instances.
    """
    h = tx.t.hold.c
    columns = [
        sa.func.count().over(partition_by=(h.name, h.key)).label("n"),
        sa.func.row_number().over(partition_by=(h.name, h.key), order_by=(h.granted_at, h.seq)).label("place"),
    ]
    is_it = [sa.tuple_(h.name, h.key).in_(keys), holds.is_active(h), holds.counts(tx.store, h)]
    is_it += [] if of is None else [h.instance_pk.in_(of)]
    ranked = sa.select(tx.t.hold, *columns).where(*is_it).subquery()
    query = _select_holds(tx, ranked).add_columns(ranked.c.name, ranked.c.n).where(ranked.c.place == 1)
    rows = tx.execute(query) if keys and of != [] else ()
    return {LimitKey(row.name, row.key): _Held(row.n, _to_hold(row)) for row in rows}


@dataclass(frozen=True, slots=True)
class _Waiting:
    count: Count
    longest: timedelta | None


def _is_awaited(tx: Tx, key: LimitKey) -> list[Any]:
    """Build the conditions for what waits for a limit."""
    h = tx.t.hold.c
    return [h.name == key.name, h.key == key.key, _is_waiting(h)]


def _count_waiting(tx: Tx, ranges: Sequence[Sequence[Any]]) -> list[_Waiting]:
    """Count what waits in each of these ranges, and find since when. The ranges share the bound."""
    bound, parts, h = bounds.divide(ranges), [], tx.t.hold.c
    for number, conditions in enumerate(ranges):
        rows = sa.select(h.asked_at).where(*conditions).order_by(h.fair_key, h.seq).limit(bound).subquery()
        part: sa.ColumnElement[int] = sa.literal_column(str(number)).label("part")
        oldest = sa.func.min(rows.c.asked_at).label("at")
        parts.append(sa.select(part, sa.func.count().label("n"), oldest, tx.store.clock().label("now_us")))
    found = sorted(tx.execute(sa.union_all(*parts)).all() if parts else (), key=lambda row: row.part)
    return [
        _Waiting(Count(row.n, row.n < bound), None if row.at is None else from_us(row.now_us) - from_us(row.at))
        for row in found
    ]


def _is_waiting(h: Any) -> Any:
    return h.state == constant(HoldState.WAITING)


def _read_holds(tx: Tx, conditions: Sequence[Any], order: Sequence[Any], limit: int) -> list[LimitHold]:
    query = _select_holds(tx, tx.t.hold).where(*conditions).order_by(*order).limit(limit)
    return [_to_hold(row) for row in tx.execute(query)]


def _select_holds(tx: Tx, hold: Any) -> sa.Select[Any]:
    i = tx.t.instance
    names = ("key", "run_number", "step_key", "position", "state", "fair_key", "granted_at", "asked_at")
    query = sa.select(*(hold.c[name] for name in names), i.c.workflow, i.c.instance_id.label("id"))
    return query.join_from(hold, i, i.c.id == hold.c.instance_pk)


def _to_hold(row: Any) -> LimitHold:
    return LimitHold(
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


# --- what operators set --------------------------------------------------------------------------


def has_keys(tx: Tx, name: str) -> bool:
    """Whether a step has asked for any key of a limit."""
    c = tx.t.limit.c
    return tx.execute(sa.select(c.name).where(c.name == name).limit(1)).first() is not None


def set_numbers(tx: Tx, name: str, key: str | None, values: dict[str, Any]) -> bool:
    """Set numbers of a limit, for all its keys if ``key`` is None, also for those that come later.

    Returns whether the limit exists.
    """
    limit, now = tx.t.limit, tx.store.clock()
    is_it = [limit.c.name == name, *([] if key is None else [limit.c.key == key])]
    times = {"next_grant_at": 0, "next_start_at": 0} if "set_rate" in values else {}  # those of the old rate
    if not tx.execute(sa.update(limit).where(*is_it).values(**values, **times, updated_at=now)).rowcount:
        return False
    if key is None:
        limits.insert_all_keys(tx, name, values)
    return True
