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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.model import LIMITS_KEY, TERMINAL, HoldState, ItemStatus, Status, StepStatus
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.schema import dialects
from celery_durable.store.schema.dialects import MARIADB
from celery_durable.store.schema.step_format import is_of_step
from celery_durable.values import LimitUse, rate_interval_us

HORIZON_US = 2_000_000
"""How long before its start a grant is given at most, so that a slot is not kept long for a rate."""
SLACK_US = 100_000
"""How much earlier than a strict rate allows a step may start. It makes up for wake-ups that come late."""
STEP = -1
"""The position of a hold that belongs to the step itself. That of a task has the position of its item."""
CHILD_HOLDER = "child"
"""The token of a hold that belongs to the child of a step."""
_MAX_GRANTS = 50
"""How many waiters of a key one transaction considers."""
_RESUMED = 2**62
"""What is subtracted from the number of a waiter that has had the limit already: it goes before all new ones."""


class LimitKey(NamedTuple):
    """A limit, and the value of its function ``by``; empty without one."""

    name: str
    key: str


class Waiter(NamedTuple):
    """A step, or an item of one, that holds limits or waits for them."""

    pk: int
    run: int
    step_key: str
    position: int = STEP


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


def _is_of_waiter(c: Any) -> list[sa.ColumnElement[bool]]:
    return [*_is_of_step(c), c.position == param("position", sa.Integer)]


def _is_of_step(c: Any) -> list[sa.ColumnElement[bool]]:
    return [
        c.instance_pk == param("pk", sa.BigInteger),
        c.run_number == param("run", sa.Integer),
        c.step_key == param("step_key", sa.String),
    ]


def counts(s: Store, h: Any) -> sa.ColumnElement[bool]:
    """Build the condition that an active hold counts: it is granted, or its owner is still the one that took it."""
    i = s.tables.instance.alias("owner").c
    has_run = [i.id == h.instance_pk, i.run_number == h.run_number]
    live = [i.status != sa.literal_column(f"'{status.value}'") for status in sorted(TERMINAL)]
    is_owner = sa.or_(i.claim_token == h.token, sa.and_(h.token.is_(None), *live))  # of a workflow's: the run itself
    return sa.or_(
        h.state == sa.literal_column("'granted'"),
        sa.exists(sa.select(sa.literal_column("1")).where(*has_run, is_owner)),
        sa.and_(h.position >= sa.literal_column("0"), _is_out(s, h)),
        sa.and_(h.token == sa.literal_column(f"'{CHILD_HOLDER}'"), _awaits_child(s, h)),
    )


def _is_out(s: Store, h: Any) -> sa.ColumnElement[bool]:
    """Build the condition that the attempt of a task that holds is sent, and has no answer."""
    item = s.tables.item.alias("owner_item").c
    same = [item[name] == h[name] for name in ("instance_pk", "run_number", "step_key", "position")]
    return sa.exists(
        sa.select(sa.literal_column("1")).where(
            *same, item.attempt_token == h.token, item.status == sa.literal_column(f"'{ItemStatus.SENT.value}'")
        )
    )


def _awaits_child(s: Store, h: Any) -> sa.ColumnElement[bool]:
    """Build the condition that the child of a step that holds has not ended."""
    st, e = s.tables.step.alias("owner_step").c, s.tables.event.alias("owner_event").c
    same = [st[name] == h[name] for name in ("instance_pk", "run_number", "step_key")]
    has_ended = sa.exists(
        sa.select(sa.literal_column("1")).where(
            e.instance_pk == st.instance_pk, e.run_number == st.run_number, e.type == st.wait_event_type
        )
    )
    is_waiting = st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'")
    return sa.exists(
        sa.select(sa.literal_column("1")).where(*same, is_waiting, st.wait_event_type.is_not(None), ~has_ended)
    )


def is_active(h: Any) -> Any:
    """Build the condition of the partial index over the rows that may count."""
    return h.state.in_([sa.literal_column("'held'"), sa.literal_column("'granted'")])


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
    active = sa.select(sa.func.count()).select_from(h).where(*_is_limit(h.c), is_active(h.c))
    return sa.select(
        s.clock().label("now_us"),
        active.where(counts(s, h.c)).scalar_subquery().label("used"),
        active.where(h.c.state == sa.literal_column("'granted'")).scalar_subquery().label("granted"),
        sa.exists(sa.select(sa.literal_column("1")).select_from(w).where(*_is_waiting(w.c))).label("has_waiting"),
    )


