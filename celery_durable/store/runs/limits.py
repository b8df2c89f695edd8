"""Limits: the queue of each limit and key, and who gets what is free.

A row of workflow_limit is the lock of its key. Under it a transaction counts the holds, and grants what is free to the
first in the queue. A hold counts only while its owner does: a body's while the claim has its token. So a hold that
nobody has released leaks nothing, and a number that is counted again each time cannot drift.

A step takes all its limits in one transaction, or none. Until then it waits in one queue: that of the first limit
without room. Its rows for the others are blocked, and keep their places for the time when it waits there.

Lock order: the own instance, limits by ascending name and key, holds. Only `store.instances.limit_waits` locks the
instance of another hold, in a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from celery_durable.model import HoldState, Status
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.statements import constant, param, statement, statement_for
from celery_durable.store.runs import holds
from celery_durable.store.runs.holds import LimitKey, Waiter, key_of, waiter_of
from celery_durable.store.schema import dialects
from celery_durable.store.schema.dialects import MARIADB
from celery_durable.values import LimitUse, rate_interval_us

HORIZON_US = 2_000_000
"""How long before its start a grant is given at most, so that a slot is not kept long for a rate."""
SLACK_US = 100_000
"""How much earlier than a strict rate allows a step may start. It makes up for wake-ups that come late."""
_MAX_GRANTS = 50
"""How many waiters of a key one transaction considers."""
_RESUMED = 2**62
"""What is subtracted from the number of a waiter that has had the limit already: it goes before all new ones."""
_FIRST = -(2**63)
"""Less than every number in a queue."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a step asks for. ``token``: that of the claim or attempt that will hold it. ``is_new``: it has no rows."""

    waiter: Waiter
    uses: Sequence[LimitUse]
    token: str | None
    is_new: bool
    resumes: bool
    """Whether it has had the limits before, for example for an earlier attempt."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request. ``start_us``: when a step that is granted may start; None if it waits or holds."""

    holds: bool
    start_us: int | None = None


@dataclass(slots=True)
class Served:
    """What a transaction has granted to others, which must be woken, and the keys that it has not served to the end."""

    granted: list[Waiter] = field(default_factory=list)
    unfinished: set[LimitKey] = field(default_factory=set)


# --- statements ---------------------------------------------------------------------------------

_CODE, _SET = ("at_once", "rate"), ("set_at_once", "set_rate", "set_by")
_WRITTEN = (*_CODE, "next_grant_at", "next_start_at", "last_seq", "turn")


def _is_limit(c: Any) -> list[sa.ColumnElement[bool]]:
    return [c.name == param("name", sa.String), c.key == param("key", sa.String)]


def _is_waiting(c: Any) -> list[sa.ColumnElement[bool]]:
    return [*_is_limit(c), c.state == constant(HoldState.WAITING)]


def _params(table: sa.Table, names: Iterable[str]) -> dict[str, Any]:
    return {name: param(name, table.c[name].type) for name in names}


@statement
def _lock_limit(s: Store) -> Any:
    c = s.tables.limit.c
    return sa.select(*(c[name] for name in (*_WRITTEN, *_SET))).where(*_is_limit(c)).with_for_update(key_share=True)


@statement
def _insert_limit(s: Store) -> Any:
    limit = s.tables.limit
    values = dict.fromkeys(_WRITTEN, sa.literal_column("0")) | _params(limit, ("name", "key", *_CODE, *_SET))
    return dialects.insert_or_nothing(s.database, limit, values | {"updated_at": s.clock()}, ("name", "key"))


@statement
def _select_set_numbers(s: Store) -> Any:
    """Read what an operator has set for all keys of a limit."""
    c = s.tables.limit.c
    return sa.select(*(c[name] for name in _SET)).where(*_is_limit(c))


@statement
def _update_limit(s: Store) -> Any:
    limit = s.tables.limit
    return sa.update(limit).where(*_is_limit(limit.c)).values(**_params(limit, _WRITTEN), updated_at=s.clock())


