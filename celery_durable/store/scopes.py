"""Scopes in SQL: conditions that limit a caller to some instances and hide all others.

The prefix of a scope is compared with the first characters of an id. LIKE would treat `_` as any character, and under a
linguistic collation a range of ids would include others. All three databases have a function `substr`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Child, Scope
from celery_durable.store.engine import Tx
from celery_durable.store.schema import Tables


def conditions(t: Tables, scope: Scope | None, *, of: Any = None) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that an instance must meet. A scope of None has no conditions.

    ``of``: columns with the ``id`` and the ``instance_id`` of instances; those of the instance table if it is None.
    """
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
    return tx.execute(sa.select(i.id).where(i.id == pk, *conditions(tx.t, scope))).first() is not None


def filter_in_scope(tx: Tx, scope: Scope | None, instances: Collection[Child]) -> frozenset[Child]:
    """Return the instances that are in the scope."""
    if scope is None or not instances:
        return frozenset(instances)
    i = tx.t.instance.c
    wanted = sa.tuple_(i.workflow, i.instance_id).in_([(each.workflow, each.instance_id) for each in instances])
    rows = tx.execute(sa.select(i.workflow, i.instance_id).where(wanted, *conditions(tx.t, scope)))
    return frozenset(Child(row.workflow, row.instance_id) for row in rows)
