"""Claims on instances: claim a run, guard each write, and check whether the claim still holds (LAW 2)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import Superseded
from celery_durable.model import (
    RUNNABLE,
    Claim,
    NewRun,
    Parent,
    RunRef,
    Status,
    WorkflowKind,
    duration_us,
    from_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import Rows, constant, param, statement
from celery_durable.store.runs import attempts

RELEASED: dict[str, Any] = {"claim_token": None, "claim_task_id": None, "claimed_by": None, "lease_until": None}
STARTING, RESUMING = 1, 0
"""The priorities of runs. A sweep publishes resumed runs first, then new runs."""
FIRST_VERSION = 1
"""The version of an instance that nothing has changed since its creation."""
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
        i.status.in_([constant(status) for status in RUNNABLE]),
        i.pause_requested == sa.false(),
        sa.or_(
            sa.and_(i.claim_token.is_(None), i.run_at <= now),
            sa.and_(i.claim_token.is_not(None), i.lease_until <= now),
        ),
    ]


def claimed_columns(s: Store) -> list[sa.ColumnElement[Any]]:
    """Return the columns of a `Claim`."""
    i = s.tables.instance.c
    parent = [i.parent_pk, i.parent_run_number, i.parent_step_key]
    return [i.id, i.queue, i.crash_count, i.created_at, i.lease_until, i.run_at, i.sent_at, i.max_run_us, *parent]


def new_run_columns(s: Store) -> list[sa.ColumnElement[Any]]:
    """Return the parameters and the creation time of an instance's first run before its first pass; NULL otherwise.

    They never change, so a claim may read them although it may have waited for a lock (LAW 2b). The locked row shows
    that no pass has started: this claim is the first change of its version.
    """
    i, r = s.tables.instance.c, s.tables.run
    is_new = sa.and_(
        i.version == sa.literal_column(str(FIRST_VERSION + 1)),
        i.kind == constant(WorkflowKind.REPLAY),
    )
    # Not the instance's run_number: SQLAlchemy names columns without their table in RETURNING on SQLite.
    continues_none = [r.c.instance_pk == i.id, r.c.run_number == param("run", sa.Integer), r.c.ancestry.is_(None)]
    return [
        sa.case(
            (is_new, sa.select(column).where(*continues_none).correlate(s.tables.instance).scalar_subquery())
        ).label(name)
        for name, column in (("new_params", r.c.params), ("new_created_at", r.c.created_at))
    ]


def new_values(s: Store) -> dict[sa.Column[Any], Any]:
    """Return what a claim writes. The claim's token is the last column, because others may depend on the old token."""
    i, until = s.tables.instance.c, s.clock() + param("lease_us", type_=sa.BigInteger)
    return {
        i.claim_task_id: param("task_id", sa.String),
        i.claimed_by: param("node", sa.String),
        i.lease_until: until,
        i.running_step_key: sa.null(),
        i.running_attempt: sa.null(),
        i.running_since: sa.null(),
        i.next_check_at: until,
        i.status: constant(Status.ACTIVE),
        i.dispatch_count: sa.literal_column("0"),
        i.version: i.version + 1,
        i.updated_at: s.clock(),
        i.claim_token: param("token", sa.String),
    }


@statement
def claim_run(s: Store) -> Any:
    """Claim an unclaimed run. An expired claim is found too, and only locked: `take_over` continues with it."""
    i = s.tables.instance
    is_unclaimed = i.c.claim_token.is_(None)
    # In MariaDB later assignments see the new values of earlier ones, so the order of `new_values` matters.
    values = [(column, sa.case((is_unclaimed, value), else_=column)) for column, value in new_values(s).items()]
    claimed = sa.update(i).where(*_claimable(s)).ordered_values(*values)
    if not s.database.update_returns:
        return claimed
    return claimed.returning(i.c.claim_token, *claimed_columns(s), *new_run_columns(s))


@statement
def _read_claimed(s: Store) -> Any:
    """Read what this transaction has just claimed, without a lock.

    InnoDB also locks the index entry by which a statement finds a row: every other transaction first that of the unique
    index, then the row. The update may have found the row by another index, so a lock here could deadlock with them.
    """
    i = s.tables.instance.c
    columns = [i.claim_token, *claimed_columns(s), *new_run_columns(s)]
    return sa.select(*columns).where(i.workflow == param("workflow"), i.instance_id == param("instance"))


@statement
def _lock_claimed(s: Store) -> Any:
    i = s.tables.instance.c
    # Not by the token: while another transaction writes the token, a search for it matches no row and does not wait.
    return (
        sa.select(i.claim_token, *claimed_columns(s))
        .where(i.workflow == param("workflow"), i.instance_id == param("instance"))
        .with_for_update(key_share=True)
    )


@dataclass(frozen=True, slots=True)
class ClaimExpired:
    """The run is due, but another worker's claim on it has expired (see `take_over`)."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What a worker claims with its Celery task. A run whose stored ``kind`` differs from its code's is not claimed."""

    ref: RunRef
    token: str
    task_id: str
    node: str
    lease: timedelta
    kind: WorkflowKind = WorkflowKind.REPLAY

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "workflow": self.ref.workflow,
            "instance": self.ref.instance_id,
            "run": self.ref.run_number,
            "kind": self.kind.value,
            "token": self.token,
            "task_id": self.task_id[:MAX_CLAIMANT],
            "node": self.node[:MAX_CLAIMANT],
            "lease_us": duration_us(self.lease),
        }


