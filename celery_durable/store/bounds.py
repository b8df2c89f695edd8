"""Bounded reads (LAW 10): a read examines at most 10,000 rows of the index that drives it, however large a table is.

A filter that this index does not answer is checked on the examined rows. If they are not all that match the index, the
reader learns it: a list continues at a cursor or says that its filter is too broad, and a count is a minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_durable.store import dialects
from celery_durable.store.dialects import Database
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import statement

MAX_EXAMINED = 10_000
"""How many rows of its driving index a read examines at most."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows that lie one after the other in an index: by the values of its first columns, then in the ``order`` of one.

    ``where`` returns further conditions that the index answers. ``then`` orders rows with the same value.
    """

    equal: Mapping[str, object]
    order: str
    then: str | None = None
    is_reversed: bool = False
    where: Callable[[Any], Sequence[sa.ColumnElement[bool]]] = lambda _: ()

    @property
    def all_order(self) -> list[str]:
        return [name for name in (self.order, self.then) if name is not None]


def build_union(table: sa.Table, ranges: Sequence[Range], *columns: str, limit: int) -> Any:
    """Build a subquery of these columns for the first ``limit`` rows of each range. "part" is the range's number."""
    parts = []
    for number, each in enumerate(ranges):
        c = table.alias().c
        part = sa.select(sa.literal_column(str(number)).label("part"), *(c[name] for name in columns))
        part = part.where(*(c[name] == value for name, value in each.equal.items()), *each.where(c))
        if "workflow" in each.equal:
            part = part.where(in_lists(c))
        ordered = part.order_by(*(c[name].desc() if each.is_reversed else c[name] for name in each.all_order))
        parts.append(sa.select(ordered.limit(limit).subquery()))  # SQLite takes no LIMIT in a part of a UNION
    return (parts[0] if len(parts) == 1 else sa.union_all(*parts)).subquery("examined")


def in_lists(c: Any) -> sa.ColumnElement[bool]:
    """Return the condition by which a query of instances may use the indexes for lists (`schema.IN_LISTS`)."""
    condition: sa.ColumnElement[bool] = c.id > sa.literal_column("0")
    return condition


def look_up(database: Database, examined: Any, table: sa.Table, *columns: Any, is_it: sa.ColumnElement[bool]) -> Any:
    """Build a subquery of the examined rows, each with columns of its rows in ``table``.

    PostgreSQL would join ten thousand rows with a whole table, if that is not much larger. So it gets one search for
    each row: it cannot turn a subquery with an OFFSET into a join.
    """
    named = [sa.label(column.name, column) for column in columns]
    if database is not dialects.POSTGRESQL:
        return sa.select(*examined.c, *named).select_from(examined.join(table, is_it)).subquery("found")
    its = sa.select(*named).where(is_it).correlate(examined).offset(sa.literal_column("0")).lateral("its")
    return sa.select(*examined.c, *its.c).select_from(examined.join(its, sa.true())).subquery("found")


def divide(ranges: Sequence[object]) -> int:
    """Return how many rows of each range a read examines that examines several."""
    return max(MAX_EXAMINED // max(len(ranges), 1), 1)


def read_workflow_names(tx: Tx) -> list[str]:
    """Return the names of the workflows that have instances, by one index search for each."""
    return sorted(row.name for row in tx.run(_select_workflow_names) if row.name is not None)


@statement
def _select_workflow_names(s: Store) -> Any:
    return dialects.select_smallest_per_group(
        s.database, s.tables.instance, "workflow", "id", prefix={}, where=lambda c: (in_lists(c),), cte="workflows"
    )
