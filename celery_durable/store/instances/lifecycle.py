"""Changes of an instance's state from outside a pass: wake, pause, resume, reclaim, restart, terminate.

The caller has locked the instance's row, and decides from what it then read (LAW 2, LAW 2b).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    TERMINAL,
    DueRun,
    InstanceRow,
    RunPlan,
    RunRef,
    Status,
    StepStatus,
    WakeReason,
    duration_us,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.instances.instances import REPLAY, read_clock
from celery_durable.store.runs import holds, items, runs, topic_waits
from celery_durable.store.runs.claims import RELEASED, RESUMING, STARTING
from celery_durable.store.runs.runs import Continuation


def _build_update(s: Store, pk: Any, values: dict[str, Any]) -> Any:
    i = s.tables.instance
    return sa.update(i).where(i.c.id == pk).values(version=i.c.version + 1, updated_at=s.clock(), **values)


def _update(tx: Tx, row: InstanceRow, **values: Any) -> None:
    update(tx, row.pk, **values)


def update(tx: Tx, pk: int, **values: Any) -> None:
    """Change columns of a locked instance, and its version."""
    tx.execute(_build_update(tx.store, pk, values))


def due_values(now: Any, *, wake_reason: Any, grace_us: Any, is_published: bool = True) -> dict[str, Any]:
    """Return the values of an instance that becomes due ``now``. The sweep checks it after ``grace_us``.

    ``is_published`` says that the caller publishes the run after the commit. Otherwise the sweep publishes it.
    """
    return {
        "status": Status.ACTIVE.value,
        "run_at": now,
        "next_check_at": now + grace_us,
        "sent_at": now if is_published else None,
        "dispatch_count": 0,
        "wake_reason": wake_reason,
        "priority": RESUMING,
    }


@statement
def _make_due(s: Store) -> Any:
    values = due_values(
        s.clock(), wake_reason=param("wake_reason", sa.String), grace_us=param("grace_us", type_=sa.BigInteger)
    )
    return _build_update(s, param("pk", sa.BigInteger), values)


def make_due(tx: Tx, row: InstanceRow, *, wake_reason: WakeReason, grace: timedelta) -> DueRun:
    """Make the instance due now, and return its run for the caller to publish after the commit.

    If the caller does not publish it, the sweep does after ``grace``.
    """
    tx.run(_make_due, pk=row.pk, wake_reason=wake_reason.value, grace_us=duration_us(grace))
    return DueRun(row.ref, row.queue)


def sleep_until(tx: Tx, row: InstanceRow, at: datetime, *, wake_reason: WakeReason) -> None:
    """Let a suspended instance be due at a time that comes before its waits end."""
    _update(
        tx,
        row,
        status=Status.WAITING.value,
        run_at=to_us(at),
        next_check_at=to_us(at),
        sent_at=None,
        dispatch_count=0,
        wake_reason=wake_reason.value,
        priority=RESUMING,
    )


def pause(tx: Tx, row: InstanceRow) -> bool:
    """Pause the instance, or request a pause if a worker holds it. Returns whether this call paused it.

    The worker reads the request under its next guard, and the instance becomes paused when the worker releases it.
    """
    if row.claim_token is not None:
        _update(tx, row, pause_requested=True)
    elif row.status is not Status.PAUSED:
        _update(tx, row, status=Status.PAUSED.value, next_check_at=None, sent_at=None)
        return True
    return False


def resume(tx: Tx, row: InstanceRow, *, grace: timedelta) -> DueRun | None:
    """End a pause and make the instance due now, so that a pass checks what happened meanwhile. Returns the run.

    A run that has not started keeps its start time. If that lies in the future, this returns None.
    """
    now = read_clock(tx)
    if not has_started(row) and row.run_at is not None and row.run_at > now:
        _update(tx, row, status=Status.WAITING.value, next_check_at=to_us(row.run_at), sent_at=None)
        return None
    return make_due(tx, row, wake_reason=WakeReason.RESUME, grace=grace)


def cancel_pause_request(tx: Tx, row: InstanceRow) -> None:
    """Cancel a requested pause."""
    _update(tx, row, pause_requested=False)


def request_cancel(tx: Tx, row: InstanceRow, *, reason: str | None, grace: timedelta) -> DueRun | None:
    """Ask the run to stop. Returns it if it is due now, None if a worker holds it: that leaves it at its next boundary.

    It is not paused any more, and neither a pause nor a run that was asked for before follows.
    """
    r = tx.t.run
    tx.execute(
        sa.update(r)
        .where(r.c.instance_pk == row.pk, r.c.run_number == row.run_number)
        .values(cancel_requested_at=tx.store.clock(), reason=reason)
    )
    if row.claim_token is None:
        now, reason_ = tx.store.clock(), WakeReason.RESUME.value
        _update(tx, row, **due_values(now, wake_reason=reason_, grace_us=duration_us(grace)), next_run=None)
        return DueRun(row.ref, row.queue)
    _update(tx, row, pause_requested=True, next_run=None)
    return None


def has_started(row: InstanceRow) -> bool:
    """Whether a pass of the run has begun. A run whose first pass crashed has started."""
    return row.priority != STARTING or row.crash_count > 0 or row.claim_token is not None


def terminate(tx: Tx, row: InstanceRow, *, reason: str | None, is_cancel: bool = False) -> set[holds.LimitKey]:
    """End the instance without a result. A worker that holds it is superseded, so its later writes have no effect.

    Returns the limits to serve after the commit. ``is_cancel``: it was asked to stop, and ends without a cleanup, or
    before its end.
    """
    _update(
        tx,
        row,
        **RELEASED,
        status=Status.TERMINATED.value,
        run_at=None,
        next_check_at=None,
        sent_at=None,
        pause_requested=False,
        retention_until=tx.store.clock() + tx.t.instance.c.retention_us,
        next_run=None,
    )
    r, now = tx.t.run, tx.store.clock()
    # Without a new reason, the reason of the restart is kept.
    values: dict[str, Any] = {"completed_at": now, "reason": reason or r.c.reason}
    if is_cancel:
        values["cancel_requested_at"] = sa.func.coalesce(r.c.cancel_requested_at, now)
    tx.execute(sa.update(r).where(r.c.instance_pk == row.pk, r.c.run_number == row.run_number).values(values))
    items.end_open_of_run(tx, row.pk, row.run_number)
    st = tx.t.step
    open_ = (StepStatus.PENDING.value, StepStatus.WAITING.value)
    tx.execute(
        sa.update(st)
        .where(st.c.instance_pk == row.pk, st.c.run_number == row.run_number, st.c.status.in_(open_))
        .values(status=StepStatus.CANCELLED.value)
    )
    topic_waits.close_all(tx, row.pk)
    return holds.release(tx, row.pk)


def reclaim(tx: Tx, row: InstanceRow, *, grace: timedelta) -> DueRun | None:
    """Take the instance from the worker that holds its claim, and make it due now.

    Returns None if the instance is paused, or if a pause was requested: then it is paused.
    """
    stops = row.status is Status.PAUSED or row.pause_requested
    is_paused = stops and not runs.is_cancel_requested(tx, row.pk, row.run_number)
    now = tx.store.clock()
    _update(
        tx,
        row,
        **RELEASED,
        status=(Status.PAUSED if is_paused else Status.ACTIVE).value,
        run_at=now,
        next_check_at=None if is_paused else now + duration_us(grace),
        sent_at=None if is_paused else now,
        wake_reason=WakeReason.RESUME.value,
        priority=RESUMING,
        dispatch_count=0,
        crash_count=0,
        pause_requested=False,
    )
    return None if is_paused else DueRun(row.ref, row.queue)


def restart(
    tx: Tx,
    row: InstanceRow,
    *,
    grace: timedelta,
    commit_id: str,
    reason: str | None,
    plan: RunPlan = REPLAY,
    continuation: Continuation | None = None,
    delay: timedelta | None = None,
) -> DueRun:
    """Start run N+1 with the same parameters, from any state. The steps, events and logs of run N stay unchanged.

    With a ``delay`` the run is due later, as an instance that is created for later. A run that was asked for
    (`next_runs`) follows this one.

    ``plan`` holds the kind, the planned steps and the workflow's version. ``continuation`` is the state that a rewind
    starts with, None for an empty run. ``commit_id`` identifies the restart if its commit is in doubt.
    """
    r, now = tx.t.run, tx.store.clock()
    params = tx.execute(
        sa.select(r.c.params).where(r.c.instance_pk == row.pk, r.c.run_number == row.run_number)
    ).scalar_one()
    if row.status not in TERMINAL:
        tx.execute(
            sa.update(r)
            .where(r.c.instance_pk == row.pk, r.c.run_number == row.run_number)
            .values(completed_at=now, reason=reason or sa.func.coalesce(r.c.reason, "restarted"))
        )
        items.end_open_of_run(tx, row.pk, row.run_number)
    # The new run records the reason too. A run that had ended keeps its own.
    start = runs.RunStart(params, commit_id, plan, reason, continuation)
    due_us = None if delay is None else now + duration_us(delay)
    return start_run(tx, row.pk, row.ref, row.queue, start, grace=grace, due_us=due_us)


def start_run(
    tx: Tx, pk: int, last: RunRef, queue: str, start: runs.RunStart, *, grace: timedelta, due_us: Any = None
) -> DueRun:
    """Start the run after the ``last`` one of a locked instance, which has ended; due now or at ``due_us``."""
    topic_waits.close_all(tx, pk)
    holds.release(tx, pk)
    number, now = last.run_number + 1, tx.store.clock()
    update(
        tx,
        pk,
        **RELEASED,
        kind=start.plan.kind.value,
        run_number=number,
        **due_now(now, grace) if due_us is None else due_at(due_us),
        wake_reason=WakeReason.START.value,
        priority=STARTING,
        dispatch_count=0,
        crash_count=0,
        pause_requested=False,
        retention_until=None,
    )
    runs.insert(tx, pk, number, start)
    return DueRun(RunRef(last.workflow, last.instance_id, number), queue)


def due_now(now_us: Any, grace: timedelta) -> dict[str, Any]:
    """Return the values of an instance whose run starts now. Its caller publishes it after the commit."""
    next_check_us = now_us + duration_us(grace)
    return {"status": Status.ACTIVE.value, "run_at": now_us, "next_check_at": next_check_us, "sent_at": now_us}


def due_at(due_us: Any) -> dict[str, Any]:
    """Return the values of an instance whose run starts later."""
    return {"status": Status.WAITING.value, "run_at": due_us, "next_check_at": due_us, "sent_at": None}
