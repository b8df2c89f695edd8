"""Claims on instances: claim, guard, renew, suspend, release, end.

A claim is a random token in the instance's row. Every write of a pass has the token in its WHERE clause. If no row
matches, the worker is superseded (LAW 2). The lease only says when another worker may take over the run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import Superseded
from celery_durable.model import (
    Claim,
    Parent,
    RunningStep,
    RunRef,
    Status,
    WakeReason,
    WorkflowKind,
    duration_us,
    from_us,
    to_us,
)
from celery_durable.store.engine import Store, Tx, param, statement

RELEASED: dict[str, Any] = {"claim_token": None, "claim_task_id": None, "claimed_by": None, "lease_until": None}
MAX_CLAIMANT = 255
"""Characters of a Celery task's id and of a node's name that a claim keeps."""
_RUNNABLE = (Status.ACTIVE.value, Status.WAITING.value)


# --- claim --------------------------------------------------------------------------------------


def _claimable(s: Store) -> list[sa.ColumnElement[bool]]:
    i, now = s.tables.instance.c, s.clock()
    return [
        i.workflow == param("workflow"),
        i.instance_id == param("instance"),
        i.run_number == param("run"),
        i.kind == param("kind"),
        i.status.in_([sa.literal_column(f"'{status}'") for status in _RUNNABLE]),
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


@dataclass(frozen=True, slots=True)
class Renewal:
    """The tokens of the claims that `renew` has renewed, and of all those that still hold.

    If a token is in ``held`` only, another transaction had locked its row.
    """

    renewed: frozenset[str]
    held: frozenset[str]


@statement
def _record_running_step(s: Store) -> Any:
    i = s.tables.instance
    values = {
        "running_step_key": param("step_key", sa.String),
        "running_attempt": param("attempt", sa.Integer),
        "running_since": param("since_us", sa.BigInteger),
    }
    return sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(values)


def renew(
    tx: Tx,
    claims: Sequence[Claim],
    *,
    lease: timedelta,
    running: Mapping[str, RunningStep | None] = MappingProxyType({}),
) -> Renewal:
    """Renew the leases of these claims, and skip rows that another transaction has locked.

    ``running`` has, by token, the step that each claim's worker runs now, for the claims whose step has changed.

    That transaction either renews the lease itself or takes the claim away. Rows are locked in the order of their ids,
    so that two renewals cannot deadlock.
    """
    i = tx.t.instance
    tokens = {claim.token for claim in claims}
    wanted = sa.and_(i.c.id.in_([claim.pk for claim in claims]), i.c.claim_token.in_(tokens))
    unlocked = (
        sa.select(i.c.id, i.c.claim_token)
        .where(wanted)
        .order_by(i.c.id)
        .with_for_update(skip_locked=True, key_share=True)
    )
    locked = tx.execute(unlocked).all()
    if locked:
        until = tx.store.clock() + duration_us(lease)
        renewable = sa.and_(i.c.id.in_([row.id for row in locked]), i.c.claim_token.in_(tokens))
        tx.execute(sa.update(i).where(renewable).values(lease_until=until))
        changed = [(row.id, running[row.claim_token]) for row in locked if row.claim_token in running]
        tx.run_many(_record_running_step, [_running_step_params(pk, step) for pk, step in changed])
    held = tx.execute(sa.select(i.c.claim_token).where(wanted)).scalars()
    return Renewal(frozenset(row.claim_token for row in locked), frozenset(held))


def _running_step_params(pk: int, step: RunningStep | None) -> dict[str, Any]:
    if step is None:
        return {"pk": pk, "step_key": None, "attempt": None, "since_us": None}
    return {"pk": pk, "step_key": step.step_key, "attempt": step.attempt, "since_us": to_us(step.since)}


# --- suspend and release ------------------------------------------------------------------------


class ReleaseOutcome(enum.Enum):
    """The state of an instance after its worker has released it."""

    WAITING = enum.auto()
    DUE = enum.auto()
    PAUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class OpenWait:
    """One wait of a run that suspends. It ends at ``due_at``, or earlier with an event of ``event_type``.

    `suspend` calls ``is_satisfied`` under the lock, with the guard's time. It returns whether the wait has ended for
    another reason, for example because all tasks of a map step have answered.
    """

    due_at: datetime
    event_type: str | None = None
    is_satisfied: Callable[[Tx, datetime], bool] | None = None


@statement
def _release(s: Store) -> Any:
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
            priority=0,
            dispatch_count=0,
            pause_requested=sa.false(),
            updated_at=s.clock(),
        )
    )


def suspend(
    tx: Tx, claim: Claim, guard_result: GuardResult, waits: Iterable[OpenWait], *, grace: timedelta
) -> ReleaseOutcome:
    """Suspend the instance until the earliest of ``waits``. If one is satisfied already, release it as due now.

    Call it after `guard` in the same transaction. It finds every event that was committed before the guard. The sender
    of a later event locks the row after this transaction, and finds the waiting step (LAW 2b). So no event is missed.
    """
    waits = list(waits)
    next_at = min(wait.due_at for wait in waits)
    is_any_satisfied = _has_event_for(tx, claim, waits) or any(
        wait.is_satisfied(tx, guard_result.now) for wait in waits if wait.is_satisfied
    )
    if next_at > guard_result.now and not is_any_satisfied:
        return _release_claim(
            tx, claim, guard_result, Status.WAITING, run_at=next_at, next_check_at=next_at, wake_reason=WakeReason.TIMER
        )
    return release(tx, claim, guard_result, grace=grace)


def release(
    tx: Tx, claim: Claim, guard_result: GuardResult, *, grace: timedelta, cooldown: timedelta = timedelta(0)
) -> ReleaseOutcome:
    """Release an instance that can continue, due again after ``cooldown``.

    A pass calls it when its time is used up, when the run makes no progress, or when the worker stops. The sweep
    publishes the run after ``grace``, if the caller does not.
    """
    due_at = guard_result.now + cooldown
    return _release_claim(
        tx,
        claim,
        guard_result,
        Status.ACTIVE,
        run_at=due_at,
        next_check_at=due_at + grace,
        wake_reason=WakeReason.RESUME,
    )


def _release_claim(
    tx: Tx,
    claim: Claim,
    guard_result: GuardResult,
    status: Status,
    *,
    run_at: datetime,
    next_check_at: datetime,
    wake_reason: WakeReason,
) -> ReleaseOutcome:
    if guard_result.pause_requested:
        status, after = Status.PAUSED, ReleaseOutcome.PAUSED
    else:
        after = ReleaseOutcome.WAITING if status is Status.WAITING else ReleaseOutcome.DUE
    done = tx.run(
        _release,
        pk=claim.pk,
        token=claim.token,
        status=status.value,
        run_us=to_us(run_at),
        next_check_us=None if after is ReleaseOutcome.PAUSED else to_us(next_check_at),
        sent_us=to_us(run_at) if after is ReleaseOutcome.DUE else None,
        wake_reason=wake_reason.value,
    )
    if done.rowcount == 0:
        raise Superseded(str(claim.ref))
    return after


def _has_event_for(tx: Tx, claim: Claim, waits: list[OpenWait]) -> bool:
    e = tx.t.event.c
    for wait in waits:
        if wait.event_type is not None:
            query = sa.select(e.seq).where(
                e.instance_pk == claim.pk,
                e.run_number == claim.ref.run_number,
                e.type == wait.event_type,
                e.delivered_at.is_(None),
                e.created_at <= to_us(wait.due_at),
            )
            if tx.execute(query.limit(1)).first() is not None:
                return True
    return False


@statement
def _end(s: Store) -> Any:
    """End an instance. If the database can combine writes, the statement also ends the run."""
    i, r = s.tables.instance, s.tables.run
    ended = (
        sa.update(i)
        .where(i.c.id == param("pk", type_=sa.BigInteger), i.c.claim_token == param("token", type_=sa.String))
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
    if not s.database.can_combine_writes:
        return ended
    guard = ended.returning(i.c.id, i.c.run_number).cte("guard")
    return _update_ended_run(s).where(r.c.instance_pk == guard.c.id, r.c.run_number == guard.c.run_number)


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


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: ``output`` as JSON text, or an error."""

    status: Status
    output: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    failed_steps: str | None = None
    """The steps that caused the failure, as JSON text (`ancestry.RunFailure.text`)."""


def end_run(tx: Tx, claim: Claim, run_outcome: RunOutcome) -> None:
    """End the run and release the instance, which is never due again; raises Superseded."""
    outcome = {
        "output": run_outcome.output,
        "error_name": run_outcome.error_name,
        "error_message": run_outcome.error_message,
        "failed_steps": run_outcome.failed_steps,
        "started_us": to_us(claim.claimed_at),
    }
    key = {"pk": claim.pk, "token": claim.token, "status": run_outcome.status.value}
    if tx.store.database.can_combine_writes:
        ended = tx.run(_end, **key, **outcome).rowcount
    else:
        ended = tx.run(_end, **key).rowcount
        if ended:
            tx.run(_end_run, pk=claim.pk, run=claim.ref.run_number, **outcome)
    if ended == 0:
        raise Superseded(str(claim.ref))


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


@statement
def _lock_token(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(i.claim_token).where(i.id == param("pk")).with_for_update(key_share=True)


def is_held(tx: Tx, claim: Claim) -> bool:
    """Return whether this claim still holds.

    It locks the row. So if a commit of this worker is in doubt, it waits until the database has decided it.
    """
    return bool(tx.run(_lock_token, pk=claim.pk).scalar() == claim.token)
