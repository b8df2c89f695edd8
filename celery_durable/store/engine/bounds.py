"""What bounds a read: the instances that its caller may see (scope), and the rows that it examines (LAW 10).

The prefix of a scope is compared with the first characters of an id. LIKE would treat `_` as any character, and under a
linguistic collation a range of ids would include others. All three databases have a function `substr`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Child, Scope
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import statement
from celery_durable.store.schema import dialects
from celery_durable.store.schema.dialects import Database
from celery_durable.store.schema.tables import Tables

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
        c = _alias(table).c
        part = sa.select(sa.literal_column(str(number)).label("part"), *(c[name] for name in columns))
        part = part.where(*(c[name] == value for name, value in each.equal.items()), *each.where(c))
        if "workflow" in each.equal:
            part = part.where(in_lists(c))
        ordered = part.order_by(*(c[name].desc() if each.is_reversed else c[name] for name in each.all_order))
        parts.append(sa.select(ordered.limit(limit).subquery()))  # SQLite takes no LIMIT in a part of a UNION
    return (parts[0] if len(parts) == 1 else sa.union_all(*parts)).subquery("examined")


@functools.cache
def _alias(table: sa.Table) -> Any:
    """Return an alias, the same one for all ranges: a new one copies all columns of the table, 0.2 ms each time."""
    return table.alias()


def in_lists(c: Any) -> sa.ColumnElement[bool]:
    """Return the condition by which a query of instances may use the indexes for lists (`tables.IN_LISTS`)."""
    condition: sa.ColumnElement[bool] = c.id > sa.literal_column("0")
    return condition


def look_up(
    database: Database, examined: Any, table: sa.FromClause, *columns: Any, is_it: sa.ColumnElement[bool]
) -> Any:
    """Build a subquery of the examined rows, each with columns of its rows in ``table``.

    PostgreSQL would join them with a whole table. It cannot turn a subquery with an OFFSET into a join.
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


def scope_conditions(t: Tables, scope: Scope | None, *, of: Any = None) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of a scope for the instance table, or for the columns ``of``, with id and instance_id."""
    if scope is None:
        return []
    i = t.instance.c if of is None else of
    return [*prefix_conditions(t, scope, of=of), *(has_label(t, i.id, *label) for label in scope.labels.items())]


def prefix_conditions(t: Tables, scope: Scope | None, *, of: Any = None) -> list[sa.ColumnElement[bool]]:
    """Return the condition for the ids of a scope; none if it allows any id."""
    if scope is None or not scope.id_prefix:
        return []
    instance_id = (t.instance.c if of is None else of).instance_id
    return [sa.func.substr(instance_id, 1, len(scope.id_prefix)) == scope.id_prefix]


def has_label(t: Tables, pk: sa.ColumnElement[int], name: str, value: str) -> sa.ColumnElement[bool]:
    """Return the condition that the instance with this key has a label.

    A scalar subquery is one search for each row. PostgreSQL may turn EXISTS into a join with all rows of the label.
    """
    its = t.label.alias().c
    found = sa.select(its.instance_pk).where(its.instance_pk == pk, its.name == name, its.value == value)
    return found.correlate(pk.table).scalar_subquery().is_not(None)


def is_in_scope(tx: Tx, scope: Scope | None, pk: int) -> bool:
    """Return whether an instance is in the scope. The answer stays true while the caller has the row locked."""
    if scope is None:
        return True
    i = tx.t.instance.c
    return tx.execute(sa.select(i.id).where(i.id == pk, *scope_conditions(tx.t, scope))).first() is not None


def filter_in_scope(tx: Tx, scope: Scope | None, instances: Collection[Child]) -> frozenset[Child]:
    """Return the instances that are in the scope."""
    if scope is None or not instances:
        return frozenset(instances)
    i = tx.t.instance.c
    wanted = sa.tuple_(i.workflow, i.instance_id).in_([(each.workflow, each.instance_id) for each in instances])
    rows = tx.execute(sa.select(i.workflow, i.instance_id).where(wanted, *scope_conditions(tx.t, scope)))
    return frozenset(Child(row.workflow, row.instance_id) for row in rows)
