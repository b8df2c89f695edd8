"""Finding work: sweep due instances, release the claims of dead workers, resend lost dispatch messages.

The dispatcher calls these functions. A tick calls those for ticks: a short-lived process that advances due runs itself
(`runner.ticks`). Any number of sweeps may run at once: each locks rows with SKIP LOCKED, postpones them, commits, and
only then publishes them. If it dies in between, the runs are only delayed. A sweep searches one queue by one range of
an index. Queues that accept no messages are skipped, so the instances that wait for them cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import DueRun, RunRef, Status, WakeReason, crash_delay, duration_us, from_us, to_us
from celery_durable.redispatch import MIN_LOST_AGE, NOTHING_KNOWN, QueueProgress, Redispatch
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import attempts, runs, schedule
from celery_durable.store.runs.claims import MAX_CLAIMANT, RELEASED, due_conditions
from celery_durable.store.schema import dialects


def release_dead_claim(tx: Tx, ref: RunRef, *, task_id: str, grace: timedelta, died: str = "") -> DueRun | None:
    """Release the claim of a Celery task whose process is known to be dead (``died``: how). This counts as a crash.

    Returns the run if it is due now: the caller publishes it, and the sweep checks it after ``grace``. Returns None if
    the task holds no claim on the run, or if the run is not due yet.
    """
    i = tx.t.instance
    row = tx.execute(
        _swept_columns(i)
        .where(i.c.workflow == ref.workflow, i.c.instance_id == ref.instance_id, i.c.run_number == ref.run_number)
        .with_for_update(key_share=True)
    ).first()
    if row is None or row.claim_token is None or row.claim_task_id != task_id[:MAX_CLAIMANT]:
        return None
    now = from_us(tx.execute(sa.select(tx.store.clock())).scalar_one())
    return _release_crashed(tx, row, now, dispatch_count=0, recheck_after=grace, is_published=True, died=died)


def _swept_columns(i: sa.Table) -> sa.Select[Any]:
    c = i.c
    return sa.select(
        c.id, c.workflow, c.instance_id, c.run_number, c.queue, c.claim_token, c.lease_until, c.crash_count,
        c.pause_requested, c.dispatch_count, c.run_at, c.sent_at, *attempts.crash_columns(i),
    )  # fmt: skip


@statement
def _select_due(s: Store) -> Any:
    # With another index, MariaDB locks all rows that it sorts. Concurrent sweeps would skip those and find nothing.
    i = s.tables.instance
    return (
        dialects.force_index(_swept_columns(i), i, "instance_due")
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.priority == param("priority"),
            i.c.queue == param("queue", sa.String),
            i.c.next_check_at <= s.statement_clock(),
            i.c.next_check_at >= param("since_us", sa.BigInteger),
        )
        .order_by(i.c.next_check_at)
        .limit(param("limit", type_=sa.Integer))
        .with_for_update(skip_locked=True, key_share=True)
    )


@statement
def _reschedule(s: Store) -> Any:
    columns = {
        "pk": sa.BigInteger(),
        "next_check_us": sa.BigInteger(),
        "dispatch_count": sa.Integer(),
        "sent_us": sa.BigInteger(),
    }
    new = dialects.build_rows(s.database, param("rows", sa.Text), columns, name="new")
    values = {"next_check_at": new.c.next_check_us, "dispatch_count": new.c.dispatch_count, "sent_at": new.c.sent_us}
    return dialects.update_rows(s.database, s.tables.instance, new, values)


def _reschedule_rows(tx: Tx, changes: Sequence[dict[str, Any]]) -> None:
    """Apply the changes of `_rescheduled` to locked rows, in one statement."""
    if changes:
        tx.run(_reschedule, rows=dialects.encode_rows(changes))


def _rescheduled(row: Any, *, next_check_us: int, dispatch_count: int, sent_us: int | None = None) -> dict[str, Any]:
    return {"pk": row.id, "next_check_us": next_check_us, "dispatch_count": dispatch_count, "sent_us": sent_us}


def _resent(row: Any, redispatch: Redispatch) -> dict[str, Any]:
    """Return the change that postpones a row whose dispatch message the caller sends now."""
    last = row.now_us + duration_us(redispatch.longest)
    return _rescheduled(row, next_check_us=last, dispatch_count=row.dispatch_count + 1, sent_us=row.now_us)


def _release_crashed(
    tx: Tx,
    row: Any,
    now: datetime,
    *,
    dispatch_count: int,
    recheck_after: timedelta,
    is_published: bool,
    died: str | None = None,
) -> DueRun | None:
    """Release the claim of a dead worker, and count and record the crash. Returns the run if it is due at once."""
    i = tx.t.instance
    delay = crash_delay(row.crash_count + 1)
    pauses = row.pause_requested and not runs.is_cancel_requested(tx, row.id, row.run_number)
    is_due = not pauses and not delay
    changes = {
        **RELEASED,
        "crash_count": row.crash_count + 1,
        "status": (Status.PAUSED if pauses else Status.ACTIVE).value,
        "run_at": to_us(now + delay),
        "next_check_at": None if pauses else to_us(now + (recheck_after if is_due else delay)),
        "sent_at": to_us(now) if is_due and is_published else None,
        "pause_requested": False,
        "dispatch_count": dispatch_count if is_due else 0,
        "wake_reason": WakeReason.RETRY.value,
        "version": i.c.version + 1,
        "updated_at": to_us(now),
    }
    tx.execute(sa.update(i).where(i.c.id == row.id).values(changes))
    attempts.record_crash(tx, row, pk=row.id, run_number=row.run_number, now=now, died=died)
    return _due_run(row) if is_due else None


def _due_run(row: Any) -> DueRun:
    return DueRun(RunRef(row.workflow, row.instance_id, row.run_number), row.queue)


_EXPIRY_CHECKS = 3
"""With ``may_expire=False``: how often an expired claim is checked, a third of a lease apart, before it is released.

