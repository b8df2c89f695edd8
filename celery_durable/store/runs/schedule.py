"""When the dispatcher has work next: for each queue, for emissions, and for the outbox."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import duration_us, from_us, to_us
from celery_durable.redispatch import SLACK
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.schema import dialects


@dataclass(frozen=True, slots=True)
class QueueAgenda:
    """The work of one queue. ``due`` maps a priority to the earliest ``next_check_at`` of its rows."""

    due: Mapping[int, datetime]
    oldest_sent_at: datetime | None = None
    """When the oldest unclaimed dispatch message was sent. On MariaDB, messages of claimed runs count too."""

    @property
    def next_at(self) -> datetime | None:
        """The time at which the next sweep of this queue has work. None means never."""
        return min(self.due.values(), default=None)


@dataclass(frozen=True, slots=True)
class Agenda:
    """When the dispatcher has work next. ``now`` is the database's time. A time of None means never."""

    now: datetime
    queues: Mapping[str, QueueAgenda]
    next_emission_at: datetime | None
    next_outbox_at: datetime | None

    @property
    def next_at(self) -> datetime | None:
        """The earliest time of all. None means never."""
        times = [self.next_emission_at, self.next_outbox_at, *(each.next_at for each in self.queues.values())]
        return min((at for at in times if at is not None), default=None)

    def seconds_until(self, at: datetime | None) -> float:
        """Return the seconds from ``now`` to a time of this agenda; infinite for never."""
        return math.inf if at is None else (at - self.now).total_seconds()

    def queues_with_work(self) -> set[str]:
        """Return the queues that have due rows or unclaimed dispatch messages."""
        return {
            name
            for name, each in self.queues.items()
            if each.oldest_sent_at is not None or (each.next_at is not None and each.next_at <= self.now)
        }

    def queues_by_due_time(self, priority: int) -> list[str]:
        """Return the queues that have rows of this priority, the earliest due first."""
        found = [(each.due[priority], name) for name, each in self.queues.items() if priority in each.due]
        return [name for _, name in sorted(found)]


def read(tx: Tx) -> Agenda:
    """Read the agenda, by a few index searches per queue, however many rows wait.

    It is slow while a transaction keeps an old snapshot, and with it the index entries of rows that were moved since.
    """
    return _build_agenda(tx.run(_agenda))


def _build_agenda(rows: Sequence[Any]) -> Agenda:
    due: dict[str, dict[int, datetime]] = {}
    sent: dict[str, datetime] = {}
    times: dict[int, datetime] = {}
    for row in rows:
        if row.at is None:
            continue
        at = from_us(row.at)
        if row.kind in _PRIORITIES:
            due.setdefault(row.name, {})[row.kind] = at
        elif row.kind == _OLDEST_SENT:
            sent[row.name] = at
        else:
            times[row.kind] = at
    queues = {name: QueueAgenda(due.get(name, {}), sent.get(name)) for name in sorted({*due, *sent})}
    return Agenda(times[_NOW], queues, times.get(_NEXT_EMISSION), times.get(_NEXT_OUTBOX))


# The kinds of rows that `_agenda` returns. A kind that is a priority (`claims.RESUMING`, `claims.STARTING`) marks
# the earliest ``next_check_at`` of a queue.
_PRIORITIES = (0, 1)
_OLDEST_SENT, _NEXT_EMISSION, _NEXT_OUTBOX, _NOW = 2, 3, 4, 5


@statement
def _agenda(s: Store) -> Any:
    i, e, o = s.tables.instance, s.tables.emission.c, s.tables.outbox.c

    def as_named_rows(kind: int, found: Any) -> sa.Select[Any]:
        each = found.subquery()
        return sa.select(sa.literal_column(str(kind)).label("kind"), each.c.name, each.c.at)

    def as_unnamed_row(kind: int, at: Any) -> sa.Select[Any]:
        return sa.select(
            sa.literal_column(str(kind)).label("kind"), sa.cast(sa.null(), sa.String(255)).label("name"), at.label("at")
        )

    def next_check_by_queue(priority: int) -> Any:
        return dialects.select_smallest_per_group(
            s.database,
            i,
            "queue",
            "next_check_at",
            prefix={"priority": priority},
            where=lambda _: (),
            cte=f"queues_{priority}",
        )

    oldest_sent_by_queue = dialects.select_smallest_per_group(
        s.database, i, "queue", "sent_at", prefix={}, where=lambda c: (c.claim_token.is_(None),), cte="queues_sent"
    )
    next_emission_at = sa.select(e.next_check_at).order_by(e.next_check_at).limit(1).scalar_subquery()
    unsent = sa.select(o.next_check_at).where(o.next_check_at.is_not(None))
    message = unsent.order_by(o.next_check_at).limit(1).scalar_subquery()
    return sa.union_all(
        *(as_named_rows(priority, next_check_by_queue(priority)) for priority in _PRIORITIES),
        as_named_rows(_OLDEST_SENT, oldest_sent_by_queue),
        as_unnamed_row(_NEXT_EMISSION, next_emission_at),
        as_unnamed_row(_NEXT_OUTBOX, message),
        as_unnamed_row(_NOW, s.clock()),
    )


