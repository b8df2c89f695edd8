"""Finding work: sweep due instances, release the claims of dead workers, resend lost dispatch messages.

Any number of sweeps may run at once. A sweep locks rows with SKIP LOCKED and postpones them before it publishes them.
A sweep that dies in between has only delayed the next one. It searches queue by queue, each by one range of the
index. A queue that accepts no messages is not searched, so the instances that wait for it cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import DueRun, RunRef, Status, Wake, duration_us, from_us, to_us
from celery_durable.redispatch import NOTHING_KNOWN, PATIENCE, QueueProgress, Redispatch
from celery_durable.store import schedule
from celery_durable.store.claims import RELEASED, still_due
from celery_durable.store.engine import Store, Tx, param, statement

_LONGEST_CRASH_DELAY = timedelta(minutes=1)


def crash_delay(crash_count: int) -> timedelta:
    """Return the delay after the ``crash_count``-th crash in a row: 0, 1, 2, 4 .. 60 s."""
    if crash_count <= 1:
        return timedelta(0)
    return min(timedelta(seconds=2 ** min(crash_count - 2, 6)), _LONGEST_CRASH_DELAY)


def release_dead(tx: Tx, ref: RunRef, *, task_id: str, grace: timedelta) -> DueRun | None:
    """Release the claim of a Celery task whose process is known to be dead. This counts as a crash.

    Returns the run if the caller is to publish it. The sweep checks it only after ``grace``.
    """
    i = tx.t.instance
    row = tx.execute(
        _swept_columns(i)
        .add_columns(i.c.claimed_by)
        .where(i.c.workflow == ref.workflow, i.c.instance_id == ref.instance_id, i.c.run_number == ref.run_number)
        .with_for_update(key_share=True)
    ).first()
    if row is None or row.claim_token is None or row.claimed_by.partition(" ")[0] != task_id:
        return None
    now = from_us(tx.execute(sa.select(tx.store.clock())).scalar_one())
    return _release(tx, row, now, dispatches=0, again=grace, is_sent=True)


def _by_index(select: sa.Select[Any], i: sa.Table, name: str) -> sa.Select[Any]:
    """Make MariaDB use this index.

    By another index it would also lock rows that it reads only for sorting, and concurrent sweeps would find none.
    """
    (index,) = (each.name for each in i.indexes if str(each.name).endswith(name))
    for dialect in ("mysql", "mariadb"):
        select = select.with_hint(i, f"FORCE INDEX ({index})", dialect)
    return select


def _swept_columns(i: sa.Table) -> sa.Select[Any]:
    c = i.c
    return sa.select(
        c.id, c.workflow, c.instance_id, c.run_number, c.queue, c.claim_token, c.lease_until, c.crash_count,
        c.pause_requested, c.dispatches, c.run_at, c.sent_at,
    )  # fmt: skip


@statement
def _due(s: Store) -> Any:
    i = s.tables.instance
    return (
        _by_index(_swept_columns(i), i, "instance_due")
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.priority == param("priority"),
            i.c.queue == param("queue", sa.String),
            i.c.poll_at <= s.statement_clock(),
        )
        .order_by(i.c.poll_at)
        .limit(param("limit", type_=sa.Integer))
        .with_for_update(skip_locked=True, key_share=True)
    )


@statement
def _move(s: Store) -> Any:
    i = s.tables.instance
    values = {"poll_at": param("poll_us"), "dispatches": param("sent"), "sent_at": param("sent_us", sa.BigInteger)}
    return sa.update(i).where(i.c.id == param("pk")).values(values)


def _move_of(row: Any, *, poll_us: int, sent: int, sent_us: int | None = None) -> dict[str, Any]:
    return {"pk": row.id, "poll_us": poll_us, "sent": sent, "sent_us": sent_us}


def _sent_again(row: Any, redispatch: Redispatch) -> dict[str, Any]:
    """Postpone a row whose dispatch message the caller sends now.

    No sweep checks it before the longest time, unless the progress of its queue shows that the message is lost.
    """
    last = row.now_us + duration_us(redispatch.longest)
    return _move_of(row, poll_us=last, sent=row.dispatches + 1, sent_us=row.now_us)


def _release(tx: Tx, row: Any, now: datetime, *, dispatches: int, again: timedelta, is_sent: bool) -> DueRun | None:
    """Release the claim of a dead worker. Returns the run to publish if it is due at once.

    The sweep then checks it after ``again``.
    """
    i = tx.t.instance
    delay = crash_delay(row.crash_count + 1)
    is_due = not row.pause_requested and not delay
    changes = {
        **RELEASED,
        "crash_count": row.crash_count + 1,
        "status": (Status.PAUSED if row.pause_requested else Status.ACTIVE).value,
        "run_at": to_us(now + delay),
        "poll_at": None if row.pause_requested else to_us(now + (again if is_due else delay)),
        "sent_at": to_us(now) if is_due and is_sent else None,
        "pause_requested": False,
        "dispatches": dispatches if is_due else 0,
        "wake": Wake.RETRY.value,
        "version": i.c.version + 1,
        "updated_at": to_us(now),
    }
    tx.execute(sa.update(i).where(i.c.id == row.id).values(changes))
    return _due_of(row) if is_due else None


def _due_of(row: Any) -> DueRun:
    return DueRun(RunRef(row.workflow, row.instance_id, row.run_number), row.queue)


_LOOKS = 3
"""Checks of an expired claim, a third of a lease apart: together one lease. ``dispatches`` counts them."""


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
) -> tuple[list[DueRun], int]:
    """Process up to ``limit`` rows of one queue and priority whose ``poll_at`` has passed.

    An expired claim is released as a crash. A live claim is checked again when its lease ends. A due run is counted,
    postponed and returned for publishing after the commit. It is left alone if its message is under way and, by the
    ``progress`` of its queue, not lost.

    ``may_expire=False`` means that the database may have been away, so heartbeats may be missing. An expired claim is
    then released only after repeated checks over the time of one lease.

    Any number of sweeps may run at once. Returns the runs to publish, and the number of rows read.
    """
    rows = tx.run(_due, queue=queue, priority=priority, limit=limit).all()
    return _look_after(tx, rows, redispatch, may_expire=may_expire, lease=lease, progress=progress), len(rows)


def sweep_claims(
    tx: Tx, *, queue: str, priority: int, limit: int, redispatch: Redispatch, lease: timedelta
) -> list[DueRun]:
    """Process only claims whose ``poll_at`` has passed, for a caller that advances the released runs itself.

    The caller has no history, so it cannot tell whether the database was away.
    """
    others = _due.build(tx.store).where(tx.t.instance.c.claim_token.is_not(None))
    rows = tx.execute(others, queue=queue, priority=priority, limit=limit).all()
    return _look_after(tx, rows, redispatch, may_expire=False, lease=lease, progress=None)


def _look_after(
    tx: Tx,
    rows: Sequence[Any],
    redispatch: Redispatch,
    *,
    may_expire: bool,
    lease: timedelta,
    progress: QueueProgress | None,
) -> list[DueRun]:
    """Process swept rows. ``progress`` is None if the caller advances due runs itself and sends no messages."""
    publish: list[DueRun] = []
    moves: list[dict[str, Any]] = []
    again, is_sent = (redispatch.after(1), False) if progress is None else (redispatch.longest, True)
    for row in rows:
        now = from_us(row.now_us)
        if row.claim_token is not None:
            ends = from_us(row.lease_until)
            if ends > now:
                moves.append(_move_of(row, poll_us=row.lease_until, sent=0, sent_us=row.sent_at))
            elif not may_expire and row.dispatches < _LOOKS:
                at = to_us(now + lease / _LOOKS)
                moves.append(_move_of(row, poll_us=at, sent=row.dispatches + 1, sent_us=row.sent_at))
            elif due := _release(tx, row, now, dispatches=1, again=again, is_sent=is_sent):
                publish.append(due)
        elif row.run_at > row.now_us:  # not due yet, although poll_at has passed: check it when it is due
            moves.append(_move_of(row, poll_us=row.run_at, sent=row.dispatches))
        elif progress is not None and (again_us := _waits_until(row, redispatch, progress)) is not None:
            moves.append(_move_of(row, poll_us=again_us, sent=row.dispatches, sent_us=row.sent_at))
        else:
            moves.append(_sent_again(row, redispatch))
            publish.append(_due_of(row))
    tx.run_many(_move, moves)
    return publish


def _waits_until(row: Any, redispatch: Redispatch, progress: QueueProgress) -> int | None:
    """Return when to check a row again whose dispatch message is not known to be lost. None means to send it now."""
    if row.sent_at is None:
        return None
    sent_at, now = from_us(row.sent_at), from_us(row.now_us)
    if redispatch.is_lost(sent_at, row.dispatches, progress, now):
        return None
    again = redispatch.look_again(sent_at, row.dispatches, progress)
    soon: int = row.now_us + 1
    return max(to_us(again), soon)  # never at once: the caller may not know more by then


# --- lost dispatch messages ----------------------------------------------------------------------


@statement
def _lost(s: Store) -> Any:
    i, now = s.tables.instance, s.statement_clock()
    doublings = sa.case((i.c.dispatches > 11, 10), (i.c.dispatches > 1, i.c.dispatches - 1), else_=0)
    # Cast, because psycopg2 writes a bare number, which PostgreSQL shifts in 32 bits. That overflows from ten
    # dispatches on.
    patience = sa.cast(duration_us(PATIENCE), sa.BigInteger).op("<<")(doublings)
    is_old = sa.or_(i.c.sent_at <= now - patience, i.c.sent_at <= now - param("longest_us", sa.BigInteger))
    return (
        _by_index(_swept_columns(i), i, "instance_sent")
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.queue == param("queue", sa.String),
            i.c.sent_at.is_not(None),
            i.c.sent_at < param("before_us", sa.BigInteger),
            i.c.claim_token.is_(None),
            i.c.poll_at.is_not(None),
            i.c.run_at <= now,
            sa.or_(
                i.c.sent_at < param("claimed_us", sa.BigInteger),
                sa.and_(i.c.sent_at < param("empty_us", sa.BigInteger), is_old),
                i.c.sent_at <= now - param("longest_us", sa.BigInteger),
            ),
        )
        .order_by(i.c.sent_at)
        .limit(param("limit", sa.Integer))
        .with_for_update(skip_locked=True, key_share=True)
    )


def take_lost(
    tx: Tx, *, queue: str, limit: int, redispatch: Redispatch, progress: QueueProgress, now: datetime
) -> list[DueRun]:
    """Find lost dispatch messages of one queue, oldest first, and postpone their rows.

    The caller publishes the runs after the commit. ``now`` is the database's time, read earlier. The rule is
    `Redispatch.is_lost`, written here as an index search.
    """
    rows = tx.run(
        _lost,
        queue=queue,
        before_us=to_us(redispatch.lost_before(progress, now)),
        claimed_us=0 if progress.claimed is None else to_us(progress.claimed),
        empty_us=0 if progress.empty is None else to_us(progress.empty),
        longest_us=duration_us(redispatch.longest),
        limit=limit,
    ).all()
    tx.run_many(_move, [_sent_again(row, redispatch) for row in rows])
    return [_due_of(row) for row in rows]


# --- work for a tick ----------------------------------------------------------------------------


@statement
def _free(s: Store) -> Any:
    i = s.tables.instance
    return (
        _by_index(_swept_columns(i), i, "instance_due")
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.priority == param("priority"),
            i.c.queue == param("queue", sa.String),
            i.c.poll_at <= s.statement_clock() + param("early_us", sa.BigInteger),
            i.c.run_at <= s.statement_clock(),
            i.c.claim_token.is_(None),
        )
        .order_by(i.c.poll_at)
        .limit(1)
        .with_for_update(skip_locked=True, key_share=True)
    )


def take(
    tx: Tx, *, priority: int, early: timedelta, redispatch: Redispatch, without: Sequence[int] = ()
) -> tuple[int, DueRun] | None:
    """Find one run that is due and unclaimed, and postpone it as if it were published. The caller advances it.

    It also finds runs that were published up to ``early`` ago and that a sweep leaves to their message. Concurrent
    callers get different runs. If a caller dies before it claims the run, the run is only delayed. ``without`` lists
    keys that were returned before.
    """
    free = _free.build(tx.store).where(tx.t.instance.c.id.not_in(without)) if without else None
    for queue in schedule.read(tx).in_order(priority):
        params: dict[str, Any] = {"priority": priority, "queue": queue, "early_us": duration_us(early)}
        row = (tx.run(_free, **params) if free is None else tx.execute(free, **params)).first()
        if row is not None:
            again = row.now_us + duration_us(redispatch.after(row.dispatches + 1))
            tx.run(_move, **_move_of(row, poll_us=again, sent=row.dispatches + 1))
            return row.id, _due_of(row)
    return None


def unsend(tx: Tx, due_runs: Iterable[DueRun], *, delay: timedelta) -> None:
    """Let the sweep offer these runs again after ``delay``: the broker took none of them.

    Without this, they would wait for the redispatch time.
    """
    i = tx.t.instance
    runs = [(due.ref.workflow, due.ref.instance_id, due.ref.run_number) for due in due_runs]
    wanted = sa.and_(sa.tuple_(i.c.workflow, i.c.instance_id, i.c.run_number).in_(runs), *still_due(tx.store))
    # A transaction that holds such a row is about to claim or to postpone it. There is nothing to undo, so it is
    # skipped.
    free = sa.select(i.c.id).where(wanted).order_by(i.c.id).with_for_update(skip_locked=True, key_share=True)
    ids = tx.execute(free).scalars().all()
    if ids:
        less = sa.case((i.c.dispatches > 0, i.c.dispatches - 1), else_=0)
        poll_at = tx.store.clock() + duration_us(delay)
        tx.execute(sa.update(i).where(i.c.id.in_(ids)).values(poll_at=poll_at, dispatches=less, sent_at=None))
