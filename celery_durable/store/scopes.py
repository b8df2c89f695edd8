"""Scopes in SQL: conditions that limit a caller to some instances and hide all others.

The prefix of a scope is compared with the first characters of an id. LIKE would treat `_` as any character, and under a
linguistic collation a range of ids would include others. All three databases have a function `substr`.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from celery_durable.model import Child, Scope
from celery_durable.store.engine import Tx
from celery_durable.store.schema import Tables


def conditions(t: Tables, scope: Scope | None) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a row of the instance table must meet. A scope of None has no conditions."""
    if scope is None:
        return []
    i = t.instance.c
    found: list[sa.ColumnElement[bool]] = []
    if scope.id_prefix:
        found.append(sa.func.substr(i.instance_id, 1, len(scope.id_prefix)) == scope.id_prefix)
    for name, value in scope.labels.items():
        label = t.label.alias()
        is_same_label = (label.c.instance_pk == i.id, label.c.name == name, label.c.value == value)
        found.append(sa.select(label.c.instance_pk).where(*is_same_label).correlate(t.instance).exists())
    return found


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