def conditions_due_within(tx: Tx, *, within: timedelta) -> tuple[sa.ColumnElement[bool], ...]:
    """Return conditions for rows whose ``next_check_at`` has passed or lies ``within`` this time from now.

    They name the queues: otherwise the database would read the whole index, including all suspended instances.
    """
    i = tx.t.instance.c
    at = tx.store.statement_clock() + duration_us(within)
    return (i.priority.in_(_PRIORITIES), i.queue.in_(sorted(read(tx).queues)), i.next_check_at <= at)


# The progress of each queue: when its newest claimed dispatch message was sent. All dispatchers share it.
#
# A dispatch message is claimed when a worker claims its run. Each worker writes at most every few seconds. Of many
# concurrent writes only one changes the row. From the progress `redispatch` concludes which messages are lost: those
# that are unclaimed although a message that was sent later is claimed.
#
# The row keeps the newest value and the one before it (``previous_claimed_sent_at``), so a reader always finds one that
# is `SLACK` old. A message that was sent earlier and claimed within the slack is not lost: a worker had only prefetched
# it.


@statement
def _insert_queue(s: Store) -> Any:
    values = {
        "name": param("name", sa.String),
        "claimed_sent_at": param("sent_us", sa.BigInteger),
        "recorded_at": s.clock(),
    }
    return dialects.insert_or_nothing(s.database, s.tables.queue, values, ("name",))


@statement
def _advance_queue(s: Store) -> Any:
    q = s.tables.queue
    now, sent = s.clock(), param("sent_us", sa.BigInteger)
    has_slack_passed = sa.and_(q.c.recorded_at <= now - duration_us(SLACK), q.c.claimed_sent_at < sent)
    # After a fail-over the database's clock may be behind. Its time counts from then on.
    return (
        sa.update(q)
        .where(q.c.name == param("name"), sa.or_(has_slack_passed, q.c.recorded_at > now))
        .ordered_values(
            # First, since MariaDB lets later assignments see earlier ones.
            (q.c.previous_claimed_sent_at, sa.case((q.c.recorded_at > now, sa.null()), else_=q.c.claimed_sent_at)),
            (q.c.claimed_sent_at, sent),
            (q.c.recorded_at, now),
        )
    )


def insert_queue(tx: Tx, name: str, *, sent_at: datetime) -> None:
    """Insert a queue of which nothing is known yet."""
    tx.run(_insert_queue, name=name, sent_us=to_us(sent_at))


def record_claimed(tx: Tx, name: str, *, sent_at: datetime) -> None:
    """Record that a message sent at this time was claimed. Does nothing if the row is younger than `SLACK`."""
    tx.run(_advance_queue, name=name, sent_us=to_us(sent_at))


@statement
def _read_queues(s: Store) -> Any:
    q = s.tables.queue.c
    return sa.select(q.name, q.claimed_sent_at, q.previous_claimed_sent_at, q.recorded_at, s.clock().label("now_us"))


def read_claimed(tx: Tx) -> Mapping[str, datetime]:
    """Return by queue the newest time of sending among messages that were claimed at least `SLACK` ago."""
    found = {}
    for row in tx.run(_read_queues):
        if row.recorded_at > row.now_us:  # the clock was set back
            continue
        newest = (
            row.claimed_sent_at if row.recorded_at <= row.now_us - duration_us(SLACK) else row.previous_claimed_sent_at
        )
        if newest is not None:
            found[row.name] = from_us(newest)
    return found
