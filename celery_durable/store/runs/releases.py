"""How a claim ends: the run is suspended, released because it can continue, or ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import Superseded
from celery_durable.model import Claim, OpenWait, ReleaseOutcome, RunOutcome, WakeReason, decide_release, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import runs
from celery_durable.store.runs.claims import RELEASED, RESUMING, GuardResult


@statement
def _release(s: Store) -> Any:
    """Release an instance. The guard before it in the same transaction has incremented the version."""
    i = s.tables.instance
    return (
        sa.update(i)
        .where(i.c.id == param("pk"), i.c.claim_token == param("token"))
        .values(
            **RELEASED,
            status=param("status"),
            run_at=param("run_us", type_=sa.BigInteger),
            next_check_at=param("next_check_us", type_=sa.BigInteger),
            sent_at=param("sent_us", type_=sa.BigInteger),
            wake_reason=param("wake_reason"),
            priority=RESUMING,
            dispatch_count=0,
            pause_requested=sa.false(),
            updated_at=s.clock(),
        )
    )


def suspend(
    tx: Tx, claim: Claim, guard_result: GuardResult, waits: Iterable[OpenWait], *, grace: timedelta
) -> ReleaseOutcome:
    """Suspend the instance until the earliest of ``waits``. If one is satisfied already, release it as due now.

    Call it after `guard`: it finds every event committed before. The sender of a later one locks the row after this
    transaction, and finds the waiting step (LAW 2b).
    """
    waits = list(waits)
    if guard_result.pause_requested and runs.is_cancel_requested(tx, claim.pk, claim.ref.run_number):
        return release(tx, claim, guard_result, grace=grace)
    next_at = min(wait.due_at for wait in waits)
    is_any_satisfied = _has_event_for(tx, claim, waits) or any(
        wait.condition.is_met(tx, guard_result.now) for wait in waits if wait.condition is not None
    )
    if next_at > guard_result.now and not is_any_satisfied:
        return _release_claim(
            tx, claim, guard_result, is_due=False, run_at=next_at, next_check_at=next_at, wake_reason=WakeReason.TIMER
        )
    return release(tx, claim, guard_result, grace=grace)


def release(
    tx: Tx, claim: Claim, guard_result: GuardResult, *, grace: timedelta, cooldown: timedelta = timedelta(0)
) -> ReleaseOutcome:
    """Release an instance that can continue, due after ``cooldown``; the sweep publishes it after ``grace``."""
    due_at = guard_result.now + cooldown
    return _release_claim(
        tx,
        claim,
        guard_result,
        is_due=True,
        run_at=due_at,
        next_check_at=due_at + grace,
        wake_reason=WakeReason.RESUME,
    )


def _release_claim(
    tx: Tx,
    claim: Claim,
    guard_result: GuardResult,
    *,
    is_due: bool,
    run_at: datetime,
    next_check_at: datetime,
    wake_reason: WakeReason,
) -> ReleaseOutcome:
    pauses = guard_result.pause_requested and not runs.is_cancel_requested(tx, claim.pk, claim.ref.run_number)
    after = decide_release(is_due=is_due, pause_requested=pauses)
    done = tx.run(
        _release,
        pk=claim.pk,
        token=claim.token,
        status=after.status.value,
        run_us=to_us(run_at),
        next_check_us=None if after is ReleaseOutcome.PAUSED else to_us(next_check_at),
        sent_us=to_us(run_at) if after is ReleaseOutcome.DUE else None,
        wake_reason=wake_reason.value,
    )
    if done.rowcount == 0:
        raise Superseded(str(claim.ref))
    return after


@statement
def _find_event_in_time(s: Store) -> Any:
    e = s.tables.event.c
    is_in_time = (e.delivered_at.is_(None), e.created_at <= param("due_us", sa.BigInteger))
    is_it = (e.instance_pk == param("pk", sa.BigInteger), e.run_number == param("run", sa.Integer))
    return sa.select(e.seq).where(*is_it, e.type == param("type", sa.String), *is_in_time).limit(1)


def _has_event_for(tx: Tx, claim: Claim, waits: Sequence[OpenWait]) -> bool:
    key = {"pk": claim.pk, "run": claim.ref.run_number}
    return any(
        tx.run(_find_event_in_time, **key, type=wait.event_type, due_us=to_us(wait.due_at))
        for wait in waits
        if wait.event_type is not None
    )


@statement
def _end(s: Store) -> Any:
    i = s.tables.instance
    return (
        sa.update(i)
        .where(
            i.c.id == param("pk", type_=sa.BigInteger),
            i.c.claim_token == param("token", type_=sa.String),
            i.c.next_run.is_(None),
        )
        .values(
            **RELEASED,
            status=param("status"),
            run_at=None,
            next_check_at=None,
            sent_at=None,
            pause_requested=sa.false(),
            version=i.c.version + 1,
            updated_at=s.clock(),
            retention_until=s.clock() + i.c.retention_us,
        )
    )


@statement
def _end_with_run(s: Store) -> Any:
    i, r = s.tables.instance.c, s.tables.run.c
    guard = _end.build(s).returning(i.id, i.run_number).cte("guard")
    return _update_ended_run(s).where(r.instance_pk == guard.c.id, r.run_number == guard.c.run_number)


HOT_STATEMENTS = (_end_with_run,)


@statement
def _end_run(s: Store) -> Any:
    r = s.tables.run.c
    return _update_ended_run(s).where(r.instance_pk == param("pk"), r.run_number == param("run"))


def _update_ended_run(s: Store) -> Any:
    r = s.tables.run
    return sa.update(r).values(
        output=param("output"),
        error_name=param("error_name"),
        error_message=param("error_message"),
        failed_steps=param("failed_steps"),
        started_at=sa.func.coalesce(r.c.started_at, param("started_us", type_=sa.BigInteger)),
        completed_at=s.clock(),
    )


def end_run(tx: Tx, claim: Claim, run_outcome: RunOutcome) -> bool:
    """End the run and release the instance, which is never due again.

    Returns False, and ends nothing, if the claim is lost or if another run shall follow (`next_runs.take`).
    """
    outcome = {
        "output": run_outcome.output,
        "error_name": run_outcome.error_name,
        "error_message": run_outcome.error_message,
        "failed_steps": run_outcome.failed_steps,
        "started_us": to_us(claim.claimed_at),
    }
    key = {"pk": claim.pk, "token": claim.token, "status": run_outcome.status.value}
    ended = tx.run_combined(_end_with_run, **key, **outcome)
    if ended is None:
        ended = tx.run(_end, **key)
        if ended.rowcount:
            tx.run(_end_run, pk=claim.pk, run=claim.ref.run_number, **outcome)
    return ended.rowcount > 0


@statement
def _mark_started(s: Store) -> Any:
    r = s.tables.run
    return (
        sa.update(r)
        .where(r.c.instance_pk == param("pk"), r.c.run_number == param("run"), r.c.started_at.is_(None))
        .values(started_at=param("started_us"))
    )


def mark_started(tx: Tx, claim: Claim) -> None:
    """Record the time of this claim as the start of the run, unless an earlier claim did."""
    tx.run(_mark_started, pk=claim.pk, run=claim.ref.run_number, started_us=to_us(claim.claimed_at))
