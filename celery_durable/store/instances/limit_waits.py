"""Waking the steps to which limits were granted, and finding what nobody has released.

The caller locks the instance of a hold, in a transaction that has locked no limit (`store.runs.limits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.errors import InstanceNotFound
from celery_durable.model import DueRun, HoldState, Status, WakeReason, duration_us, from_us, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs import holds
from celery_durable.store.runs.holds import LimitKey, Waiter
from celery_durable.store.schema.step_format import is_of_step

_MAX_WAIT = timedelta(hours=1)


class Woken(NamedTuple):
    """What a wake-up has done: the run to publish, and the limits whose grant it has taken back."""

    due_run: DueRun | None = None
    freed: Sequence[LimitKey] = ()


@statement
def _select_granted(s: Store) -> Any:
    h, i = s.tables.hold, s.tables.instance
    is_waiter = [
        h.c.instance_pk == param("pk", sa.BigInteger),
        h.c.run_number == param("run", sa.Integer),
        h.c.step_key == param("step_key", sa.String),
        h.c.position == param("position", sa.Integer),
    ]
    joined = h.join(i, i.c.id == h.c.instance_pk)
    columns = [*h.c, i.c.workflow, i.c.instance_id, s.clock().label("now_us")]
    return sa.select(*columns).select_from(joined).where(*is_waiter, h.c.state == HoldState.GRANTED.value)


def wake(tx: Tx, waiter: Waiter, *, grace: timedelta, lease: timedelta) -> Woken:
    """Make the instance of a granted step due when the step may start. Without a pass in time, its grant passes on.

    The first time is a lease, and each further one twice as long: passes may come late because many runs are due.
    """
    found = tx.run(_select_granted, **waiter._asdict()).first()
    if found is None:
        return Woken()
    try:
        instance = instances.lock(tx, found.workflow, found.instance_id)
    except InstanceNotFound:
        return Woken()
    rows = list(tx.run(_select_granted, **waiter._asdict()))
    if not rows:
        return Woken()
    keys = [LimitKey(row.name, row.key) for row in rows]
    if instance.run_number != waiter.run or instance.status.is_terminal:
        holds.release_waiter(tx, waiter)
        return Woken(freed=keys)
    row = rows[0]
    until_us = row.start_at + min(duration_us(lease) * 2 ** min(row.lapses, 20), duration_us(_MAX_WAIT))
    if instance.status is Status.PAUSED or row.now_us >= until_us:
        for row in rows:
            lapses = row.lapses + (instance.status is not Status.PAUSED)
            holds.set_state(tx, row, HoldState.PARKED, lapses=lapses)
        return Woken(freed=keys)
    # A claimed run may suspend before the step may start. Then it is woken at that time.
    is_early = instance.claim_token is not None and row.start_at > row.now_us
    check_us = row.start_at if is_early else until_us
    for row in rows:
        holds.set_state(tx, row, HoldState.GRANTED, granted_at=row.granted_at, start_at=row.start_at, check_at=check_us)
    if instance.claim_token is not None or (instance.run_at is not None and to_us(instance.run_at) <= row.start_at):
        return Woken()  # its pass will see the grant before it suspends the run
    if row.start_at <= row.now_us:
        return Woken(lifecycle.make_due(tx, instance, wake_reason=WakeReason.RESUME, grace=grace))
    lifecycle.sleep_until(tx, instance, from_us(row.start_at), wake_reason=WakeReason.RESUME)
    return Woken()


# --- what a job looks for -------------------------------------------------------------------------


@statement
def _select_to_check(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(h.instance_pk, h.run_number, h.step_key, h.position)
    return query.where(h.check_at <= s.statement_clock()).order_by(h.check_at).limit(param("limit", sa.Integer))


def find_to_wake(tx: Tx, *, limit: int) -> list[Waiter]:
    """Return steps with a grant that must be checked now."""
    return list(dict.fromkeys(Waiter(*row) for row in tx.run(_select_to_check, limit=limit)))


@statement
def _select_next_key(s: Store) -> Any:
    h = s.tables.hold.c
    is_next = [h.name == param("name", sa.String), h.key > param("key", sa.String)]
    query = sa.select(h.name, h.key).where(h.state == sa.literal_column("'waiting'"), *is_next)
    return query.order_by(h.key).limit(sa.literal_column("1"))


@statement
def _select_next_name(s: Store) -> Any:
    h = s.tables.hold.c
    query = sa.select(h.name, h.key).where(h.state == sa.literal_column("'waiting'"), h.name > param("name", sa.String))
    return query.order_by(h.name, h.key).limit(sa.literal_column("1"))


def find_keys(tx: Tx, *, after: LimitKey | None, limit: int) -> list[LimitKey]:
    """Return limits and keys with waiters, in order. It takes an index search for each, however many wait."""
    found: list[LimitKey] = []
    last = after or LimitKey("", "")
    while len(found) < limit:
        row = tx.run(_select_next_key, **last._asdict()).first() or tx.run(_select_next_name, name=last.name).first()
        if row is None:
            break
        last = LimitKey(row.name, row.key)
        found.append(last)
    return found


@statement
def _select_examined(s: Store) -> Any:
    hold, i, st = s.tables.hold, s.tables.instance, s.tables.step
    after = param("after", sa.BigInteger)
    is_current = sa.and_(i.c.id == hold.c.instance_pk, i.c.run_number == hold.c.run_number)
    joined = hold.outerjoin(i, is_current).outerjoin(st, is_of_step(hold, st))
    columns = [*hold.c, i.c.status, i.c.claim_token, st.c.status.label("step_status")]
    query = sa.select(*columns, holds.counts(s, hold.c).label("counts")).select_from(joined)
    return query.where(hold.c.instance_pk > after).order_by(hold.c.instance_pk).limit(param("limit", sa.Integer))


@statement
def _delete_row(s: Store) -> Any:
    """Delete a row as it was read: its step may have asked again."""
    c = s.tables.hold.c
    names = ("instance_pk", "run_number", "step_key", "position", "name", "seq", "state")
    return sa.delete(s.tables.hold).where(*(c[name] == param(name, c[name].type) for name in names))


def delete_dead(tx: Tx, *, after: int, limit: int) -> tuple[int | None, set[LimitKey]]:
    """Delete holds whose owner is gone, of the next instances. Returns the last one, and the limits to serve."""
    rows = tx.run(_select_examined, after=after, limit=limit)
    freed = set()
    for row in rows:
        if not holds.is_alive(row) or (row.state == HoldState.HELD and not row.counts):
            identity = {name: getattr(row, name) for name in ("instance_pk", "run_number", "step_key", "position")}
            if tx.run(_delete_row, **identity, name=row.name, seq=row.seq, state=row.state).rowcount:
                freed.add(LimitKey(row.name, row.key))
    return (rows[-1].instance_pk if len(rows) == limit else None), freed
