"""Finding work: sweep what is due, take it from dead workers, look when there is something next.

Any number of sweeps at once: rows are locked with SKIP LOCKED and moved on before they are published. A sweep
that dies in between has only delayed the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Due, Ref, Status, Wake, from_us, span_us, to_us
from celery_durable.store.claims import RELEASED, still_due
from celery_durable.store.engine import Store, Tx, param, statement

_LONGEST_CRASH_DELAY = timedelta(minutes=1)


def crash_delay(crash_count: int) -> timedelta:
    """How long an instance rests after the ``crash_count``-th dead worker in a row: 0, 1, 2, 4 .. 60 s."""
    if crash_count <= 1:
        return timedelta(0)
    return min(timedelta(seconds=2 ** min(crash_count - 2, 6)), _LONGEST_CRASH_DELAY)


def release_dead(tx: Tx, ref: Ref, *, task_id: str, grace: timedelta) -> Due | None:
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
    return _release(tx, row, now, dispatches=0, again=grace)


@dataclass(frozen=True, slots=True)
class Redispatch:
    """How soon a sweep publishes again what nobody claimed: ``first``, doubling up to ``longest``."""

    first: timedelta
    longest: timedelta

    def after(self, dispatches: int) -> timedelta:
        """How long to wait after the ``dispatches``-th publishing."""
        return min(self.first * (1 << min(max(dispatches - 1, 0), 30)), self.longest)


def _swept_columns(i: sa.Table) -> sa.Select[Any]:
    c = i.c
    return sa.select(
        c.id, c.workflow, c.instance_id, c.run_number, c.queue, c.claim_token, c.lease_until, c.crash_count,
        c.pause_requested, c.dispatches, c.run_at,
    )  # fmt: skip


@statement
def _due(s: Store) -> Any:
    i = s.tables.instance
    return (
        _swept_columns(i)
        .add_columns(s.statement_clock().label("now_us"))
        .where(i.c.priority == param("priority"), i.c.poll_at <= s.statement_clock())
        .order_by(i.c.poll_at)
        .limit(param("limit", type_=sa.Integer))
        .with_for_update(skip_locked=True, key_share=True)
    )


@statement
def _move(s: Store) -> Any:
    i = s.tables.instance
    return sa.update(i).where(i.c.id == param("pk")).values(poll_at=param("poll_us"), dispatches=param("sent"))


def _release(tx: Tx, row: Any, now: datetime, *, dispatches: int, again: timedelta) -> Due | None:
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
        "pause_requested": False,
        "dispatches": dispatches if is_due else 0,
        "wake": Wake.RETRY.value,
        "version": i.c.version + 1,
        "updated_at": to_us(now),
    }
    tx.execute(sa.update(i).where(i.c.id == row.id).values(changes))
    return _due_of(row) if is_due else None


def _due_of(row: Any) -> Due:
    return Due(Ref(row.workflow, row.instance_id, row.run_number), row.queue)


_LOOKS = 3
"""At an expired claim, each a third of a lease after the one before: one lease's time, counted in the row."""


def sweep(
    tx: Tx,
    *,
    priority: int,
    limit: int,
    redispatch: Redispatch,
    may_expire: bool,
    lease: timedelta,
    without: Sequence[str] = (),
    only_claimed: bool = False,
) -> tuple[list[Due], int]:
    """Look after up to ``limit`` rows of one priority whose poll time has come; any number of sweeps at once.

    Expired claim: released as a crash. Live claim: looked at again when it ends. Due: counted, moved
    on and answered for publishing after the commit; a sweep that dies before it publishes has only
    delayed the next. ``may_expire`` False (the database may have been away, and with it all heartbeats): an expired
    claim is released only when it was looked at in vain for a lease's time. ``without``: queues whose rows are left
    as they are. ``only_claimed``: look after claims and nothing else. Answers with what to publish, and how many rows
    were looked at.
    """
    rows = _rows(tx, priority, limit, without, only_claimed=only_claimed)
    publish: list[Due] = []
    moves: list[dict[str, Any]] = []
    for row in rows:
        now = from_us(row.now_us)
        if row.claim_token is not None:
            ends = from_us(row.lease_until)
            if ends > now:
                moves.append({"pk": row.id, "poll_us": row.lease_until, "sent": 0})
            elif not may_expire and row.dispatches < _LOOKS:
                moves.append({"pk": row.id, "poll_us": to_us(now + lease / _LOOKS), "sent": row.dispatches + 1})
            elif due := _release(tx, row, now, dispatches=1, again=redispatch.after(1)):
                publish.append(due)
        elif row.run_at > row.now_us:  # too early, whoever set poll_at: nothing to publish, wake up in time
            moves.append({"pk": row.id, "poll_us": row.run_at, "sent": row.dispatches})
        else:
            again = now + redispatch.after(row.dispatches + 1)
            moves.append({"pk": row.id, "poll_us": to_us(again), "sent": row.dispatches + 1})
            publish.append(_due_of(row))
    tx.run_many(_move, moves)
    return publish, len(rows)


