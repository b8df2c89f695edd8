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

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from celery_durable.model import HoldState, Status
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import holds
from celery_durable.store.runs.holds import LimitKey, Waiter
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


@dataclass(frozen=True, slots=True)
class Request:
    """What a step asks for. ``token``: that of the claim or attempt that will hold it. ``is_new``: it has no rows."""

    waiter: Waiter
    uses: Sequence[LimitUse]
    token: str | None
    is_new: bool
    resumes: bool = False
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


def _is_limit(c: Any) -> list[sa.ColumnElement[bool]]:
    return [c.name == param("name", sa.String), c.key == param("key", sa.String)]


def _is_waiting(c: Any) -> list[sa.ColumnElement[bool]]:
    return [*_is_limit(c), c.state == sa.literal_column("'waiting'")]


@statement
def _lock_limit(s: Store) -> Any:
    limit = s.tables.limit
    return sa.select(*limit.c).where(*_is_limit(limit.c)).with_for_update(key_share=True)


@statement
def _insert_limit(s: Store) -> Any:
    limit, given = s.tables.limit, ("name", "key", "at_once", "rate", "set_at_once", "set_rate", "set_by")
    values: dict[str, Any] = {name: param(name, limit.c[name].type) for name in given}
    values |= dict.fromkeys(("next_grant_at", "next_start_at", "last_seq", "turn"), sa.literal_column("0"))
    values["updated_at"] = s.clock()
    return dialects.insert_or_nothing(s.database, limit, values, ("name", "key"))


@statement
def _select_set_numbers(s: Store) -> Any:
    """Read what an operator has set for all keys of a limit."""
    c = s.tables.limit.c
    return sa.select(c.set_at_once, c.set_rate, c.set_by).where(*_is_limit(c))


@statement
def _update_limit(s: Store) -> Any:
    limit = s.tables.limit
    names = ("at_once", "rate", "next_grant_at", "next_start_at", "last_seq", "turn")
    values = {name: param(name, limit.c[name].type) for name in names}
    return sa.update(limit).where(*_is_limit(limit.c)).values(**values, updated_at=s.clock())


@statement
def _read_queue(s: Store) -> Any:
    """Read, after the lock (LAW 2b): the time, how many hold the limit, and whether anybody waits."""
    h, w = s.tables.hold.alias("h"), s.tables.hold.alias("w")
    active = sa.select(sa.func.count()).select_from(h).where(*_is_limit(h.c), holds.is_active(h.c))
    return sa.select(
        s.clock().label("now_us"),
        active.where(holds.counts(s, h.c)).scalar_subquery().label("used"),
        active.where(h.c.state == sa.literal_column("'granted'")).scalar_subquery().label("granted"),
        sa.exists(sa.select(sa.literal_column("1")).select_from(w).where(*_is_waiting(w.c))).label("has_waiting"),
    )


