"""Finding work: sweep what is due, take it from dead workers, send lost hints again.

Any number of sweeps at once: rows are locked with SKIP LOCKED and moved on before they are published. A sweep
that dies in between has only delayed the next. Work is found queue by queue, each by one range of the index: a queue
that takes nothing is not asked for, and what waits there costs nothing.
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
    """How long an instance rests after the ``crash_count``-th dead worker in a row: 0, 1, 2, 4 .. 60 s."""
    if crash_count <= 1:
        return timedelta(0)
    return min(timedelta(seconds=2 ** min(crash_count - 2, 6)), _LONGEST_CRASH_DELAY)


def release_dead(tx: Tx, ref: RunRef, *, task_id: str, grace: timedelta) -> DueRun | None:
    """Release the claim of a Celery task whose process is known to be dead; counts as a crash.

    Answers with what the caller publishes; the sweep looks only after ``grace``.
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
    """Have MariaDB use this index of ours: by another it would lock what it only sorts, and rivals find nothing."""
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
    """The caller sends a hint: nobody looks again before it is lost, unless more becomes known of its queue."""
    last = row.now_us + duration_us(redispatch.longest)
    return _move_of(row, poll_us=last, sent=row.dispatches + 1, sent_us=row.now_us)


def _release(tx: Tx, row: Any, now: datetime, *, dispatches: int, again: timedelta, is_sent: bool) -> DueRun | None:
    """Take the claim from a dead worker. Due at once it is answered, for publishing, and looked at ``again`` later."""
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
"""At an expired claim, each a third of a lease after the one before: one lease's time, counted in the row."""


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
    """Look after up to ``limit`` rows of one queue and priority whose poll time has come; any number of sweeps at once.

    Expired claim: released as a crash. Live claim: looked at again when it ends. Due: counted, moved
    on and returned for publishing after the commit, unless its hint is under way and, by the ``progress`` of its
    queue, not lost; a sweep that dies before it publishes has only delayed the next. ``may_expire`` False (the
    database may have been away, and with it all heartbeats): an expired claim is released only when it was looked at
    in vain for a lease's time. Returns what to publish, and how many rows were looked at.
    """
    rows = tx.run(_due, queue=queue, priority=priority, limit=limit).all()
    return _look_after(tx, rows, redispatch, may_expire=may_expire, lease=lease, progress=progress), len(rows)


def sweep_claims(
    tx: Tx, *, queue: str, priority: int, limit: int, redispatch: Redispatch, lease: timedelta
) -> list[DueRun]:
    """Look after claims whose poll time has come and nothing else, for a caller that advances what it releases.

    It knows nothing of the time before it, and so not whether the database was away.
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
    """``progress`` None: the caller advances what is due, and sends no hint."""
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
        elif row.run_at > row.now_us:  # too early, whoever set poll_at: nothing to publish, wake up in time
            moves.append(_move_of(row, poll_us=row.run_at, sent=row.dispatches))
        elif progress is not None and (again_us := _waits_until(row, redispatch, progress)) is not None:
            moves.append(_move_of(row, poll_us=again_us, sent=row.dispatches, sent_us=row.sent_at))
        else:
            moves.append(_sent_again(row, redispatch))
            publish.append(_due_of(row))
    tx.run_many(_move, moves)
    return publish


def _waits_until(row: Any, redispatch: Redispatch, progress: QueueProgress) -> int | None:
    """When to look again at a row whose hint is not lost, as far as is known; None: it is to be sent."""
    if row.sent_at is None:
        return None
    sent_at, now = from_us(row.sent_at), from_us(row.now_us)
    if redispatch.is_lost(sent_at, row.dispatches, progress, now):
        return None
    again = redispatch.look_again(sent_at, row.dispatches, progress)
    soon: int = row.now_us + 1
    return max(to_us(again), soon)  # never at once: the caller may know no more then


# --- lost hints ---------------------------------------------------------------------------------


@statement
def _lost(s: Store) -> Any:
    i, now = s.tables.instance, s.statement_clock()
    doublings = sa.case((i.c.dispatches > 11, 10), (i.c.dispatches > 1, i.c.dispatches - 1), else_=0)
    # A cast, since psycopg2 writes a bare number, which PostgreSQL shifts in 32 bits: too little from ten copies on.
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
    """Find hints of one queue that are lost, oldest first, and move them on; the caller publishes after the commit.

    ``now``: the database's time, read before. The rule is `Redispatch.is_lost`, here as a search of the index.
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
    """Find one run that is due and free, and move it on as if it were published: the caller advances it himself.

    Also what was published up to ``early`` ago and is left to its message by a sweep. Whoever takes at the same time
    takes another; who dies before the claim has only delayed it. ``without``: keys that were answered before.
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
    """The broker took none of these: let the sweep offer them again after ``delay``, not after the redispatch time."""
    i = tx.t.instance
    runs = [(due.ref.workflow, due.ref.instance_id, due.ref.run_number) for due in due_runs]
    wanted = sa.and_(sa.tuple_(i.c.workflow, i.c.instance_id, i.c.run_number).in_(runs), *still_due(tx.store))
    # Who has locked one is about to claim or to move it: there is nothing to take back, and nobody to wait for.
    free = sa.select(i.c.id).where(wanted).order_by(i.c.id).with_for_update(skip_locked=True, key_share=True)
    ids = tx.execute(free).scalars().all()
    if ids:
        less = sa.case((i.c.dispatches > 0, i.c.dispatches - 1), else_=0)
        poll_at = tx.store.clock() + duration_us(delay)
        tx.execute(sa.update(i).where(i.c.id.in_(ids)).values(poll_at=poll_at, dispatches=less, sent_at=None))