The column ``dispatch_count`` counts the checks, because it has no other use while a run is claimed.
"""


def sweep(
    tx: Tx,
    *,
    queue: str,
    priority: int,
    limit: int,
    redispatch: Redispatch,
    may_expire: bool,
    lease: timedelta,
    progress: QueueProgress = NOTHING_KNOWN,
    since: datetime | None = None,
) -> tuple[list[DueRun], int]:
    """Process up to ``limit`` rows of one queue and priority whose ``next_check_at`` has passed.

    An expired claim is released as a crash. A claim whose lease still holds is checked again when the lease ends. A due
    run is postponed and returned, and the caller publishes it after the commit. There is one exception: if its dispatch
    message was sent and is not lost, by the ``progress`` of its queue, the run is postponed but not returned.

    ``may_expire=False`` means that the database may have been down, so workers could not renew their leases. An
    expired claim is then released only if it is still expired after the time of one lease.

    ``since`` is the earliest time to look at, if the caller has just read it: the index may have many dead entries
    before it (`schedule.read`).

    Returns the runs to publish, and the number of rows read.
    """
    since_us = 0 if since is None else to_us(since)
    rows = tx.run(_select_due, queue=queue, priority=priority, limit=limit, since_us=since_us)
    return _process_rows(tx, rows, redispatch, may_expire=may_expire, lease=lease, progress=progress), len(rows)


def sweep_expired_claims(
    tx: Tx, *, queue: str, priority: int, limit: int, redispatch: Redispatch, lease: timedelta
) -> list[DueRun]:
    """Release expired claims only, for a tick, which then advances the released runs itself.

    A tick is a new process. It cannot know whether the database was down, so it uses ``may_expire=False``.
    """
    claimed = _select_due.build(tx.store).where(tx.t.instance.c.claim_token.is_not(None))
    rows = tx.execute(claimed, queue=queue, priority=priority, limit=limit, since_us=0).all()
    return _process_rows(tx, rows, redispatch, may_expire=False, lease=lease, progress=None)


def _process_rows(
    tx: Tx,
    rows: Sequence[Any],
    redispatch: Redispatch,
    *,
    may_expire: bool,
    lease: timedelta,
    progress: QueueProgress | None,
) -> list[DueRun]:
    """Release, postpone or resend each row. Returns the runs to publish.

    ``progress`` is None for a tick, which advances the returned runs itself and sends no messages.
    """
    publish: list[DueRun] = []
    reschedules: list[dict[str, Any]] = []
    recheck_after, is_published = (redispatch.after(1), False) if progress is None else (redispatch.longest, True)
    for row in rows:
        now = from_us(row.now_us)
        if row.claim_token is not None:
            ends = from_us(row.lease_until)
            if ends > now:
                reschedules.append(
                    _rescheduled(row, next_check_us=row.lease_until, dispatch_count=0, sent_us=row.sent_at)
                )
            elif not may_expire and row.dispatch_count < _EXPIRY_CHECKS:
                at = to_us(now + lease / _EXPIRY_CHECKS)
                reschedules.append(
                    _rescheduled(row, next_check_us=at, dispatch_count=row.dispatch_count + 1, sent_us=row.sent_at)
                )
            elif due := _release_crashed(
                tx, row, now, dispatch_count=1, recheck_after=recheck_after, is_published=is_published
            ):
                publish.append(due)
        elif row.run_at > row.now_us:  # the run is not due yet: check it when it is
            reschedules.append(_rescheduled(row, next_check_us=row.run_at, dispatch_count=row.dispatch_count))
        elif progress is not None and (recheck_us := _recheck_time(row, redispatch, progress)) is not None:
            reschedules.append(
                _rescheduled(row, next_check_us=recheck_us, dispatch_count=row.dispatch_count, sent_us=row.sent_at)
            )
        else:
            reschedules.append(_resent(row, redispatch))
            publish.append(_due_run(row))
    _reschedule_rows(tx, reschedules)
    return publish


def _recheck_time(row: Any, redispatch: Redispatch, progress: QueueProgress) -> int | None:
    """Return when to check a row again. None means to send its dispatch message now: none was sent, or it is lost."""
    if row.sent_at is None:
        return None
    recheck_at = redispatch.recheck_at(from_us(row.sent_at), row.dispatch_count, progress, from_us(row.now_us))
    return None if recheck_at is None else to_us(recheck_at)


# --- lost dispatch messages ----------------------------------------------------------------------


@statement
def _select_lost(s: Store) -> Any:
    """Select the runs whose dispatch message is lost by the rule of `Redispatch.is_lost`.

    ``before_us`` follows from the three conditions, and narrows the search in the index.
    """
    i, now = s.tables.instance, s.statement_clock()
    doublings = sa.case((i.c.dispatch_count > 11, 10), (i.c.dispatch_count > 1, i.c.dispatch_count - 1), else_=0)
    # The cast is for psycopg2, which writes the number into the SQL. PostgreSQL would shift it in 32 bits and overflow
    # from ten dispatches on.
    min_age = sa.cast(duration_us(MIN_LOST_AGE), sa.BigInteger).op("<<")(doublings)
    is_old = sa.or_(i.c.sent_at <= now - min_age, i.c.sent_at <= now - param("longest_us", sa.BigInteger))
    return (
        dialects.force_index(_swept_columns(i), i, "instance_sent")
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.queue == param("queue", sa.String),
            i.c.sent_at.is_not(None),
            i.c.sent_at < param("before_us", sa.BigInteger),
            i.c.claim_token.is_(None),
            i.c.next_check_at.is_not(None),
            i.c.run_at <= now,
            sa.or_(
                i.c.sent_at < param("lost_before_us", sa.BigInteger),
                sa.and_(i.c.sent_at < param("empty_us", sa.BigInteger), is_old),
                i.c.sent_at <= now - param("longest_us", sa.BigInteger),
            ),
        )
        .order_by(i.c.sent_at)
        .limit(param("limit", sa.Integer))
        .with_for_update(skip_locked=True, key_share=True)
    )


def take_lost_runs(
    tx: Tx, *, queue: str, limit: int, redispatch: Redispatch, progress: QueueProgress, now: datetime
) -> list[DueRun]:
    """Find and postpone runs of a queue whose message is lost, oldest first. The caller publishes them later."""
    rows = tx.run(
        _select_lost,
        queue=queue,
        before_us=to_us(redispatch.lost_before(progress, now)),
        lost_before_us=0 if progress.lost_before is None else to_us(progress.lost_before),
        empty_us=0 if progress.empty is None else to_us(progress.empty),
        longest_us=duration_us(redispatch.longest),
        limit=limit,
    )
    _reschedule_rows(tx, [_resent(row, redispatch) for row in rows])
    return [_due_run(row) for row in rows]


# --- work for a tick ----------------------------------------------------------------------------


@statement
def _select_unclaimed(s: Store) -> Any:
    i = s.tables.instance
    return (
        dialects.force_index(_swept_columns(i), i, "instance_due")
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.priority == param("priority"),
            i.c.queue == param("queue", sa.String),
            i.c.next_check_at <= s.statement_clock() + param("published_within_us", sa.BigInteger),
            i.c.run_at <= s.statement_clock(),
            i.c.claim_token.is_(None),
        )
        .order_by(i.c.next_check_at)
        .limit(1)
        .with_for_update(skip_locked=True, key_share=True)
    )


def take_due_run(
    tx: Tx, *, priority: int, published_within: timedelta, redispatch: Redispatch, excluded_pks: Sequence[int] = ()
) -> tuple[int, DueRun] | None:
    """Return one run that is due and unclaimed, with its instance's key. The caller advances the run itself.

    The run is postponed as if it were published, so concurrent callers get different runs. It may have been published
    just now: its ``next_check_at`` lies up to ``published_within`` ahead. ``excluded_pks``: instances to skip.
    """
    query = _select_unclaimed.build(tx.store).where(tx.t.instance.c.id.not_in(excluded_pks)) if excluded_pks else None
    for queue in schedule.read(tx).queues_by_due_time(priority):
        params: dict[str, Any] = {
            "priority": priority,
            "queue": queue,
            "published_within_us": duration_us(published_within),
        }
        row = (tx.run(_select_unclaimed, **params) if query is None else tx.execute(query, **params)).first()
        if row is not None:
            recheck_us = row.now_us + duration_us(redispatch.after(row.dispatch_count + 1))
            _reschedule_rows(tx, [_rescheduled(row, next_check_us=recheck_us, dispatch_count=row.dispatch_count + 1)])
            return row.id, _due_run(row)
    return None


def undo_dispatch(tx: Tx, due_runs: Iterable[DueRun], *, delay: timedelta) -> None:
    """Publish these runs again after ``delay``, if they are still due: the broker refused their messages."""
    i = tx.t.instance
    runs = [(due.ref.workflow, due.ref.instance_id, due.ref.run_number) for due in due_runs]
    wanted = sa.and_(sa.tuple_(i.c.workflow, i.c.instance_id, i.c.run_number).in_(runs), *due_conditions(tx.store))
    # A locked row is being claimed or postponed by another transaction. Nothing is left to undo, so it is skipped.
    unlocked = sa.select(i.c.id).where(wanted).order_by(i.c.id).with_for_update(skip_locked=True, key_share=True)
    ids = tx.execute(unlocked).scalars().all()
    if ids:
        decremented = sa.case((i.c.dispatch_count > 0, i.c.dispatch_count - 1), else_=0)
        next_check_at = tx.store.clock() + duration_us(delay)
        values = {"next_check_at": next_check_at, "dispatch_count": decremented, "sent_at": None}
        tx.execute(sa.update(i).where(i.c.id.in_(ids)).values(values))
