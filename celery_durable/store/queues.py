"""The progress of each queue: when its newest claimed dispatch message was sent. All dispatchers share it.

A dispatch message is claimed when a worker claims its run. Each worker writes at most every few seconds. Of many
concurrent writes only one changes the row. From the progress `redispatch` concludes which messages are lost: those that
are unclaimed although a message that was sent later is claimed.

The row keeps the newest value and the one before it (``previous_claimed_sent_at``), so a reader always finds one that
is `SLACK` old. A message that was sent earlier and claimed within the slack is not lost: a worker had only prefetched
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_durable.model import duration_us, from_us, to_us
from celery_durable.redispatch import SLACK
from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@statement
def _insert(s: Store) -> Any:
    values = {
        "name": param("name", sa.String),
        "claimed_sent_at": param("sent_us", sa.BigInteger),
        "recorded_at": s.clock(),
    }
    return dialects.insert_or_nothing(s.database, s.tables.queue, values, ("name",))


@statement
def _advance(s: Store) -> Any:
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


def insert(tx: Tx, name: str, *, sent_at: datetime) -> None:
    """Insert a queue of which nothing is known yet."""
    tx.run(_insert, name=name, sent_us=to_us(sent_at))


def record_claimed(tx: Tx, name: str, *, sent_at: datetime) -> None:
    """Record that a message sent at this time was claimed. Does nothing if the row is younger than `SLACK`."""
    tx.run(_advance, name=name, sent_us=to_us(sent_at))


@statement
def _read(s: Store) -> Any:
    q = s.tables.queue.c
    return sa.select(q.name, q.claimed_sent_at, q.previous_claimed_sent_at, q.recorded_at, s.clock().label("now_us"))


def read_claimed(tx: Tx) -> Mapping[str, datetime]:
    """Return by queue the newest time of sending among messages that were claimed at least `SLACK` ago."""
    found = {}
    for row in tx.run(_read):
        if row.recorded_at > row.now_us:  # the clock was set back
            continue
        newest = (
            row.claimed_sent_at if row.recorded_at <= row.now_us - duration_us(SLACK) else row.previous_claimed_sent_at
        )
        if newest is not None:
            found[row.name] = from_us(newest)
    return found
