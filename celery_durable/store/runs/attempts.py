"""The attempts that did not succeed, and the deaths of workers, written with the commit that records the failure.

A person reads them; no decision depends on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    LEASE_EXPIRED,
    REPEAT_SEPARATOR,
    AttemptOutcome,
    AttemptRecord,
    AttemptWrite,
    ErrorInfo,
    StepStatus,
    WorkflowKind,
    duration_us,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.schema.step_format import is_of_step

MAX_KEPT = 50
"""How many attempts of a step, or of an item, are kept: the newest. A step may be retried for ever."""

_PROCESS_DIED = "WorkerLostError"


@statement
def _insert(s: Store) -> Any:
    columns = s.tables.attempt.c
    return (
        sa.insert(s.tables.attempt).values({c.name: param(c.name, c.type) for c in columns if c.name != "id"}).inline()
    )


@statement
def _delete_old(s: Store) -> Any:
    a = s.tables.attempt
    item = param("item", sa.Integer)
    return sa.delete(a).where(
        a.c.instance_pk == param("pk", sa.BigInteger),
        a.c.run_number == param("run", sa.Integer),
        a.c.step_key == param("key", sa.String),
        sa.func.coalesce(a.c.item, -1) == item,
        a.c.attempt <= param("last", sa.Integer),
    )


def insert(tx: Tx, pk: int, run_number: int, writes: Sequence[AttemptWrite], *, now: datetime) -> None:
    """Write attempts that end now. Of each step, only the newest `MAX_KEPT` are kept."""
    rows = [_encode(pk, run_number, write, now) for write in writes]
    tx.run_many(_insert, rows)
    for write in writes:
        if write.step_key is not None and write.number is not None and write.number > MAX_KEPT:
            item = -1 if write.item is None else write.item
            tx.run(_delete_old, pk=pk, run=run_number, key=write.step_key, item=item, last=write.number - MAX_KEPT)


def _encode(pk: int, run_number: int, write: AttemptWrite, now: datetime) -> dict[str, Any]:
    worker, ended_us = write.worker, to_us(now)
    return {
        "instance_pk": pk,
        "run_number": run_number,
        "step_key": write.step_key,
        "item": write.item,
        "attempt": write.number,
        "outcome": write.outcome.value,
        "error_name": write.error_name,
        "error_message": write.error_message,
        "traceback": write.trace.text,
        "file": write.trace.file,
        "line": write.trace.line,
        "node": None if worker is None else worker.node,
        "pid": None if worker is None else worker.pid,
        "task_id": write.task_id if worker is None else worker.task_id,
        "started_at": None if write.ran_for is None else ended_us - duration_us(write.ran_for),
        "ended_at": ended_us,
    }


# --- deaths of workers --------------------------------------------------------------------------


def crash_columns(i: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns of an instance that `record_crash` needs. A claim overwrites them."""
    c = i.c
    return [c.kind, c.claimed_by, c.claim_task_id, c.running_step_key, c.running_attempt, c.running_since]


def record_crash(tx: Tx, row: Any, *, pk: int, run_number: int, now: datetime, died: str | None = None) -> None:
    """Record that the worker with the claim of an instance is dead. ``row``: has the `crash_columns`.

    The row has no step: nothing is written when a body begins. Its message says what the renewer of leases has written,
    which is late. ``died``: how the process died, if its death was seen. Otherwise its lease has expired.
    """
    message = "The worker died, hung or lost its lease." if died is None else f"The worker's process died: {died}"
    if row.running_step_key is not None:
        name = row.running_step_key.partition(REPEAT_SEPARATOR)[0]
        step = f"step {name!r}" if row.kind == WorkflowKind.REPLAY.value else f"the step at position {name}"
        message += f" When it last renewed its lease, it ran {step}, attempt {row.running_attempt}."
    elif (last := tx.execute(_select_last_step(tx.t.step, pk, run_number)).scalar()) is not None:
        message += f" The last step that it recorded is {last!r}."
    else:
        message += " It recorded no step."
    name = LEASE_EXPIRED if died is None else _PROCESS_DIED
    crash = AttemptWrite(None, None, AttemptOutcome.CRASHED, name, message, task_id=row.claim_task_id)
    known = {"node": row.claimed_by, "started_at": row.running_since}
    tx.run(_insert, **_encode(pk, run_number, crash, now) | known)


def _select_last_step(st: sa.Table, pk: int, run_number: int) -> sa.Select[Any]:
    is_recorded = st.c.status.not_in([StepStatus.LINEAR_PENDING.value, StepStatus.READY.value])
    mine = (st.c.instance_pk == pk, st.c.run_number == run_number, is_recorded)
    return sa.select(st.c.name).where(*mine).order_by(st.c.seq.desc(), st.c.step_key.desc()).limit(1)


# --- read ---------------------------------------------------------------------------------------


def read(
    tx: Tx,
    pk: int,
    run_number: int,
    *,
    after_id: int | None = None,
    newest_first: bool = False,
    limit: int | None = None,
    steps: Collection[str] | None = None,
) -> list[AttemptRecord]:
    """Return attempts of a run after ``after_id``, in the order of their ends, or reversed; perhaps of some steps."""
    a, st = tx.t.attempt, tx.t.step
    # An outer join: deaths of workers, and errors between steps, have no step.
    query = sa.select(a, st.c.name.label("step")).select_from(a.outerjoin(st, is_of_step(a, st)))
    query = query.where(a.c.instance_pk == pk, a.c.run_number == run_number).limit(limit)
    query = query.order_by(a.c.id.desc() if newest_first else a.c.id)
    if after_id is not None:
        query = query.where(a.c.id < after_id if newest_first else a.c.id > after_id)
    if steps is not None:
        query = query.where(a.c.step_key.in_(steps))
    return [_to_record(row) for row in tx.execute(query)]


def _to_record(row: Any) -> AttemptRecord:
    return AttemptRecord(
        id=row.id,
        step_key=row.step_key,
        item=row.item,
        attempt=row.attempt,
        outcome=AttemptOutcome(row.outcome),
        error=ErrorInfo(row.error_name, row.error_message),
        traceback=row.traceback,
        file=row.file,
        line=row.line,
        worker=row.node,
        pid=row.pid,
        task_id=row.task_id,
        started_at=from_us_or_none(row.started_at),
        ended_at=from_us(row.ended_at),
        step=row.step,
    )