@statement
def _count_by_fair_key(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(h.fair_key, sa.func.count().label("n")).where(*_is_limit(h), is_active(h), counts(s, h))
    return query.group_by(h.fair_key)


_STATE = ("token", "granted_at", "start_at", "check_at", "lapses")
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
def _select_of_waiter(s: Store) -> Any:
    """Read the rows of a waiter, in the order of its limits, with what says whether it still waits."""
    hold, i, st = s.tables.hold, s.tables.instance, s.tables.step
    is_current = sa.and_(i.c.id == hold.c.instance_pk, i.c.run_number == hold.c.run_number)
    joined = hold.outerjoin(i, is_current).outerjoin(st, is_of_step(hold, st))
    columns = [*hold.c, i.c.status.label("status"), st.c.status.label("step_status")]
    return sa.select(*columns).select_from(joined).where(*_is_of_waiter(hold.c)).order_by(hold.c.name)


@statement
def _select_held_keys(s: Store) -> Any:
    h = s.tables.hold.c
    return sa.select(h.name, h.key).where(*_is_of_step(h))


@statement
def _select_keys_of_instance(s: Store) -> Any:
    h = s.tables.hold.c
    return sa.select(h.name, h.key).where(h.instance_pk == param("pk", sa.BigInteger))


@statement
def _insert_hold(s: Store) -> Any:
    hold = s.tables.hold
    values: dict[str, Any] = {column.name: param(column.name, column.type) for column in hold.c}
    return sa.insert(hold).values(values).inline()


@statement
def _set_state(s: Store) -> Any:
    """Change a row as it was read: its step may have ended it meanwhile."""
    hold = s.tables.hold
    values = {name: param(name, hold.c[name].type) for name in _STATE}
    is_row = [*_is_of_waiter(hold.c), hold.c.name == param("name", sa.String), hold.c.seq == param("seq")]
    return sa.update(hold).where(*is_row).values(state=param("state", sa.String), **values)


@statement
def _delete_of_waiter(s: Store) -> Any:
    return sa.delete(s.tables.hold).where(*_is_of_waiter(s.tables.hold.c))


@statement
def _delete_of_step(s: Store) -> Any:
    return sa.delete(s.tables.hold).where(*_is_of_step(s.tables.hold.c))


@statement
def _delete_of_instance(s: Store) -> Any:
    return sa.delete(s.tables.hold).where(s.tables.hold.c.instance_pk == param("pk", sa.BigInteger))


@statement
def _select_of_items(s: Store) -> Any:
    """Read the first row of each item that a map has in queues or sent, and whether it counts."""
    h = s.tables.hold.c
    columns = [h.position, h.name, h.key, h.state, h.start_at, counts(s, h).label("counts")]
    return sa.select(*columns).where(*_is_of_step(h)).order_by(h.position, h.name)


@statement
def _find_grant(s: Store) -> Any:
    h = s.tables.hold.c
    states = sa.or_(h.state == sa.literal_column("'granted'"), h.state == sa.literal_column("'parked'"))
    return sa.select(h.seq).where(*_is_of_step(h), states).limit(sa.literal_column("1"))


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
            at = next((row for row in rows if not self._limits[_key(row)].has_room), rows[0])
            for row in rows:
                self._set(row, HoldState.WAITING if row is at else HoldState.BLOCKED)
            self._limits[_key(at)].has_waiting = True
        return True

    def _find_reply(self, request: Request) -> Reply:
        """Return what a step has that waited before: it starts if it is granted, and its time has come."""
        rows = self._read(request.waiter)
        if not rows or rows[0].state != HoldState.GRANTED:
            return Reply(holds=False)
        start_us = self._start([self._limits[_key(row)] for row in rows], rows[0].start_at)
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
            self._tx.run(_insert_hold, **row, **_identity(request.waiter, _COLUMNS))
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
        if not any(_key(row) == limit.id and row.state == HoldState.WAITING for row in rows):
            return _Considered.LEFT  # its step has ended it meanwhile
        if not is_alive(rows[0]):
            self._delete(waiter)
            return _Considered.LEFT
        if rows[0].status == Status.PAUSED:
            for row in rows:
                self._set(row, HoldState.PARKED)
            return _Considered.LEFT
        if any(_key(row) not in self._limits for row in rows):
            return _Considered.UNKNOWN
        limits = [self._limits[_key(row)] for row in rows]
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
                self._set(row, HoldState.WAITING if _key(row) == full.id else HoldState.BLOCKED)
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
        return list(self._tx.run(_select_of_waiter, **_identity(waiter)))

    def _delete(self, waiter: Waiter) -> None:
        self._tx.run(_delete_of_waiter, **_identity(waiter))

    def _set(self, row: Any, state: HoldState, **values: Any) -> None:
        set_state(self._tx, row, state, **values)

    def close(self) -> Served:
        """Write what has changed in the limits, and return what others have got."""
        for limit in self._limits.values():
            if limit.is_changed:
                names = ("at_once", "rate", "next_grant_at", "next_start_at", "last_seq", "turn")
                self._tx.run(_update_limit, **limit.id._asdict(), **{name: getattr(limit, name) for name in names})
        return self.served


_COLUMNS = {"pk": "instance_pk", "run": "run_number"}


def _identity(waiter: Waiter, names: dict[str, str] | None = None) -> dict[str, Any]:
    return {(names or {}).get(name, name): value for name, value in waiter._asdict().items()}


def _key(row: Any) -> LimitKey:
    return LimitKey(row.name, row.key)


def is_alive(row: Any) -> bool:
    """Whether the run of a row is the current one and has not ended, and its step neither."""
    finished = row.step_status is not None and StepStatus(row.step_status) not in (
        StepStatus.WAITING, StepStatus.PENDING,
    )  # fmt: skip
    is_over = finished and row.step_key != LIMITS_KEY
    return row.status is not None and Status(row.status) not in TERMINAL and not is_over


def set_state(tx: Tx, row: Any, state: HoldState, **values: Any) -> None:
    """Change the state of a row as it was read, if it still exists. What ``values`` leaves out becomes NULL."""
    given = dict.fromkeys(_STATE) | {"lapses": row.lapses} | values
    waiter = Waiter(row.instance_pk, row.run_number, row.step_key, row.position)
    tx.run(_set_state, **_identity(waiter), name=row.name, seq=row.seq, state=state.value, **given)


# --- for those that ask, and those that end -------------------------------------------------------


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
        keys |= {_key(row) for row in tx.run(_select_of_waiter, **_identity(waiter))}
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


def release(tx: Tx, pk: int, run: int, step_key: str) -> list[LimitKey]:
    """Delete what a step of a locked instance holds or waits for, and return the limits to serve after the commit."""
    keys = [LimitKey(*row) for row in tx.run(_select_held_keys, pk=pk, run=run, step_key=step_key)]
    if keys:
        tx.run(_delete_of_step, pk=pk, run=run, step_key=step_key)
    return sorted(set(keys))


def release_ended(tx: Tx, pk: int, run: int, step_key: str) -> set[LimitKey]:
    """Delete what items of a map hold that are not sent any more, and return the limits to serve after the commit."""
    ended = [
        row
        for row in tx.run(_select_of_items, pk=pk, run=run, step_key=step_key)
        if row.state == HoldState.HELD and not row.counts
    ]
    for position in {row.position for row in ended}:
        release_waiter(tx, Waiter(pk, run, step_key, position))
    return {LimitKey(row.name, row.key) for row in ended}


def read_queued_items(tx: Tx, pk: int, run: int, step_key: str, *, now_us: int) -> tuple[int, bool]:
    """Return how many items of a map are in queues, and whether one needs a pass: it may start, or is parked."""
    rows = [row for row in tx.run(_select_of_items, pk=pk, run=run, step_key=step_key) if row.state != HoldState.HELD]
    needs_pass = any(
        row.state == HoldState.PARKED or (row.state == HoldState.GRANTED and row.start_at <= now_us) for row in rows
    )
    return len({row.position for row in rows}), needs_pass


def has_hold(s: Store, item: Any) -> sa.ColumnElement[bool]:
    """Build the condition that an item of a map has limits."""
    h = s.tables.hold.alias("item_hold").c
    same = [h[name] == item[name] for name in ("instance_pk", "run_number", "step_key", "position")]
    return sa.exists(sa.select(sa.literal_column("1")).where(*same))


def release_waiter(tx: Tx, waiter: Waiter) -> None:
    """Delete what one waiter of a locked instance has or waits for."""
    tx.run(_delete_of_waiter, **_identity(waiter))


def release_all(tx: Tx, pk: int) -> list[LimitKey]:
    """Delete all holds of a locked instance, and return the limits to serve. If nobody does, a job serves them."""
    keys = [LimitKey(*row) for row in tx.run(_select_keys_of_instance, pk=pk)]
    if keys:
        tx.run(_delete_of_instance, pk=pk)
    return sorted(set(keys))


def is_granted(tx: Tx, pk: int, run: int, step_keys: Collection[str]) -> bool:
    """Whether one of these steps needs a pass: its limits are granted, or it has lost its place in the queue."""
    return any(tx.run(_find_grant, pk=pk, run=run, step_key=key).first() is not None for key in step_keys)
