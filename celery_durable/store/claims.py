"""Claims on instances: claim a run, guard each write, and check whether the claim still holds.

A claim is a random token in the instance's row. Every write of a pass has the token in its WHERE clause. If no row
matches, the worker is superseded (LAW 2). The lease only says when another worker may take over the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import Superseded
from celery_durable.model import (
    RUNNABLE,
    Claim,
    Parent,
    RunRef,
    Status,
    WorkflowKind,
    duration_us,
    from_us,
)
from celery_durable.store.engine import Store, Tx, param, statement

RELEASED: dict[str, Any] = {"claim_token": None, "claim_task_id": None, "claimed_by": None, "lease_until": None}
MAX_CLAIMANT = 255
"""Characters of a Celery task's id and of a node's name that a claim keeps."""


# --- claim --------------------------------------------------------------------------------------


def _claimable(s: Store) -> list[sa.ColumnElement[bool]]:
    i, now = s.tables.instance.c, s.clock()
    return [
        i.workflow == param("workflow"),
        i.instance_id == param("instance"),
        i.run_number == param("run"),
        i.kind == param("kind"),
        i.status.in_([sa.literal_column(f"'{status}'") for status in RUNNABLE]),
        i.pause_requested == sa.false(),
        sa.or_(
            sa.and_(i.claim_token.is_(None), i.run_at <= now),
            sa.and_(i.claim_token.is_not(None), i.lease_until <= now),
        ),
    ]


def _claimed_columns(s: Store) -> list[sa.ColumnElement[Any]]:
    i = s.tables.instance.c
    parent = [i.parent_pk, i.parent_run_number, i.parent_step_key]
    return [i.id, i.queue, i.crash_count, i.created_at, i.lease_until, i.run_at, i.sent_at, *parent]


@statement
def _claim_run(s: Store) -> Any:
    i, until = s.tables.instance.c, s.clock() + param("lease_us", type_=sa.BigInteger)
    claimed = (
        sa.update(s.tables.instance)
        .where(*_claimable(s))
        .ordered_values(
            # First, because in MariaDB later assignments see the new values of earlier ones.
            (i.crash_count, i.crash_count + sa.case((i.claim_token.is_(None), 0), else_=1)),
            (i.claim_token, param("token")),
            (i.claim_task_id, param("task_id")),
            (i.claimed_by, param("node")),
            (i.lease_until, until),
            (i.running_step_key, sa.null()),
            (i.running_attempt, sa.null()),
            (i.running_since, sa.null()),
            (i.next_check_at, until),
            (i.status, Status.ACTIVE.value),
            (i.dispatch_count, 0),
            (i.version, i.version + 1),
            (i.updated_at, s.clock()),
        )
    )
    return claimed.returning(*_claimed_columns(s)) if s.database.update_returns else claimed


@statement
def _read_claimed(s: Store) -> Any:
    """Read what this transaction has just claimed, without a lock.

    InnoDB also locks the index entry by which a statement finds a row. Every other transaction locks the entry of the
    unique index first, then the row. The update above may have found the row by another index. If this statement locked
    the unique entry now, after the row, it could deadlock with them.
    """
    i = s.tables.instance.c
    return sa.select(*_claimed_columns(s)).where(i.workflow == param("workflow"), i.instance_id == param("instance"))


@statement
def _lock_claimed(s: Store) -> Any:
    i = s.tables.instance.c
    # Not by the token: while another transaction writes the token, a search for it matches no row and does not wait.
    return (
        sa.select(i.claim_token, *_claimed_columns(s))
        .where(i.workflow == param("workflow"), i.instance_id == param("instance"))
        .with_for_update(key_share=True)
    )


def claim(
    tx: Tx,
    ref: RunRef,
    *,
    token: str,
    task_id: str,
    node: str,
    lease: timedelta,
    kind: WorkflowKind = WorkflowKind.REPLAY,
) -> Claim | None:
    """Claim the run if it is due and unclaimed, or if its last claim has expired. Otherwise return None.

    It also returns None if the workflow's ``kind`` in the caller's code is not the kind of the stored run.

    This is one statement. If another transaction has locked the row, the statement waits. The database then evaluates
    the conditions again on the committed row. Taking over an expired claim counts as a crash.
    """
    found = tx.run(
        _claim_run,
        workflow=ref.workflow,
        instance=ref.instance_id,
        run=ref.run_number,
        kind=kind.value,
        token=token,
        task_id=task_id[:MAX_CLAIMANT],
        node=node[:MAX_CLAIMANT],
        lease_us=duration_us(lease),
    )
    if tx.store.database.update_returns:
        row = found.first()
        return None if row is None else _make_claim(row, ref, token, lease)
    if found.rowcount == 0:
        return None
    return _make_claim(tx.run(_read_claimed, workflow=ref.workflow, instance=ref.instance_id).one(), ref, token, lease)


def find_claim(tx: Tx, ref: RunRef, *, token: str, lease: timedelta) -> Claim | None:
    """Return the claim with this token, or None.

    It locks the row. So if the commit of this claim is in doubt, it waits until the database has decided it.
    """
    row = tx.run(_lock_claimed, workflow=ref.workflow, instance=ref.instance_id).first()
    return None if row is None or row.claim_token != token else _make_claim(row, ref, token, lease)


def _make_claim(row: Any, ref: RunRef, token: str, lease: timedelta) -> Claim:
    return Claim(
        pk=row.id,
        ref=ref,
        token=token,
        queue=row.queue,
        crash_count=row.crash_count,
        created_at=from_us(row.created_at),
        claimed_at=from_us(row.lease_until) - lease,
        run_at=from_us(row.run_at),
        sent_at=None if row.sent_at is None else from_us(row.sent_at),
        parent=None if row.parent_pk is None else Parent(row.parent_pk, row.parent_run_number, row.parent_step_key),
    )


def due_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    """Return conditions for a run that is due, unclaimed and not paused.

    A caller that postpones a run adds them to its WHERE clause. If the run was claimed or suspended meanwhile, its
    ``next_check_at`` means something else (the end of the lease, or of a wait) and must not change.
    """
    i = s.tables.instance.c
    return [i.claim_token.is_(None), i.next_check_at.is_not(None), i.run_at <= s.clock()]


@statement
def _postpone(s: Store) -> Any:
    i = s.tables.instance
    return (
        sa.update(i)
        .where(
            i.c.workflow == param("workflow"),
            i.c.instance_id == param("instance"),
            i.c.run_number == param("run"),
            *due_conditions(s),
        )
        .values(next_check_at=s.clock() + param("delay_us", type_=sa.BigInteger), sent_at=None)
    )


def postpone(tx: Tx, ref: RunRef, *, delay: timedelta) -> None:
    """Make the sweep publish the run after ``delay``, if it is still due. A worker may claim it earlier."""
    tx.run(_postpone, workflow=ref.workflow, instance=ref.instance_id, run=ref.run_number, delay_us=duration_us(delay))


# --- guard --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GuardResult:
    """What a guard read: the database's time when it locked the row, and whether a pause is requested."""

    now: datetime
    pause_requested: bool


