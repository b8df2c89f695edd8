"""Deletion of ended instances: those whose retention is over, and those that an operator prunes.

A batch is one transaction, which locks the instances first (LAW 2): a concurrent restart comes before, or finds none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import TERMINAL, Count, Scope, Status, duration_us
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.bounds import Range
from celery_durable.store.engine.statements import param, statement


@dataclass(frozen=True, slots=True)
class EndedFilter:
    """Instances whose current run ended at least ``age`` ago, in one of ``statuses``. ``workflow`` None means any."""

    age: timedelta
    workflow: str | None = None
    statuses: Collection[Status] = TERMINAL
    scope: Scope | None = None

    def conditions(self, tx: Tx, of: Any = None) -> list[sa.ColumnElement[bool]]:
        """Return the conditions but for the age, for the instance table or for columns of it."""
        i = tx.t.instance.c if of is None else of
        conditions = [
            i.status.in_(sorted(status.value for status in self.statuses)),
            *bounds.scope_conditions(tx.t, self.scope, of=of),
        ]
        return conditions if self.workflow is None else [i.workflow == self.workflow, *conditions]


Position = tuple[int, int]
"""Where a search of ended runs continues: behind this end and this instance's key."""


@dataclass(frozen=True, slots=True)
class PruneBatch:
    """How many instances one batch has deleted, and where the next one continues; None: none is left to examine."""

    deleted: int
    next_position: Position | None


@statement
def _find_expired(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(i.id).where(*_is_expired(s)).order_by(i.retention_until).limit(param("limit", sa.Integer))


def _is_expired(s: Store) -> list[sa.ColumnElement[bool]]:
    i = s.tables.instance.c
    has_ended = sa.or_(*(i.status == status.value for status in sorted(TERMINAL)))  # a compiled statement has no IN
    return [i.retention_until <= s.statement_clock(), has_ended]


def delete_expired(tx: Tx, *, limit: int) -> int:
    """Delete up to ``limit`` instances whose retention is over, oldest first. Returns how many."""
    # Each sweep asks, and nearly always there is none: the search is compiled once.
    found = [row.id for row in tx.run(_find_expired, limit=limit)]
    return _delete(tx, found, _is_expired(tx.store)) if found else 0


def delete_ended(tx: Tx, ended: EndedFilter, *, limit: int, after: Position | None = None) -> PruneBatch:
    """Delete up to ``limit`` of these instances, those that ended first in front, whatever their retention."""
    examined = _build_examined(tx, ended.age, after)
    c = _look_up_instances(tx, examined).c
    query = sa.select(c.completed_at, c.id).where(*ended.conditions(tx, c)).order_by(c.completed_at, c.id).limit(limit)
    found = [(row.completed_at, row.id) for row in tx.execute(query)]
    position = found[-1] if len(found) == limit else _find_last(tx, examined)
    return PruneBatch(_delete(tx, [pk for _, pk in found], ended.conditions(tx)), position)


def count_ended(tx: Tx, ended: EndedFilter) -> Count:
    """Count these instances among the 10,000 that ended first, or of the workflow that were created first."""
    i, r, bound = tx.t.instance, tx.t.run, bounds.MAX_EXAMINED
    has_ended = []
    if ended.workflow is None:
        examined = _build_examined(tx, ended.age, None)
        found = _look_up_instances(tx, examined)
    else:
        ranges = [
            Range({"workflow": ended.workflow, "status": status.value}, "id") for status in sorted(ended.statuses)
        ]
        bound = bounds.divide(ranges)
        examined = bounds.build_union(i, ranges, "id", *_EXAMINED, limit=bound)
        is_its = (r.c.instance_pk == examined.c.id, r.c.run_number == examined.c.run_number)
        found = bounds.look_up(tx.store.database, examined, r, r.c.completed_at, is_it=sa.and_(*is_its))
        has_ended = [found.c.completed_at <= _latest_end(tx, ended.age)]
    matching = sa.select(sa.func.count()).select_from(found).where(*ended.conditions(tx, found.c), *has_ended)
    n = tx.execute(matching).scalar_one()
    fullest = sa.select(sa.func.count()).select_from(examined).group_by(examined.c.part)
    return Count(n, max(tx.execute(fullest).scalars(), default=0) < bound)


_EXAMINED = ("instance_id", "run_number", "workflow", "status")


def _look_up_instances(tx: Tx, examined: Any) -> Any:
    """Build the subquery of the instances whose current run is an examined one."""
    i = tx.t.instance
    columns = (i.c.id, i.c.instance_id, i.c.workflow, i.c.status)
    is_current = sa.and_(i.c.id == examined.c.instance_pk, i.c.run_number == examined.c.run_number)
    return bounds.look_up(tx.store.database, examined, i, *columns, is_it=is_current)


def _latest_end(tx: Tx, age: timedelta) -> sa.ColumnElement[int]:
    return tx.store.statement_clock() - duration_us(age)


def _build_examined(tx: Tx, age: timedelta, after: Position | None) -> Any:
    """Build the subquery of the runs to examine, those that ended first in front."""

    def is_next(c: Any) -> list[sa.ColumnElement[bool]]:
        conditions = [c.completed_at <= _latest_end(tx, age)]
        if after is not None:
            at, pk = after
            conditions += [c.completed_at >= at, sa.or_(c.completed_at > at, c.instance_pk > pk)]
        return conditions

    runs = [Range({}, "completed_at", then="instance_pk", where=is_next)]
    return bounds.build_union(tx.t.run, runs, "completed_at", "instance_pk", "run_number", limit=bounds.MAX_EXAMINED)


def _find_last(tx: Tx, examined: Any) -> Position | None:
    """Return the last examined run, or None if there was nothing left to examine."""
    c = examined.c
    total = sa.select(sa.func.count()).select_from(examined).scalar_subquery()
    query = sa.select(c.completed_at, c.instance_pk, total.label("n"))
    last = tx.execute(query.order_by(c.completed_at.desc(), c.instance_pk.desc()).limit(1)).first()
    return None if last is None or last.n < bounds.MAX_EXAMINED else (last.completed_at, last.instance_pk)


def _delete(tx: Tx, found: Sequence[int], conditions: Sequence[sa.ColumnElement[bool]]) -> int:
    """Delete the instances of these keys that still meet the conditions. Returns how many.

    They are found first and locked here: a search that locks the rows it reads would block all live instances.
    """
    i = tx.t.instance
    # A transaction that holds such a row is about to change it, so the row is skipped this time.
    locked = sa.select(i.c.id).where(i.c.id.in_(found), *conditions).order_by(i.c.id).with_for_update(skip_locked=True)
    ids: Sequence[int] = tx.execute(locked).scalars().all() if found else []
    if ids:
        for table in tx.t.metadata.sorted_tables:
            if "instance_pk" in table.c:
                # Messages of the instance that are not delivered yet outlive it.
                is_deletable = [table.c.next_check_at.is_(None)] if table is tx.t.outbox else []
                tx.execute(sa.delete(table).where(table.c.instance_pk.in_(ids), *is_deletable))
        tx.execute(sa.delete(i).where(i.c.id.in_(ids)))
    return len(ids)
