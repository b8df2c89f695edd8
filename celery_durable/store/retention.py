"""Deletion of ended instances: those whose retention is over, and those that an operator prunes.

A batch is one transaction. It locks the instances' rows first (LAW 2). A concurrent restart either comes before, and
keeps its instance, or does not find it. An instance that has not ended is never deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import TERMINAL, Scope, Status, duration_us
from celery_durable.store import scopes
from celery_durable.store.engine import Tx


@dataclass(frozen=True, slots=True)
class EndedFilter:
    """Instances that ended at least ``age`` ago in one of ``statuses``. ``workflow`` None means any."""

    age: timedelta
    workflow: str | None = None
    statuses: Collection[Status] = TERMINAL
    scope: Scope | None = None

    def conditions(self, tx: Tx) -> list[sa.ColumnElement[bool]]:
        i = tx.t.instance.c
        conditions = [
            i.status.in_(sorted(status.value for status in self.statuses)),
            i.updated_at <= tx.store.statement_clock() - duration_us(self.age),
            *scopes.conditions(tx.t, self.scope),
        ]
        return conditions if self.workflow is None else [i.workflow == self.workflow, *conditions]


def delete_expired(tx: Tx, *, limit: int) -> int:
    """Delete up to ``limit`` instances whose retention is over, oldest first. Returns how many."""
    i = tx.t.instance.c
    over = [i.retention_until <= tx.store.statement_clock(), i.status.in_(sorted(status.value for status in TERMINAL))]
    return _delete(tx, over, i.retention_until, limit)


def delete_ended(tx: Tx, ended: EndedFilter, *, limit: int) -> int:
    """Delete up to ``limit`` of these instances, oldest first, whatever their retention. Returns how many."""
    return _delete(tx, ended.conditions(tx), tx.t.instance.c.id, limit)


def count_ended(tx: Tx, ended: EndedFilter) -> int:
    """Count these instances."""
    return int(tx.execute(sa.select(sa.func.count()).where(*ended.conditions(tx))).scalar_one())


def _delete(tx: Tx, conditions: list[sa.ColumnElement[bool]], order: Any, limit: int) -> int:
    i = tx.t.instance
    # Found first and locked afterwards: a search that locks the rows it reads would block all live instances.
    found = tx.execute(sa.select(i.c.id).where(*conditions).order_by(order).limit(limit)).scalars().all()
    # A transaction that holds such a row is about to change it, so the row is skipped this time.
    locked = sa.select(i.c.id).where(i.c.id.in_(found), *conditions).order_by(i.c.id).with_for_update(skip_locked=True)
    ids = tx.execute(locked).scalars().all() if found else []
    if ids:
        for table in tx.t.metadata.sorted_tables:
            if "instance_pk" in table.c:
                # Messages of the instance that are not delivered yet outlive it.
                is_deletable = [table.c.next_check_at.is_(None)] if table is tx.t.outbox else []
                tx.execute(sa.delete(table).where(table.c.instance_pk.in_(ids), *is_deletable))
        tx.execute(sa.delete(i).where(i.c.id.in_(ids)))
    return len(ids)
