"""Scopes in SQL: conditions that limit a caller to some instances and hide all others.

A prefix is compared with the same number of characters of the id. LIKE treats `_` as any character, and under a
linguistic collation a range would include other ids. All three databases know `substr` under this name.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from celery_durable.model import Child, Scope
from celery_durable.store.engine import Tx
from celery_durable.store.schema import Tables


def conditions(t: Tables, scope: Scope | None) -> list[sa.ColumnElement[bool]]:
    """Return the conditions on a row of the instance table."""
    if scope is None:
        return []
    i = t.instance.c
    found: list[sa.ColumnElement[bool]] = []
    if scope.id_prefix:
        found.append(sa.func.substr(i.instance_id, 1, len(scope.id_prefix)) == scope.id_prefix)
    for name, value in scope.labels.items():
        its = t.label.alias()
        mine = (its.c.instance_pk == i.id, its.c.name == name, its.c.value == value)
        found.append(sa.select(its.c.instance_pk).where(*mine).correlate(t.instance).exists())
    return found


def reaches(tx: Tx, scope: Scope | None, pk: int) -> bool:
    """Whether an instance is in the scope. If its row is locked before, this holds as long as the lock."""
    if scope is None:
        return True
    i = tx.t.instance.c
    return tx.execute(sa.select(i.id).where(i.id == pk, *conditions(tx.t, scope))).first() is not None


def reached(tx: Tx, scope: Scope | None, them: Collection[Child]) -> frozenset[Child]:
    """Return those of these instances that are in the scope."""
    if scope is None or not them:
        return frozenset(them)
    i = tx.t.instance.c
    wanted = sa.tuple_(i.workflow, i.instance_id).in_([(each.workflow, each.instance_id) for each in them])
    rows = tx.execute(sa.select(i.workflow, i.instance_id).where(wanted, *conditions(tx.t, scope)))
    return frozenset(Child(row.workflow, row.instance_id) for row in rows)