@statement
def _count_by_fair_key(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(h.fair_key, sa.func.count().label("n")).where(
        *_is_limit(h), holds.is_active(h), holds.counts(s, h)
    )
    return query.group_by(h.fair_key)


_WAITER = ("instance_pk", "run_number", "step_key", "position", "fair_key", "seq", "turn", "asked_at")


@statement
def _select_heads(s: Store) -> Any:
    """Find the first waiter of each value of ``fair``; without it, the first of all."""
    hold = s.tables.hold
    if s.database is MARIADB:
        grouped = sa.select(hold.c.fair_key.label("name"), sa.func.min(hold.c.seq).label("at"))
        heads = grouped.where(*_is_waiting(hold.c)).group_by(hold.c.fair_key).subquery()
    else:
        smallest = dialects.select_smallest_per_group(
            s.database, hold, "fair_key", "seq", prefix={}, where=_is_waiting, cte="fair_keys"
        )
        heads = smallest.subquery()
    h = hold.alias("h").c
    is_head = sa.and_(h.fair_key == heads.c.name, h.seq == heads.c.at)
    return sa.select(*(h[name] for name in _WAITER)).where(*_is_waiting(h), is_head)


@statement
def _select_next(s: Store) -> Any:
    h = s.tables.hold.c
    is_next = [h.fair_key == param("fair_key", sa.String), h.seq > param("after", sa.BigInteger)]
    query = sa.select(*(h[name] for name in _WAITER)).where(*_is_waiting(h), *is_next)
    return query.order_by(h.seq).limit(sa.literal_column("1"))


@statement
def _find_earlier(s: Store) -> Any:
    h = s.tables.hold.c
    is_before = [h.fair_key == param("fair_key", sa.String), h.seq < param("before", sa.BigInteger)]
    return sa.select(h.seq).where(*_is_waiting(h), *is_before).limit(sa.literal_column("1"))


@statement
def _select_last_turn(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(h.turn).where(*_is_waiting(h), h.fair_key == param("fair_key", sa.String))
    return query.order_by(h.seq.desc()).limit(sa.literal_column("1"))


@statement
def _insert_hold(s: Store) -> Any:
    hold = s.tables.hold
    values: dict[str, Any] = {column.name: param(column.name, column.type) for column in hold.c}
    return sa.insert(hold).values(values).inline()


# --- the limits that a transaction has locked ----------------------------------------------------


@dataclass(slots=True)
class _Limit:
    """One limit and key under its lock: its row, and what is in its queue."""

    id: LimitKey
    at_once: int | None
    rate: str | None
    set_at_once: int | None
    set_rate: str | None
    next_grant_at: int
    next_start_at: int
    last_seq: int
    turn: int
    now_us: int
    used: int
    granted: int
    has_waiting: bool
    is_changed: bool = False

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


class _Considered(enum.Enum):
    """What became of a waiter."""

    GRANTED = enum.auto()
    MOVED = enum.auto()
    """It waits for another limit now."""
    LEFT = enum.auto()
    """It does not wait any more."""
    UNKNOWN = enum.auto()
    """It needs limits that this transaction has not locked."""


class LockedLimits:
    """The limits that a transaction has locked. It counts and decides here, and writes at the end (`close`)."""

    def __init__(self, tx: Tx, uses: Iterable[LimitUse | LimitKey]) -> None:
        self._tx, self.served = tx, Served()
        self._limits: dict[LimitKey, _Limit] = {}
        self._stalled: set[LimitKey] = set()
        """The limits with room whose queue was not served to its end. No new step may overtake it."""
        for use in sorted(uses, key=lambda use: (use.name, use.key)):
            key = LimitKey(use.name, use.key)
            if key not in self._limits:
                self._lock(key, use if isinstance(use, LimitUse) else None)

    def _lock(self, key: LimitKey, use: LimitUse | None) -> None:
        tx, found = self._tx, None
        for _ in range(2):
            found = tx.run(_lock_limit, name=key.name, key=key.key).first()
            if found is not None:
                break
            if use is None:
                return
            given = tx.run(_select_set_numbers, name=key.name, key="").first() if key.key else None
            numbers = {"at_once": use.at_once, "rate": use.rate}
            for name in ("set_at_once", "set_rate", "set_by"):
                numbers[name] = None if given is None else getattr(given, name)
            tx.run(_insert_limit, name=key.name, key=key.key, **numbers)
        assert found is not None
        queue = tx.run(_read_queue, name=key.name, key=key.key).one()
        limit = self._limits[key] = _Limit(
            key, found.at_once, found.rate, found.set_at_once, found.set_rate, found.next_grant_at,
            found.next_start_at, found.last_seq, found.turn, queue.now_us, queue.used, queue.granted,
            bool(queue.has_waiting),
        )  # fmt: skip
        if use is not None and (use.at_once, use.rate) != (limit.at_once, limit.rate):  # the code has changed
            limit.at_once, limit.rate, limit.is_changed = use.at_once, use.rate, True

    @property
    def now_us(self) -> int:
        return max(limit.now_us for limit in self._limits.values())

    # --- a step asks ----------------------------------------------------------------------------

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Take all limits of each request, or put it into a queue. Those that wait already are served before."""
        waiting = [request for request in requests if not request.is_new and self._is_queued(request)]
        for key, limit in self._limits.items():
            if limit.has_waiting:
                self.fill(key)
        replies = [self._find_reply(request) if request in waiting else self._take(request) for request in requests]
        asked = {request.waiter for request in requests}
        self.served.granted = [each for each in self.served.granted if each not in asked]
        return replies

    def _is_queued(self, request: Request) -> bool:
        """Whether a step waits already, or is granted. Rows of another kind are deleted: an attempt has ended."""
        rows = self._read(request.waiter)
        is_same = [(row.name, row.key) for row in rows] == [(use.name, use.key) for use in request.uses]
        if not rows or not is_same or any(row.state == HoldState.HELD for row in rows):
            self._delete(request.waiter)
            return False
        if rows[0].state == HoldState.PARKED:
            at = next((row for row in rows if not self._limits[holds.key_of(row)].has_room), rows[0])
            for row in rows:
                self._set(row, HoldState.WAITING if row is at else HoldState.BLOCKED)
            self._limits[holds.key_of(at)].has_waiting = True
        return True

    def _find_reply(self, request: Request) -> Reply:
        """Return what a step has that waited before: it starts if it is granted, and its time has come."""
        rows = self._read(request.waiter)
        if not rows or rows[0].state != HoldState.GRANTED:
            return Reply(holds=False)
        start_us = self._start([self._limits[holds.key_of(row)] for row in rows], rows[0].start_at)
        for row in rows:
            if start_us is None:
                self._set(row, HoldState.HELD, token=request.token, granted_at=row.granted_at)
            else:
                self._set(row, HoldState.GRANTED, granted_at=row.granted_at, start_at=start_us, check_at=start_us)
        return Reply(start_us is None, start_us)

    def _take(self, request: Request) -> Reply:
        """Take the limits of a step that does not wait yet, or put it into the queue of the first one without room."""
        limits = [self._limits[LimitKey(use.name, use.key)] for use in request.uses]
        unserved = self._stalled | self.served.unfinished
        full = next((each for each in limits if not each.has_room or each.id in unserved), None)
        start_us = None if full is not None else self._start(limits, self._grant(limits))
        for use, limit in zip(request.uses, limits, strict=True):
            limit.last_seq, limit.is_changed = limit.last_seq + 1, True
            seq = limit.last_seq - (_RESUMED if request.resumes else 0)
            row: dict[str, Any] = dict.fromkeys(("token", "granted_at", "start_at", "check_at"))
            if full is not None:
                limit.has_waiting = limit.has_waiting or limit is full
                row["state"] = (HoldState.WAITING if limit is full else HoldState.BLOCKED).value
            else:
                state = HoldState.HELD if start_us is None else HoldState.GRANTED
                row |= {"state": state.value, "granted_at": self.now_us, "start_at": start_us, "check_at": start_us}
                row["token"] = request.token if start_us is None else None
            row["lapses"] = 0
            row |= {"name": use.name, "key": use.key, "fair_key": use.fair_key, "seq": seq, "asked_at": self.now_us}
            row["turn"] = self._next_turn(limit, use.fair_key)
            pk, run_number, step_key, position = request.waiter
            row |= {"instance_pk": pk, "run_number": run_number, "step_key": step_key, "position": position}
            self._tx.run(_insert_hold, **row)
        return Reply(full is None and start_us is None, start_us)

    def _next_turn(self, limit: _Limit, fair_key: str) -> int:
        """Return the turn of a new waiter: after the last one of its value, and not before the turns that are over."""
        if not fair_key:
            return limit.turn
        last = self._tx.run(_select_last_turn, **limit.id._asdict(), fair_key=fair_key).scalar()
        return 1 + (limit.turn if last is None else max(limit.turn, int(last)))

    # --- a grant, and a start -------------------------------------------------------------------

    def _grant(self, limits: Sequence[_Limit]) -> int:
        """Count a grant, and return when it may start by the rates."""
        paced = [limit for limit in limits if limit.interval_us is not None]
        start_us = max([self.now_us, *(limit.next_grant_at for limit in paced)])
        for limit in limits:
            limit.used, limit.granted = limit.used + 1, limit.granted + 1
            if (interval := limit.interval_us) is not None:
                limit.next_grant_at, limit.is_changed = start_us + interval, True
        return start_us

    def _start(self, limits: Sequence[_Limit], start_us: int) -> int | None:
        """Count the start of a granted step, and return None; or return when it may start.

        The rate is checked again here, by the starts themselves: after an outage of the workers, many grants whose time
        has passed would otherwise start together.
        """
        now, paced = self.now_us, [limit for limit in limits if limit.interval_us is not None]
        if start_us > now + SLACK_US:
            return start_us
        if any(limit.next_start_at > now + SLACK_US for limit in paced):
            start_us = max(now, *(max(limit.next_start_at - SLACK_US, limit.next_grant_at) for limit in paced))
            for limit in paced:
                limit.next_grant_at, limit.is_changed = start_us + (limit.interval_us or 0), True
            return start_us
        for limit in paced:
            limit.next_start_at = max(limit.next_start_at, now) + (limit.interval_us or 0)
            limit.is_changed = True
        for limit in limits:
            limit.granted -= 1
        return None

    # --- those that wait ------------------------------------------------------------------------

    def fill(self, key: LimitKey) -> None:
        """Grant what is free to those that wait in the queue of a locked limit."""
        limit = self._limits.get(key)
        if limit is None or not limit.has_room:
            return
        heads = {row.fair_key: row for row in self._tx.run(_select_heads, **key._asdict())}
        held = {}
        if len(heads) > 1:
            held = {row.fair_key: row.n for row in self._tx.run(_count_by_fair_key, **key._asdict())}
        considered, moved, most_moves = 0, 0, limit.room
        while heads and limit.has_room:
            if considered == _MAX_GRANTS:
                self.served.unfinished.add(key)
                return
            row = min(heads.values(), key=lambda row: (held.get(row.fair_key, 0), row.turn, row.seq))
            considered += 1
            match self._consider(limit, row):
                case _Considered.UNKNOWN:
                    self.served.unfinished.add(key)
                    return
                case _Considered.GRANTED:
                    held[row.fair_key] = held.get(row.fair_key, 0) + 1
                case _Considered.MOVED:
                    moved += 1
                    if moved >= most_moves:  # the whole queue could go to another one at once, and come back
                        self._stalled.add(key)
                        return
                case _Considered.LEFT:
                    pass
            following = self._tx.run(_select_next, **key._asdict(), fair_key=row.fair_key, after=row.seq).first()
            del heads[row.fair_key]
            if following is not None:
                heads[row.fair_key] = following
        limit.has_waiting = bool(heads)

    def _consider(self, limit: _Limit, head: Any) -> _Considered:
        """Grant all its limits to a waiter. If another one has no room, the waiter waits there from now on.

        A waiter that has ended is deleted, and one that is paused is parked.
        """
        waiter = Waiter(head.instance_pk, head.run_number, head.step_key, head.position)
        rows = self._read(waiter)
        if not any(holds.key_of(row) == limit.id and row.state == HoldState.WAITING for row in rows):
            return _Considered.LEFT  # its step has ended it meanwhile
        if not holds.is_alive(rows[0]):
            self._delete(waiter)
            return _Considered.LEFT
        if rows[0].status == Status.PAUSED:
            for row in rows:
                self._set(row, HoldState.PARKED)
            return _Considered.LEFT
        if any(holds.key_of(row) not in self._limits for row in rows):
            return _Considered.UNKNOWN
        limits = [self._limits[holds.key_of(row)] for row in rows]
        full = None
        for row, each in zip(rows, limits, strict=True):
            if not each.has_room or (each is not limit and each.has_waiting and self._is_overtaking(each, row)):
                full = each
                break
        if full is not None:
            full.has_waiting = True
            if full.has_room:
                self.served.unfinished.add(full.id)
            for row in rows:
                self._set(row, HoldState.WAITING if holds.key_of(row) == full.id else HoldState.BLOCKED)
            return _Considered.MOVED
        start_us = self._grant(limits)
        for row, each in zip(rows, limits, strict=True):
            each.turn, each.is_changed = max(each.turn, row.turn), True
            self._set(row, HoldState.GRANTED, granted_at=self.now_us, start_at=start_us, check_at=start_us)
        self.served.granted.append(waiter)
        return _Considered.GRANTED

    def _is_overtaking(self, limit: _Limit, row: Any) -> bool:
        """Whether others that asked before wait in the queue of a limit at which this waiter is blocked."""
        given = {"fair_key": row.fair_key, "before": row.seq}
        return self._tx.run(_find_earlier, **limit.id._asdict(), **given).first() is not None

    # --- rows -----------------------------------------------------------------------------------

    def _read(self, waiter: Waiter) -> list[Any]:
        return list(self._tx.run(holds.select_of_waiter, **waiter._asdict()))

    def _delete(self, waiter: Waiter) -> None:
        self._tx.run(holds.delete_of_waiter, **waiter._asdict())

    def _set(self, row: Any, state: HoldState, **values: Any) -> None:
        holds.set_state(self._tx, row, state, **values)

    def close(self) -> Served:
        """Write what has changed in the limits, and return what others have got."""
        for limit in self._limits.values():
            if limit.is_changed:
                names = ("at_once", "rate", "next_grant_at", "next_start_at", "last_seq", "turn")
                self._tx.run(_update_limit, **limit.id._asdict(), **{name: getattr(limit, name) for name in names})
        return self.served


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
    heads = sorted(tx.run(_select_heads, **key._asdict()), key=lambda row: (row.turn, row.seq))
    keys = {key}
    for head in heads[:5]:  # read before the locks, which must be taken in order; what is missing is served next time
        waiter = Waiter(head.instance_pk, head.run_number, head.step_key, head.position)
        keys |= {holds.key_of(row) for row in tx.run(holds.select_of_waiter, **waiter._asdict())}
    locked = LockedLimits(tx, keys)
    locked.fill(key)
    return locked.close()


def find_heads(tx: Tx, key: LimitKey) -> list[Any]:
    """Return the first waiter of each value of ``fair``; without it, the first of all."""
    return list(tx.run(_select_heads, **key._asdict()))


def insert_all_keys(tx: Tx, name: str, numbers: dict[str, Any]) -> None:
    """Insert the row from which new keys of a limit take what an operator has set, unless it exists."""
    given = {"at_once": None, "rate": None, "set_at_once": None, "set_rate": None, "set_by": None} | numbers
    tx.run(_insert_limit, name=name, key="", **given)
