"""Waking the steps to which limits were granted, and finding what nobody has released.

The caller locks the instance of a hold, in a transaction that has locked no limit (`store.runs.limits`).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.errors import InstanceNotFound
from celery_durable.model import DueRun, HoldState, Status, WakeReason, duration_us, from_us, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import constant, param, statement, statement_for
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs import holds
from celery_durable.store.runs.holds import LimitKey, Waiter

_MAX_WAIT, _UNUSED = timedelta(hours=1), timedelta(days=7)


class Woken(NamedTuple):
    """What a wake-up has done: the run to publish, and the limits whose grant it has taken back."""

    due_run: DueRun | None = None
    freed: Collection[LimitKey] = ()


def wake(tx: Tx, waiter: Waiter, *, skip_locked: bool, grace: timedelta, lease: timedelta) -> Woken:
    """Make the instance of a granted step due when the step may start. Without a pass in time, its grant passes on.

    The first time is a lease, and each further one twice as long: passes may come late because many runs are due.
    ``skip_locked``: an instance that is locked is left to a later call.
    """
    rows, instance = _read_granted(tx, waiter), None
    if rows and rows[0].status is not None:
        with suppress(InstanceNotFound):
            lock = instances.lock_if_free if skip_locked else instances.lock
            instance = lock(tx, rows[0].workflow, rows[0].instance_id)
            if instance is None:
                return Woken()
        rows = _read_granted(tx, waiter)
    if not rows:
        return Woken()
    if instance is None or instance.run_number != waiter.run_number or instance.status.is_terminal:
        return Woken(freed=holds.release(tx, *waiter))
    row, now_us = rows[0], rows[0].now_us
    until_us = row.start_at + min(duration_us(lease) * 2 ** min(row.lapses, 20), duration_us(_MAX_WAIT))
    if instance.status is Status.PAUSED or now_us >= until_us:
        lapses = row.lapses + (instance.status is not Status.PAUSED)
        holds.set_state(tx, row, HoldState.PARKED, lapses=lapses)
        return Woken(freed={holds.key_of(row) for row in rows})
    # A claimed run may suspend before the step may start. Then it is woken at that time.
    is_early = instance.claim_token is not None and row.start_at > now_us
    check_us = row.start_at if is_early else until_us
    holds.set_state(tx, row, HoldState.GRANTED, granted_at=row.granted_at, start_at=row.start_at, check_at=check_us)
    if instance.claim_token is not None or (instance.run_at is not None and to_us(instance.run_at) <= row.start_at):
        return Woken()  # its pass will see the grant before it suspends the run
    if row.start_at <= now_us:
        return Woken(lifecycle.make_due(tx, instance, wake_reason=WakeReason.RESUME, grace=grace))
    lifecycle.sleep_until(tx, instance, from_us(row.start_at), wake_reason=WakeReason.RESUME)
    return Woken()


def _read_granted(tx: Tx, waiter: Waiter) -> list[Any]:
    return [row for row in holds.read(tx, *waiter) if row.state == HoldState.GRANTED]


# --- what a job looks for -------------------------------------------------------------------------


@statement
def _select_to_check(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(*(h[name] for name in Waiter._fields))
    return query.where(h.check_at <= s.statement_clock()).order_by(h.check_at).limit(param("limit", sa.Integer))


def find_to_wake(tx: Tx, *, limit: int) -> list[Waiter]:
    """Return steps with a grant that must be checked now."""
    return list(dict.fromkeys(Waiter(*row) for row in tx.run(_select_to_check, limit=limit)))


@statement_for
def _select_keys(s: Store, which: str, of: str) -> Any:
    """Find limits and keys, all or those with waiters, after one: the same limit's later keys, or later limits'."""
    c = (s.tables.hold if which == "waiting" else s.tables.limit).c
    name, key = param("name", sa.String), param("key", sa.String)
    is_next = [c.name == name, c.key > key] if of == "same" else [c.name > name]
    if which == "waiting":
        is_next.append(c.state == constant(HoldState.WAITING))
    return sa.select(c.name, c.key).where(*is_next).order_by(c.name, c.key).limit(param("limit", sa.Integer))


def _find_next(tx: Tx, which: str, after: LimitKey, limit: int) -> list[LimitKey]:
    """Return the next keys of a limit, or else the first one of the next limit."""
    rows = tx.run(_select_keys(which, "same"), **after._asdict(), limit=limit)
    rows = rows or tx.run(_select_keys(which, "later"), name=after.name, limit=1)
    return [holds.key_of(row) for row in rows]


def find_keys(tx: Tx, *, after: LimitKey | None, limit: int) -> list[LimitKey]:
    """Return limits and keys with waiters, in order. It takes an index search for each, however many wait."""
    found: list[LimitKey] = []
    while len(found) < limit and (next_ := _find_next(tx, "waiting", (found or [after or _START])[-1], 1)):
        found += next_
    return found


_START = LimitKey("", "")


@statement
def _delete_unused(s: Store) -> Any:
    c, h = s.tables.limit.c, s.tables.hold.c
    is_one = [c.name == param("name", sa.String), c.key.between(param("first", sa.String), param("last", sa.String))]
    has_holds = sa.exists(sa.select(sa.literal_column("1")).where(h.name == c.name, h.key == c.key))
    # A step that asks has the lock of the row, and changes it with each hold that it inserts.
    is_unused = [c.updated_at <= s.clock() - duration_us(_UNUSED), c.set_by.is_(None), ~has_holds]
    return sa.delete(s.tables.limit).where(*is_one, *is_unused)


def delete_unused(tx: Tx, *, after: LimitKey | None, limit: int) -> LimitKey | None:
    """Delete limits, of the next keys, that nothing has asked for in a week, and whose numbers nobody has set.

    Returns the last key; None: it was the last of all.
    """
    keys = _find_next(tx, "all", after or _START, limit)
    if not keys:
        return None
    tx.run(_delete_unused, name=keys[0].name, first=keys[0].key, last=keys[-1].key)
    return keys[-1]