@statement
def _read_queue(s: Store) -> Any:
    """Read, after the lock (LAW 2b): the time, how many hold the limit, and whether anybody waits."""
    h, w = s.tables.hold.alias("h"), s.tables.hold.alias("w")
    active = sa.select(sa.func.count()).select_from(h).where(*_is_limit(h.c), holds.is_active(h.c))
    first = sa.select(w.c.seq).where(*_is_waiting(w.c)).order_by(w.c.fair_key, w.c.seq).limit(sa.literal_column("1"))
    return sa.select(
        s.clock().label("now_us"),
        active.where(holds.counts(s, h.c)).scalar_subquery().label("used"),
        active.where(h.c.state == constant(HoldState.GRANTED)).scalar_subquery().label("granted"),
        first.scalar_subquery().is_not(None).label("has_waiting"),  # with EXISTS it could be searched without the index
    )


@statement
def _count_by_fair_key(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(h.fair_key, sa.func.count().label("n"))
    return query.where(*_is_limit(h), holds.is_active(h), holds.counts(s, h)).group_by(h.fair_key)


_PLACE = (*Waiter._fields, "fair_key", "seq", "turn", "asked_at")


@statement
def _select_heads(s: Store) -> Any:
    hold, h = s.tables.hold, s.tables.hold.alias("h")
    heads = dialects.select_smallest_per_group(
        s.database, hold, "fair_key", "seq", prefix={}, where=_is_waiting, cte="fair_keys"
    ).subquery("heads")
    is_head = sa.and_(*_is_waiting(h.c), h.c.fair_key == heads.c.name, h.c.seq == heads.c.at)
    found = bounds.look_up(s.database, heads, h, *(h.c[name] for name in _PLACE), is_it=is_head)
    return sa.select(*(found.c[name] for name in _PLACE))


@statement
def _select_next_head(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(*(h[name] for name in _PLACE)).where(*_is_waiting(h), h.fair_key > param("fair_key", sa.String))
    return query.order_by(h.fair_key, h.seq).limit(sa.literal_column("1"))


@statement_for
def _select_after(s: Store, which: str) -> Any:
    """Find the first waiter of a value of ``fair`` after a number in the queue, or the last one."""
    h = s.tables.hold.c
    query = sa.select(*(h[name] for name in _PLACE)).where(*_is_waiting(h), h.fair_key == param("fair_key", sa.String))
    query = query.where(h.seq > param("after", sa.BigInteger)).limit(sa.literal_column("1"))
    return query.order_by(h.seq.desc() if which == "last" else h.seq)


@statement
def _insert_hold(s: Store) -> Any:
    hold = s.tables.hold
    return sa.insert(hold).values(_params(hold, hold.c.keys())).inline()


# --- the limits that a transaction has locked ----------------------------------------------------


@dataclass(slots=True)
class _Limit:
    """One limit and key under its lock: its row, and what is in its queue."""

    id: LimitKey
    at_once: int | None
    rate: str | None
    next_grant_at: int
    next_start_at: int
    last_seq: int
    turn: int
    set_at_once: int | None
    set_rate: str | None
    set_by: str | None
    now_us: int
    used: int
    granted: int
    has_waiting: bool
    is_stalled: bool = False
    """Whether its queue was not served to its end although it has room. No new step may overtake it."""

    @property
    def interval_us(self) -> int | None:
        rate = self.set_rate or self.rate
        return None if rate is None else rate_interval_us(rate)

    @property
    def room(self) -> int:
        """How many more may hold the limit now; without ``at_once``, as many as a transaction considers."""
        at_once = self.set_at_once or self.at_once
        return _MAX_GRANTS if at_once is None else at_once - self.used

    @property
    def has_room(self) -> bool:
        interval = self.interval_us
        if self.room <= 0 or interval is None:
            return self.room > 0
        return self.next_grant_at <= self.now_us + HORIZON_US and self.granted < max(1, HORIZON_US // interval)

    @property
    def written(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _WRITTEN}


class LockedLimits:
    """The limits that a transaction has locked. It counts and decides here, and writes at the end (`close`)."""

    def __init__(self, tx: Tx, uses: Iterable[LimitUse | LimitKey]) -> None:
        self._tx, self._served = tx, Served()
        self._limits: dict[LimitKey, _Limit] = {}
        self._before: dict[LimitKey, dict[str, Any]] = {}
        for use in sorted(uses, key=key_of):
            if key_of(use) not in self._limits:
                self._lock(key_of(use), use if isinstance(use, LimitUse) else None)

    def _lock(self, key: LimitKey, use: LimitUse | None) -> None:
        tx, given = self._tx, key._asdict()
        found = tx.run(_lock_limit, **given).first()
        if found is None:
            if use is None:
                return
            of_all = tx.run(_select_set_numbers, name=key.name, key="").first() if key.key else None
            numbers = dict.fromkeys(_SET) if of_all is None else of_all._asdict()
            tx.run(_insert_limit, **given, at_once=use.at_once, rate=use.rate, **numbers)
            found = tx.run(_lock_limit, **given).one()
        limit = self._limits[key] = _Limit(key, *found, *tx.run(_read_queue, **given).one())
        self._before[key] = limit.written
        if use is not None:  # the numbers of the code may have changed
            if use.rate != limit.rate:
                limit.next_grant_at = limit.next_start_at = 0
            limit.at_once, limit.rate = use.at_once, use.rate

    def close(self) -> Served:
        """Write what has changed in the limits, and return what others have got."""
        for key, limit in self._limits.items():
            if (written := limit.written) != self._before[key]:
                self._tx.run(_update_limit, **key._asdict(), **written)
        return self._served

    @property
    def _now_us(self) -> int:
        return max(limit.now_us for limit in self._limits.values())

    def _of(self, rows: Iterable[Any]) -> list[_Limit]:
        return [self._limits[key_of(row)] for row in rows]

    # --- a step asks ----------------------------------------------------------------------------

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Take all limits of each request, or put it into a queue. Those that wait already are served before."""
        queued = {request.waiter for request in requests if not request.is_new and self._is_queued(request)}
        for key, limit in self._limits.items():
            if limit.has_waiting:
                self.fill(key)
        replies = [self._start_granted(each) if each.waiter in queued else self._take(each) for each in requests]
        self._served.granted = [waiter for waiter in self._served.granted if waiter not in queued]
        return replies

    def _is_queued(self, request: Request) -> bool:
        """Whether a step waits already, or is granted. Rows of another kind are deleted: an attempt has ended."""
        rows = holds.read(self._tx, *request.waiter)
        if {key_of(row) for row in rows} != {key_of(use) for use in request.uses} or rows[0].state == HoldState.HELD:
            holds.release(self._tx, *request.waiter)
            return False
        if rows[0].state == HoldState.PARKED:
            at = next((each for each in self._of(rows) if not each.has_room), self._of(rows)[0])
            self._wait_at(at, rows)
        return True

    def _start_granted(self, request: Request) -> Reply:
        """Return what a step has that waited before: it starts if it is granted, and its time has come."""
        rows = holds.read(self._tx, *request.waiter)
        if not rows or rows[0].state != HoldState.GRANTED:
            return Reply(holds=False)
        granted_at, start_us = rows[0].granted_at, self._start(self._of(rows), rows[0].start_at)
        if start_us is None:
            holds.set_state(self._tx, rows[0], HoldState.HELD, token=request.token, granted_at=granted_at)
        else:
            self._set_granted(rows[0], granted_at, start_us)
        return Reply(start_us is None, start_us)

    def _take(self, request: Request) -> Reply:
        """Take the limits of a step that does not wait yet, or put it into the queue of the first one without room."""
        limits, now = self._of(request.uses), self._now_us
        full = next((each for each in limits if not each.has_room or each.is_stalled), None)
        start_us = None if full is not None else self._start(limits, self._grant(limits))
        row = dict.fromkeys(("token", "granted_at", "start_at", "check_at"), None) | request.waiter._asdict()
        row |= {"asked_at": now, "lapses": 0, "state": HoldState.BLOCKED.value}
        if full is None:
            row |= {"granted_at": now, "start_at": start_us, "check_at": start_us, "state": HoldState.GRANTED.value}
        if holds_now := full is None and start_us is None:
            row |= {"token": request.token, "state": HoldState.HELD.value}
        for use, limit in zip(request.uses, limits, strict=True):
            limit.last_seq += 1
            row |= {"seq": limit.last_seq - (_RESUMED if request.resumes else 0)}
            row |= {"name": use.name, "key": use.key, "fair_key": use.fair_key, "turn": self._next_turn(limit, use)}
            self._tx.run(_insert_hold, **row | ({"state": HoldState.WAITING.value} if limit is full else {}))
        return Reply(holds_now, start_us)

    def _next_turn(self, limit: _Limit, use: LimitUse) -> int:
        """Return the turn of a new waiter: after the last one of its value, and not before the turns that are over."""
        if not use.fair_key:
            return limit.turn
        last = self._find_after(limit, use.fair_key, _FIRST, "last")
        return 1 + (limit.turn if last is None else max(limit.turn, last.turn))

    # --- a grant, and a start -------------------------------------------------------------------

    def _grant(self, limits: Sequence[_Limit]) -> int:
        """Count a grant, and return when it may start by the rates."""
        start_us = max([self._now_us, *(limit.next_grant_at for limit in limits if limit.interval_us is not None)])
        for limit in limits:
            limit.used, limit.granted = limit.used + 1, limit.granted + 1
            if (interval := limit.interval_us) is not None:
                limit.next_grant_at = start_us + interval
        return start_us

    def _start(self, limits: Sequence[_Limit], start_us: int) -> int | None:
        """Count the start of a granted step, and return None; or return when it may start.

        The rate is checked again here, by the starts themselves: after an outage of the workers, many grants whose time
        has passed would otherwise start together.
        """
        now, paced = self._now_us, [(limit, each) for limit in limits if (each := limit.interval_us) is not None]
        if start_us > now + SLACK_US:
            return start_us
        if any(limit.next_start_at > now + SLACK_US for limit, _ in paced):
            start_us = max(now, *(max(limit.next_start_at - SLACK_US, limit.next_grant_at) for limit, _ in paced))
            for limit, interval in paced:
                limit.next_grant_at = start_us + interval
            return start_us
        for limit, interval in paced:
            limit.next_start_at = max(limit.next_start_at, now) + interval
        for limit in limits:
            limit.granted -= 1
        return None

    # --- those that wait ------------------------------------------------------------------------

    def fill(self, key: LimitKey) -> None:
        """Grant what is free to those that wait in the queue of a locked limit."""
        limit = self._limits.get(key)
        if limit is None or not limit.has_room:
            return
        heads = {row.fair_key: row for row in find_heads(self._tx, key)}
        held: dict[str, int] = {}
        if len(heads) > 1:
            held = {row.fair_key: row.n for row in self._tx.run(_count_by_fair_key, **key._asdict())}
        moves_left = limit.room
        for _ in range(_MAX_GRANTS):
            if not (heads and limit.has_room):
                limit.has_waiting = bool(heads)
                return
            head = min(heads.values(), key=lambda row: (held.get(row.fair_key, 0), row.turn, row.seq))
            rows = holds.read(self._tx, *waiter_of(head))
            if any(key_of(row) not in self._limits for row in rows):
                break  # it needs limits that this transaction has not locked
            if self._still_waits(limit, rows):
                if (full := self._find_full(limit, rows)) is None:
                    self._grant_waiter(rows)
                    held[head.fair_key] = held.get(head.fair_key, 0) + 1
                else:
                    self._wait_at(full, rows)
                    moves_left -= 1
                    if not moves_left:  # the whole queue could go to another one at once, and come back
                        limit.is_stalled = True
                        return
            following = self._find_after(limit, head.fair_key, head.seq)
            del heads[head.fair_key]
            if following is not None:
                heads[head.fair_key] = following
        self._leave_unfinished(limit)

    def _still_waits(self, limit: _Limit, rows: Sequence[Any]) -> bool:
        """Whether a waiter waits for a limit. One that has ended is deleted, and one that is paused is parked."""
        if not any(key_of(row) == limit.id and row.state == HoldState.WAITING for row in rows):
            return False  # its step has ended it meanwhile
        if not holds.is_alive(rows[0]):
            holds.release(self._tx, *waiter_of(rows[0]))
            return False
        if rows[0].status == Status.PAUSED:
            holds.set_state(self._tx, rows[0], HoldState.PARKED)
            return False
        return True

    def _find_full(self, limit: _Limit, rows: Sequence[Any]) -> _Limit | None:
        """Find the first limit that has no room for a waiter at the head of ``limit``, or has one that asked before."""
        for row, each in zip(rows, self._of(rows), strict=True):
            if not each.has_room:
                return each
            if each is not limit and each.has_waiting:
                first = self._find_after(each, row.fair_key, _FIRST)
                if first is not None and first.seq < row.seq:
                    self._leave_unfinished(each)
                    return each
        return None

    def _grant_waiter(self, rows: Sequence[Any]) -> None:
        limits = self._of(rows)
        start_us = self._grant(limits)
        for row, each in zip(rows, limits, strict=True):
            each.turn = max(each.turn, row.turn)
        self._set_granted(rows[0], self._now_us, start_us)
        self._served.granted.append(waiter_of(rows[0]))

    def _set_granted(self, row: Any, at_us: int, start_us: int) -> None:
        holds.set_state(self._tx, row, HoldState.GRANTED, granted_at=at_us, start_at=start_us, check_at=start_us)

    def _wait_at(self, limit: _Limit, rows: Sequence[Any]) -> None:
        """Let a waiter wait for one of its limits, and be blocked at the others."""
        limit.has_waiting = True
        holds.set_state(self._tx, rows[0], HoldState.BLOCKED, at=limit.id.name)

    def _find_after(self, limit: _Limit, fair_key: str, seq: int, which: str = "first") -> Any:
        return self._tx.run(_select_after(which), **limit.id._asdict(), fair_key=fair_key, after=seq).first()

    def _leave_unfinished(self, limit: _Limit) -> None:
        limit.is_stalled = True
        self._served.unfinished.add(limit.id)


# --- for those that ask ---------------------------------------------------------------------------


def ask(tx: Tx, requests: Sequence[Request]) -> tuple[list[Reply], Served]:
    """Take the limits of these steps of one run, whose instance is locked, or let them wait."""
    locked = LockedLimits(tx, [use for request in requests for use in request.uses])
    replies = locked.ask(requests)
    return replies, locked.close()


def serve(tx: Tx, key: LimitKey) -> Served:
    """Grant what is free of one limit. Whoever calls this again until nothing is unfinished has served all."""
    if not tx.run(_read_queue, **key._asdict()).one().has_waiting:
        return Served()
    heads = sorted(find_heads(tx, key), key=lambda row: (row.turn, row.seq))
    keys = {key}
    for head in heads[:5]:  # read before the locks, which must be taken in order; what is missing is served next time
        keys |= {key_of(row) for row in holds.read(tx, *waiter_of(head))}
    locked = LockedLimits(tx, keys)
    locked.fill(key)
    return locked.close()


def find_heads(tx: Tx, key: LimitKey) -> list[Any]:
    """Return the first waiter of each value of ``fair``; without it, the first of all.

    MariaDB cannot step from one value to the next within a statement: it would read the whole queue.
    """
    if tx.store.database is not MARIADB:
        return tx.run(_select_heads, **key._asdict())
    heads = list(tx.run(_select_after("first"), **key._asdict(), fair_key="", after=_FIRST))
    while head := tx.run(_select_next_head, **key._asdict(), fair_key=heads[-1].fair_key if heads else "").first():
        heads.append(head)
    return heads


def insert_all_keys(tx: Tx, name: str, numbers: dict[str, Any]) -> None:
    """Insert the row from which new keys of a limit take what an operator has set, unless it exists."""
    tx.run(_insert_limit, **dict.fromkeys((*_CODE, *_SET)) | {"name": name, "key": ""} | numbers)