def guard_update(s: Store) -> Any:
    """Build the UPDATE of a guard: it locks the row, checks the token, renews the lease and records progress.

    It changes no indexed column, so that PostgreSQL can make a heap-only (HOT) update.
    """
    i = s.tables.instance
    return (
        sa.update(i)
        .where(i.c.id == param("pk", type_=sa.BigInteger), i.c.claim_token == param("token", type_=sa.String))
        .values(
            lease_until=s.clock() + param("lease_us", type_=sa.BigInteger),
            crash_count=sa.case((param("resets_crash_count", type_=sa.Boolean), 0), else_=i.c.crash_count),
            version=i.c.version + 1,
        )
    )


def guard_params(claim: Claim, *, lease: timedelta, resets_crash_count: bool) -> dict[str, Any]:
    """Return the parameters of `guard_update`."""
    return {
        "pk": claim.pk,
        "token": claim.token,
        "lease_us": duration_us(lease),
        "resets_crash_count": resets_crash_count,
    }


@statement
def _guard(s: Store) -> Any:
    guard = guard_update(s)
    if s.database.update_returns:
        return guard.returning(s.tables.instance.c.pause_requested, s.clock().label("now_us"))
    return guard


@statement
def _read_guard(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(i.pause_requested, s.clock().label("now_us")).where(i.id == param("pk"))


def guard(tx: Tx, claim: Claim, *, lease: timedelta, resets_crash_count: bool = True) -> GuardResult:
    """Lock the instance under this claim and renew the lease; raises Superseded.

    Read everything that the transaction depends on after the guard (LAW 2b). ``resets_crash_count``: the transaction
    advances the run, which shows that its crashes are over. Pass False for a write that does not advance it.
    """
    found = tx.run(_guard, **guard_params(claim, lease=lease, resets_crash_count=resets_crash_count))
    if tx.store.database.update_returns:
        row = found.first()
    else:
        row = tx.run(_read_guard, pk=claim.pk).first() if found.rowcount else None
    if row is None:
        raise Superseded(str(claim.ref))
    return GuardResult(now=from_us(row.now_us), pause_requested=bool(row.pause_requested))


@statement
def _guard_without_renewal(s: Store) -> Any:
    i = s.tables.instance
    return (
        sa.update(i)
        .where(i.c.id == param("pk", type_=sa.BigInteger), i.c.claim_token == param("token", type_=sa.String))
        .values(version=i.c.version + 1)
    )


def guard_without_renewal(tx: Tx, claim: Claim) -> None:
    """Lock the instance under this claim, without renewing the lease; raises Superseded.

    Call it before a write that is not a step. It increments the version, so that clients which follow the instance read
    it again. The crash count stays unchanged.
    """
    if tx.run(_guard_without_renewal, pk=claim.pk, token=claim.token).rowcount == 0:
        raise Superseded(str(claim.ref))


@statement
def _lock_token(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(i.claim_token).where(i.id == param("pk")).with_for_update(key_share=True)


def is_held(tx: Tx, claim: Claim) -> bool:
    """Return whether this claim still holds.

    It locks the row. So if a commit of this worker is in doubt, it waits until the database has decided it.
    """
    return bool(tx.run(_lock_token, pk=claim.pk).scalar() == claim.token)