def claim(tx: Tx, request: ClaimRequest) -> Claim | ClaimExpired | None:
    """Claim the run if it is due and unclaimed. If its last claim has expired, change nothing and return ClaimExpired.

    One statement. If it waits for a lock, the database evaluates the conditions again on the committed row.
    """
    found = find_claimed(tx, request, tx.run(claim_run, **request.parameters))
    if found is None:
        return None
    if found.claim_token != request.token:
        return ClaimExpired()
    return make_claim(found, request.ref, request.token, request.lease)


def find_claimed(tx: Tx, request: ClaimRequest, updated: Rows) -> Any:
    """Return the row that an UPDATE has found, with its columns after it; None if it found none."""
    if tx.store.database.update_returns:
        return updated.first()
    if updated.rowcount == 0:
        return None
    ref = request.ref
    return tx.run(_read_claimed, workflow=ref.workflow, instance=ref.instance_id, run=ref.run_number).one()


def find_claim(tx: Tx, ref: RunRef, *, token: str, lease: timedelta) -> Claim | None:
    """Return the claim with this token, or None; if the claim's commit is in doubt, this waits for the row's lock."""
    row = tx.run(_lock_claimed, workflow=ref.workflow, instance=ref.instance_id).first()
    return None if row is None or row.claim_token != token else make_claim(row, ref, token, lease)


def make_claim(row: Any, ref: RunRef, token: str, lease: timedelta) -> Claim:
    """Build the claim from a row with the `claimed_columns`, and perhaps the `new_run_columns`."""
    new_params = getattr(row, "new_params", None)
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
        max_run=None if row.max_run_us is None else timedelta(microseconds=row.max_run_us),
        parent=None
        if row.parent_pk is None
        else Parent.read(row.parent_pk, row.parent_run_number, row.parent_step_key),
        new_run=None if new_params is None else NewRun(new_params, from_us(row.new_created_at)),
    )


def due_conditions(s: Store) -> list[sa.ColumnElement[bool]]:
    """Return conditions for a run that is due, unclaimed and not paused.

    A caller that postpones a run needs them: the ``next_check_at`` of a claimed or suspended run is the end of its
    lease or of a wait.
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
    """Build the UPDATE of a guard. It changes no indexed column, so PostgreSQL can make a heap-only (HOT) update."""
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
    """Lock the instance under this claim and renew the lease; raises Superseded. Read what decides after it (LAW 2b).

    ``resets_crash_count``: the transaction advances the run, which shows that its crashes are over.
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
def _lock_held(s: Store) -> Any:
    return lock_held(s, s.tables.instance.c.pause_requested, s.clock().label("now_us"))


def lock_held(s: Store, *columns: Any) -> Any:
    """Build the SELECT of a guard that writes nothing: it locks the row and checks the token."""
    i = s.tables.instance.c
    held = [i.id == param("pk", sa.BigInteger), i.claim_token == param("token", sa.String)]
    return sa.select(*columns).where(*held).with_for_update(key_share=True)


def guard_without_change(tx: Tx, claim: Claim) -> GuardResult:
    """Lock the instance under this claim and change nothing in its row; raises Superseded.

    For a commit that only adds a finished step, while the lease needs no renewal and no crash has been counted. The
    number of steps is a part of the version tag.
    """
    row = tx.run(_lock_held, pk=claim.pk, token=claim.token).first()
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
    """Lock the instance for a write that is not a step: no renewal, the crash count stays; raises Superseded."""
    if tx.run(_guard_without_renewal, pk=claim.pk, token=claim.token).rowcount == 0:
        raise Superseded(str(claim.ref))


@statement
def _lock_token(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(i.claim_token).where(i.id == param("pk")).with_for_update(key_share=True)


def is_held(tx: Tx, claim: Claim) -> bool:
    """Return whether this claim still holds; if a commit of this worker is in doubt, this waits for the row's lock."""
    return bool(tx.run(_lock_token, pk=claim.pk).scalar() == claim.token)


# Takeovers: claim a run whose last claim has expired, and record the crash of its worker.


@statement
def _take_over(s: Store) -> Any:
    i = s.tables.instance
    counted = (i.c.crash_count, i.c.crash_count + 1)
    taken = sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).ordered_values(counted, *new_values(s).items())
    if not s.database.update_returns:
        return taken
    return taken.returning(i.c.claim_token, *claimed_columns(s), *new_run_columns(s))


@statement
def _read_crashed(s: Store) -> Any:
    """Read the claim that a takeover overwrites. `claim_run` has locked the row."""
    i = s.tables.instance
    columns = [i.c.id, s.clock().label("now_us"), *attempts.crash_columns(i)]
    return sa.select(*columns).where(i.c.workflow == param("workflow"), i.c.instance_id == param("instance"))


def take_over(tx: Tx, request: ClaimRequest) -> Claim | None:
    """Claim the run, also if its last claim has expired, which counts as a crash and is recorded; None if not due."""
    found = find_claimed(tx, request, tx.run(claim_run, **request.parameters))
    if found is None:
        return None
    if found.claim_token != request.token:
        key = {"workflow": request.ref.workflow, "instance": request.ref.instance_id}
        crashed = tx.run(_read_crashed, **key).one()
        now = from_us(crashed.now_us)
        attempts.record_crash(tx, crashed, pk=crashed.id, run_number=request.ref.run_number, now=now)
        found = find_claimed(tx, request, tx.run(_take_over, pk=crashed.id, **request.parameters))
    return make_claim(found, request.ref, request.token, request.lease)