def _rows(tx: Tx, priority: int, limit: int, without: Sequence[str], *, only_claimed: bool) -> Sequence[Any]:
    if not without and not only_claimed:
        return tx.run(_due, priority=priority, limit=limit).all()
    i = tx.t.instance.c
    others = _due.build(tx.store)
    if without:
        others = others.where(i.queue.not_in(without))
    if only_claimed:
        others = others.where(i.claim_token.is_not(None))
    return tx.execute(others, priority=priority, limit=limit).all()


@statement
def _free(s: Store) -> Any:
    i = s.tables.instance
    return (
        _swept_columns(i)
        .add_columns(s.statement_clock().label("now_us"))
        .where(
            i.c.priority == param("priority"),
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
) -> tuple[int, Due] | None:
    """Find one run that is due and free, and move it on as if it were published: the caller advances it himself.

    Also what was published up to ``early`` ago and is left to its message by a sweep. Whoever takes at the same time
    takes another; who dies before the claim has only delayed it. ``without``: keys that were answered before.
    """
    free = _free.build(tx.store).where(tx.t.instance.c.id.not_in(without)) if without else None
    params: dict[str, Any] = {"priority": priority, "early_us": span_us(early)}
    row = (tx.run(_free, **params) if free is None else tx.execute(free, **params)).first()
    if row is None:
        return None
    again = from_us(row.now_us) + redispatch.after(row.dispatches + 1)
    tx.run(_move, pk=row.id, poll_us=to_us(again), sent=row.dispatches + 1)
    return row.id, _due_of(row)


def next_poll(tx: Tx) -> tuple[datetime | None, datetime]:
    """When the next sweep has something to do (None: never), and the database's time."""
    row = tx.run(_next_poll).one()
    times = [us for us in (row.resuming, row.starting, row.emitting, row.outgoing) if us is not None]
    return (from_us(min(times)) if times else None), from_us(row.now_us)


@statement
def _next_poll(s: Store) -> Any:
    i, e, o = s.tables.instance, s.tables.emission.c, s.tables.outbox.c

    def first(priority: int) -> sa.ScalarSelect[Any]:
        # ORDER BY and LIMIT, not min(): that reads one index entry also on MariaDB.
        where = (i.c.priority == sa.literal_column(str(priority)), i.c.poll_at.is_not(None))
        return sa.select(i.c.poll_at).where(*where).order_by(i.c.poll_at).limit(1).scalar_subquery()

    emitting = sa.select(e.poll_at).order_by(e.poll_at).limit(1).scalar_subquery()
    letter = sa.select(o.poll_at).where(o.poll_at.is_not(None)).order_by(o.poll_at).limit(1).scalar_subquery()
    return sa.select(
        first(0).label("resuming"),
        first(1).label("starting"),
        emitting.label("emitting"),
        letter.label("outgoing"),
        s.clock().label("now_us"),
    )


def unsend(tx: Tx, dues: Iterable[Due], *, delay: timedelta) -> None:
    """The broker took none of these: let the sweep offer them again after ``delay``, not after the redispatch time."""
    i = tx.t.instance
    runs = [(due.ref.workflow, due.ref.instance_id, due.ref.run_number) for due in dues]
    wanted = sa.and_(sa.tuple_(i.c.workflow, i.c.instance_id, i.c.run_number).in_(runs), *still_due(tx.store))
    # Who has locked one is about to claim or to move it: there is nothing to take back, and nobody to wait for.
    free = sa.select(i.c.id).where(wanted).order_by(i.c.id).with_for_update(skip_locked=True, key_share=True)
    ids = tx.execute(free).scalars().all()
    if ids:
        less = sa.case((i.c.dispatches > 0, i.c.dispatches - 1), else_=0)
        poll_at = tx.store.clock() + span_us(delay)
        tx.execute(sa.update(i).where(i.c.id.in_(ids)).values(poll_at=poll_at, dispatches=less))
