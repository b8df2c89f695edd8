"""Holds of limits: the rows of those that have limits or wait for them, and which of them count.

`store.runs.limits` decides who gets what. Whoever ends a step or a run deletes its holds here, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.model import LIMITS_KEY, TERMINAL, HoldState, ItemStatus, Status, StepStatus
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import constant, param, statement, statement_for
from celery_durable.store.schema.dialects import POSTGRESQL
from celery_durable.store.schema.step_format import is_of_step

STEP = -1
"""The position of a hold that belongs to the step itself. That of a task has the position of its item."""
CHILD_HOLDER = "child"
"""The token of a hold that belongs to the child of a step."""


class LimitKey(NamedTuple):
    """A limit, and the value of its function ``by``; empty without one."""

    name: str
    key: str


class Waiter(NamedTuple):
    """A step, or an item of one, that holds limits or waits for them."""

    instance_pk: int
    run_number: int
    step_key: str
    position: int = STEP


def key_of(row: Any) -> LimitKey:
    """Return the limit and key of a row."""
    return LimitKey(row.name, row.key)


def waiter_of(row: Any) -> Waiter:
    """Return what has a row."""
    return Waiter(row.instance_pk, row.run_number, row.step_key, row.position)


def is_active(h: Any) -> Any:
    """Build the condition of the partial index over the rows that may count."""
    return h.state.in_([constant(HoldState.HELD), constant(HoldState.GRANTED)])


def counts(s: Store, h: Any) -> sa.ColumnElement[bool]:
    """Build the condition that an active hold counts: it is granted, or its owner is still the one that took it.

    The owner is a claim, the run itself without a token, the attempt of a task that is sent, or a child.
    """
    i, item = s.tables.instance.alias("owner").c, s.tables.item.alias("owner_item").c
    st, e = s.tables.step.alias("owner_step").c, s.tables.event.alias("owner_event").c
    is_live = sa.and_(*(i.status != constant(status) for status in sorted(TERMINAL)))
    is_owner = sa.or_(i.claim_token == h.token, sa.and_(h.token.is_(None), is_live))
    is_out = [item.attempt_token == h.token, item.status == constant(ItemStatus.SENT)]
    has_ended = [e[name] == st[name] for name in ("instance_pk", "run_number")]
    is_waiting = [st.status == constant(StepStatus.WAITING), st.wait_event_type.is_not(None)]
    is_waiting.append(~_exists(s, *has_ended, e.type == st.wait_event_type))
    return sa.or_(
        h.state == constant(HoldState.GRANTED),
        _exists(s, i.id == h.instance_pk, i.run_number == h.run_number, is_owner),
        sa.and_(h.position >= sa.literal_column("0"), _exists(s, *_is_same(item, h, 4), *is_out)),
        sa.and_(h.token == constant(CHILD_HOLDER), _exists(s, *_is_same(st, h, 3), *is_waiting)),
    )


def _exists(s: Store, *conditions: Any) -> sa.ColumnElement[bool]:
    """Build the condition that there is such a row, to be looked for with each hold.

    For many holds PostgreSQL would read all such rows of the database first. It cannot do that with an OFFSET.
    """
    query: sa.Select[Any] = sa.select(sa.literal_column("1")).where(*conditions)
    return sa.exists(query.offset(sa.literal_column("0")) if s.database is POSTGRESQL else query)


def _is_same(a: Any, b: Any, depth: int) -> list[sa.ColumnElement[bool]]:
    return [a[name] == b[name] for name in Waiter._fields[:depth]]


def has_hold(s: Store, item: Any) -> sa.ColumnElement[bool]:
    """Build the condition that an item of a map has limits."""
    return _exists(s, *_is_same(s.tables.hold.alias("item_hold").c, item, 4))


# --- rows ---------------------------------------------------------------------------------------


def _is_of(s: Store, depth: int) -> list[sa.ColumnElement[bool]]:
    """Build the conditions for the rows of an instance (depth 1), a step (3) or a waiter (4)."""
    c = s.tables.hold.c
    return [c[name] == param(name, c[name].type) for name in Waiter._fields[:depth]]


def select_rows(s: Store) -> sa.Select[Any]:
    """Build the query for rows, with the state of their instance and step, and whether they count."""
    hold, i, st = s.tables.hold, s.tables.instance, s.tables.step
    is_current = sa.and_(i.c.id == hold.c.instance_pk, i.c.run_number == hold.c.run_number)
    owner = [i.c.workflow, i.c.instance_id, i.c.status, st.c.status.label("step_status")]
    columns = [*hold.c, *owner, counts(s, hold.c).label("counts"), s.clock().label("now_us")]
    return sa.select(*columns).select_from(hold.outerjoin(i, is_current).outerjoin(st, is_of_step(hold, st)))


@statement_for
def _select(s: Store, depth: int) -> Any:
    return select_rows(s).where(*_is_of(s, depth)).order_by(s.tables.hold.c.position, s.tables.hold.c.name)


@statement_for
def _delete(s: Store, depth: int) -> Any:
    return sa.delete(s.tables.hold).where(*_is_of(s, depth)).returning(s.tables.hold.c.name, s.tables.hold.c.key)


_STATE = ("token", "granted_at", "start_at", "check_at", "lapses")


@statement
def _set_state(s: Store) -> Any:
    c = s.tables.hold.c
    at = sa.case((c.name == param("at", sa.String), constant(HoldState.WAITING)), else_=param("state", sa.String))
    values = {name: param(name, c[name].type) for name in _STATE}
    return sa.update(s.tables.hold).where(*_is_of(s, 4)).values(state=at, **values)


def read(tx: Tx, *owner: Any) -> list[Any]:
    """Return the rows of a step or a waiter (the fields of `Waiter`), by position and limit."""
    return tx.run(_select(len(owner)), **dict(zip(Waiter._fields, owner, strict=False)))


def release(tx: Tx, *owner: Any) -> set[LimitKey]:
    """Delete what an instance, a step or a waiter (the fields of `Waiter`) holds or waits for.

    Returns the limits to serve after the commit. If nobody does, a job serves them.
    """
    rows = tx.run(_delete(len(owner)), **dict(zip(Waiter._fields, owner, strict=False)))
    return {key_of(row) for row in rows}


def set_state(tx: Tx, row: Any, state: HoldState, *, at: str = "", **values: Any) -> None:
    """Change the rows of the waiter of ``row``, if they still exist. What ``values`` leaves out becomes NULL.

    ``at``: the limit for which it waits from now on. ``state`` is that of the others.
    """
    given = dict.fromkeys(_STATE) | {"lapses": row.lapses} | values
    tx.run(_set_state, **waiter_of(row)._asdict(), at=at, state=state.value, **given)


def is_alive(row: Any) -> bool:
    """Whether the run of a row is the current one and has not ended, and its step neither."""
    is_open = row.step_status in (None, StepStatus.WAITING, StepStatus.PENDING) or row.step_key == LIMITS_KEY
    return row.status is not None and Status(row.status) not in TERMINAL and is_open


# --- for those that end, and those that wait ------------------------------------------------------


def release_ended(tx: Tx, *step: Any) -> set[LimitKey]:
    """Delete what items of a map hold that are not sent any more, and return the limits to serve after the commit."""
    ended = {waiter_of(row) for row in read(tx, *step) if row.state == HoldState.HELD and not row.counts}
    return {key for waiter in ended for key in release(tx, *waiter)}


def read_queued_items(tx: Tx, *step: Any) -> dict[int, Any]:
    """Return a row of each item of a map that is in queues, by position: those first that the queue has let go."""
    rows = [row for row in read(tx, *step) if row.state != HoldState.HELD]
    return {row.position: row for row in sorted(rows, key=lambda row: row.state in _IN_QUEUE)}


_IN_QUEUE = (HoldState.WAITING, HoldState.BLOCKED)


def is_granted(tx: Tx, pk: int, run: int, step_keys: Collection[str]) -> bool:
    """Whether one of these steps needs a pass: its limits are granted, or it has lost its place in the queue."""
    states = (HoldState.GRANTED, HoldState.PARKED)
    return any(row.state in states for key in step_keys for row in read(tx, pk, run, key))
