"""The labels of instances. Write them in the transaction that inserts the instance, or under the lock of its row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from celery_durable import values
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@statement
def _insert(s: Store) -> Any:
    row = {"instance_pk": param("pk"), "name": param("name"), "value": param("value")}
    return sa.insert(s.tables.label).values(row).inline()


@statement
def _update(s: Store) -> Any:
    t = s.tables.label
    return sa.update(t).where(t.c.instance_pk == param("pk"), t.c.name == param("name")).values(value=param("value"))


@statement
def _delete(s: Store) -> Any:
    t = s.tables.label
    return sa.delete(t).where(t.c.instance_pk == param("pk"), t.c.name == param("name"))


@statement
def _select(s: Store) -> Any:
    t = s.tables.label.c
    return sa.select(t.name, t.value).where(t.instance_pk == param("pk")).order_by(t.name)


def insert(tx: Tx, pk: int, labels: Mapping[str, str]) -> None:
    """Insert labels of an instance that has no label with these names."""
    insert_many(tx, {pk: labels})


def insert_many(tx: Tx, labels_by_pk: Mapping[int, Mapping[str, str]]) -> None:
    """Insert labels of instances that have no label with these names."""
    tx.run_many(
        _insert,
        [
            {"pk": pk, "name": name, "value": value}
            for pk, labels in labels_by_pk.items()
            for name, value in labels.items()
        ],
    )


def merge(tx: Tx, pk: int, changes: Mapping[str, str | None]) -> None:
    """Set labels of a locked instance, and delete those with the value None; raises TooManyLabels."""
    old = read(tx, pk)
    new = values.check_label_count({name: value for name, value in {**old, **changes}.items() if value is not None})
    insert(tx, pk, {name: value for name, value in new.items() if name not in old})
    changed = {name: value for name, value in new.items() if name in old and old[name] != value}
    tx.run_many(_update, [{"pk": pk, "name": name, "value": value} for name, value in changed.items()])
    tx.run_many(_delete, [{"pk": pk, "name": name} for name in old if name not in new])


def read(tx: Tx, pk: int) -> dict[str, str]:
    """Return an instance's labels by name."""
    return {row.name: row.value for row in tx.run(_select, pk=pk)}


def read_many(tx: Tx, pks: Collection[int]) -> dict[int, dict[str, str]]:
    """Return the labels of instances by primary key. Instances without labels are left out."""
    t = tx.t.label.c
    query = sa.select(t.instance_pk, t.name, t.value).where(t.instance_pk.in_(pks)).order_by(t.instance_pk, t.name)
    found: dict[int, dict[str, str]] = {}
    for row in tx.execute(query) if pks else ():
        found.setdefault(row.instance_pk, {})[row.name] = row.value
    return found
