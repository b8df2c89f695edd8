"""The times of the next work: by queue, for emissions and for the outbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import duration_us, from_us
from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx, statement


@dataclass(frozen=True, slots=True)
class QueueAgenda:
    """The work of one queue. ``due`` is, by priority, the earliest ``poll_at`` of its rows."""

    due: Mapping[int, datetime]
    oldest_sent: datetime | None = None
    """When the oldest unclaimed dispatch message was sent. MariaDB includes messages of runs that are claimed now."""

    @property
    def first(self) -> datetime | None:
        """When a sweep of this queue has work next."""
        return min(self.due.values(), default=None)


@dataclass(frozen=True, slots=True)
class Agenda:
    """When the next sweep has work: by queue, for emissions, and for the outbox. None means never."""

    now: datetime
    queues: Mapping[str, QueueAgenda]
    emitting: datetime | None
    outgoing: datetime | None

    @property
    def first(self) -> datetime | None:
        """The earliest of all times."""
        times = [self.emitting, self.outgoing, *(each.first for each in self.queues.values())]
        return min((at for at in times if at is not None), default=None)

    def in_order(self, priority: int) -> list[str]:
        """Return the queues with rows of this priority, the most overdue first."""
        found = [(each.due[priority], name) for name, each in self.queues.items() if priority in each.due]
        return [name for _, name in sorted(found)]


def read(tx: Tx) -> Agenda:
    """Return the agenda, by a few index searches per queue, however many rows wait."""
    rows = tx.run(_agenda).all()
    due: dict[str, dict[int, datetime]] = {}
    sent: dict[str, datetime] = {}
    others: dict[int, datetime] = {}
    for row in rows:
        if row.at is None:
            continue
        at = from_us(row.at)
        if row.what in (0, 1):
            due.setdefault(row.name, {})[row.what] = at
        elif row.what == _SENT:
            sent[row.name] = at
        else:
            others[row.what] = at
    queues = {name: QueueAgenda(due.get(name, {}), sent.get(name)) for name in sorted({*due, *sent})}
    return Agenda(others[_NOW], queues, others.get(_EMITTING), others.get(_OUTGOING))


_SENT, _EMITTING, _OUTGOING, _NOW = 2, 3, 4, 5


@statement
def _agenda(s: Store) -> Any:
    i, e, o = s.tables.instance, s.tables.emission.c, s.tables.outbox.c

    def named(what: int, found: Any) -> sa.Select[Any]:
        each = found.subquery()
        return sa.select(sa.literal_column(str(what)).label("what"), each.c.name, each.c.at)

    def first(what: int, at: Any) -> sa.Select[Any]:
        return sa.select(
            sa.literal_column(str(what)).label("what"), sa.cast(sa.null(), sa.String(255)).label("name"), at.label("at")
        )

    def of(priority: int) -> Any:
        return dialects.select_smallest_per_group(
            s.database,
            i,
            "queue",
            "poll_at",
            prefix={"priority": priority},
            where=lambda _: (),
            cte=f"queues_{priority}",
        )

    under_way = dialects.select_smallest_per_group(
        s.database, i, "queue", "sent_at", prefix={}, where=lambda c: (c.claim_token.is_(None),), cte="queues_sent"
    )
    emitting = sa.select(e.poll_at).order_by(e.poll_at).limit(1).scalar_subquery()
    message = sa.select(o.poll_at).where(o.poll_at.is_not(None)).order_by(o.poll_at).limit(1).scalar_subquery()
    return sa.union_all(
        named(0, of(0)),
        named(1, of(1)),
        named(_SENT, under_way),
        first(_EMITTING, emitting),
        first(_OUTGOING, message),
        first(_NOW, s.clock()),
    )


def near(tx: Tx, *, within: timedelta) -> tuple[sa.ColumnElement[bool], ...]:
    """Return conditions for rows whose ``poll_at`` has passed or comes ``within`` this time, as ranges of the index.

    The index starts with priority and queue. Without the names of the queues it would be read from end to end, with
    all suspended instances.
    """
    i = tx.t.instance.c
    at = tx.store.statement_clock() + duration_us(within)
    return (i.priority.in_((0, 1)), i.queue.in_(sorted(read(tx).queues)), i.poll_at <= at)


def next_poll(tx: Tx) -> tuple[datetime | None, datetime]:
    """Return when the next sweep has work (None: never), and the database's time."""
    found = read(tx)
    return found.first, found.now
