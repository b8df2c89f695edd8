"""Holds of limits: the rows of those that have limits or wait for them, and which of them count.

`store.runs.limits` decides who gets what. Whoever ends a step or a run deletes its holds here, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.model import LIMITS_KEY, TERMINAL, HoldState, ItemStatus, Status, StepStatus
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
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

    pk: int
    run: int
    step_key: str
    position: int = STEP


def is_of_waiter(c: Any) -> list[sa.ColumnElement[bool]]:
    """Build the conditions for the rows of a waiter."""
    return [*is_of(c), c.position == param("position", sa.Integer)]


def is_of(c: Any) -> list[sa.ColumnElement[bool]]:
    """Build the conditions for the rows of a step and its items."""
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


# --- rows ---------------------------------------------------------------------------------------


@statement
def select_of_waiter(s: Store) -> Any:
    """Read the rows of a waiter, in the order of its limits, with what says whether it still waits."""
    hold, i, st = s.tables.hold, s.tables.instance, s.tables.step
    is_current = sa.and_(i.c.id == hold.c.instance_pk, i.c.run_number == hold.c.run_number)
    joined = hold.outerjoin(i, is_current).outerjoin(st, is_of_step(hold, st))
    columns = [*hold.c, i.c.status.label("status"), st.c.status.label("step_status")]
    return sa.select(*columns).select_from(joined).where(*is_of_waiter(hold.c)).order_by(hold.c.name)


@statement
def _select_held_keys(s: Store) -> Any:
    h = s.tables.hold.c
    return sa.select(h.name, h.key).where(*is_of(h))


@statement
def _select_keys_of_instance(s: Store) -> Any:
    h = s.tables.hold.c
    return sa.select(h.name, h.key).where(h.instance_pk == param("pk", sa.BigInteger))


_STATE = ("token", "granted_at", "start_at", "check_at", "lapses")


@statement
def _set_state(s: Store) -> Any:
    """Change a row as it was read: its step may have ended it meanwhile."""
    hold = s.tables.hold
    values = {name: param(name, hold.c[name].type) for name in _STATE}
    is_row = [*is_of_waiter(hold.c), hold.c.name == param("name", sa.String), hold.c.seq == param("seq")]
    return sa.update(hold).where(*is_row).values(state=param("state", sa.String), **values)


@statement
def delete_of_waiter(s: Store) -> Any:
    """Delete the rows of a waiter."""
    return sa.delete(s.tables.hold).where(*is_of_waiter(s.tables.hold.c))


@statement
def _delete_of_step(s: Store) -> Any:
    return sa.delete(s.tables.hold).where(*is_of(s.tables.hold.c))


@statement
def _delete_of_instance(s: Store) -> Any:
    return sa.delete(s.tables.hold).where(s.tables.hold.c.instance_pk == param("pk", sa.BigInteger))


@statement
def _select_of_items(s: Store) -> Any:
    """Read the first row of each item that a map has in queues or sent, and whether it counts."""
    h = s.tables.hold.c
    columns = [h.position, h.name, h.key, h.state, h.start_at, counts(s, h).label("counts")]
    return sa.select(*columns).where(*is_of(h)).order_by(h.position, h.name)


@statement
def _find_grant(s: Store) -> Any:
    h = s.tables.hold.c
    states = sa.or_(h.state == sa.literal_column("'granted'"), h.state == sa.literal_column("'parked'"))
    return sa.select(h.seq).where(*is_of(h), states).limit(sa.literal_column("1"))


def key_of(row: Any) -> LimitKey:
    """Return the limit and key of a row."""
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
    tx.run(_set_state, **waiter._asdict(), name=row.name, seq=row.seq, state=state.value, **given)


# --- for those that end, and those that wait ------------------------------------------------------


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


def read_queued_items(tx: Tx, pk: int, run: int, step_key: str) -> dict[int, Any]:
    """Return a row of each item of a map that is in queues, by position: those first that the queue has let go."""
    rows = [row for row in tx.run(_select_of_items, pk=pk, run=run, step_key=step_key) if row.state != HoldState.HELD]
    return {row.position: row for row in sorted(rows, key=lambda row: row.state in _IN_QUEUE)}


_IN_QUEUE = (HoldState.WAITING, HoldState.BLOCKED)


def has_hold(s: Store, item: Any) -> sa.ColumnElement[bool]:
    """Build the condition that an item of a map has limits."""
    h = s.tables.hold.alias("item_hold").c
    same = [h[name] == item[name] for name in ("instance_pk", "run_number", "step_key", "position")]
    return sa.exists(sa.select(sa.literal_column("1")).where(*same))


def release_waiter(tx: Tx, waiter: Waiter) -> None:
    """Delete what one waiter of a locked instance has or waits for."""
    tx.run(delete_of_waiter, **waiter._asdict())


def release_all(tx: Tx, pk: int) -> list[LimitKey]:
    """Delete all holds of a locked instance, and return the limits to serve. If nobody does, a job serves them."""
    keys = [LimitKey(*row) for row in tx.run(_select_keys_of_instance, pk=pk)]
    if keys:
        tx.run(_delete_of_instance, pk=pk)
    return sorted(set(keys))


def is_granted(tx: Tx, pk: int, run: int, step_keys: Collection[str]) -> bool:
    """Whether one of these steps needs a pass: its limits are granted, or it has lost its place in the queue."""
    return any(tx.run(_find_grant, pk=pk, run=run, step_key=key).first() is not None for key in step_keys)
