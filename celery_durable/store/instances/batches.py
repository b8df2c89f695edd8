"""Many new instances of a workflow at once: one statement for up to a thousand of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Parent, RunPlan
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.instances import instances
from celery_durable.store.runs import runs
from celery_durable.store.runs.runs import RunStart
from celery_durable.store.schema import dialects


@dataclass(frozen=True, slots=True)
class NewInstance:
    """An instance to insert; ``params`` is JSON text."""

    instance_id: str
    params: str
    labels: Mapping[str, str] = field(default_factory=dict)
    parent: Parent | None = None


def insert(
    tx: Tx,
    workflow: str,
    batch: Sequence[NewInstance],
    *,
    queue: str,
    grace: timedelta,
    commit_id: str,
    plan: RunPlan,
    retention: timedelta | None,
) -> set[str]:
    """Insert instances that are due now, and their first runs. Returns the ids that were not taken.

    Give them in the order of their ids, so that two batches with common ids wait for each other instead of deadlocking.
    """
    given = instances.encode_start(workflow, queue=queue, grace=grace, plan=plan, retention=retention)
    start = RunStart("", commit_id, plan)
    created: dict[str, int] = {}
    for part in dialects.divide(batch, lambda each: len(each.params)):
        created |= _insert_part(tx, part, given, start)
    runs.insert_planned_steps(tx, list(created.values()), start)
    instances.insert_labels_of_many(
        tx, {created[each.instance_id]: each.labels for each in batch if each.instance_id in created}
    )
    return set(created)


def find_created(tx: Tx, workflow: str, ids: Collection[str], *, commit_id: str) -> set[str]:
    """Return which of these instances the transaction with this commit id created."""
    i, r = tx.t.instance.c, tx.t.run.c
    is_first = (r.instance_pk == i.id, r.run_number == 1, r.commit_id == commit_id)
    query = sa.select(i.instance_id).where(i.workflow == workflow, i.instance_id.in_(ids), *is_first)
    return set(tx.execute(query).scalars())


def _insert_part(tx: Tx, part: Sequence[NewInstance], given: dict[str, Any], start: RunStart) -> dict[str, int]:
    rows = dialects.encode_rows([_encode(each) for each in part])
    combined = tx.run_combined(_insert_with_runs, rows=rows, **given, **start.encode(1))
    inserted = tx.run(_insert, rows=rows, **given) if combined is None else combined
    created = {row.instance_id: row.id for row in inserted}
    if combined is None and created:
        new_runs = [
            {"pk": created[each.instance_id], "params": each.params} for each in part if each.instance_id in created
        ]
        tx.run(_insert_runs, rows=dialects.encode_rows(new_runs), **start.encode(1))
    return created


def _encode(new: NewInstance) -> dict[str, Any]:
    row: dict[str, Any] = {"instance_id": new.instance_id, "params": new.params}
    if (parent := new.parent) is not None:
        row |= {"parent_pk": parent.pk, "parent_run": parent.run_number, "parent_key": parent.column}
    return row


_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "instance_id": sa.String(),
    "params": sa.Text(),
    "parent_pk": sa.BigInteger(),
    "parent_run": sa.Integer(),
    "parent_key": sa.Text(),
}


def _build_insert(s: Store) -> tuple[Any, Any]:
    i, new = s.tables.instance, dialects.build_rows(s.database, param("rows", sa.Text), _COLUMNS)
    values = instances.instance_values(s) | {"instance_id": new.c.instance_id}
    values |= {"parent_pk": new.c.parent_pk, "parent_run_number": new.c.parent_run, "parent_step_key": new.c.parent_key}
    insert = dialects.insert_rows_or_nothing(s.database, i, values, new, instances.KEY)
    return insert.returning(i.c.id, i.c.instance_id), new


def _build_insert_runs(s: Store, source: Any, pk: Any, params: Any) -> Any:
    run = s.tables.run
    values = {"instance_pk": pk} | runs.run_values(s) | {"params": params}
    return sa.insert(run).from_select(list(values), sa.select(*values.values()).select_from(source))


@statement
def _insert_with_runs(s: Store) -> Any:
    insert, given = _build_insert(s)
    new = insert.cte("new_instance")
    source = new.join(given, given.c.instance_id == new.c.instance_id)
    new_runs = _build_insert_runs(s, source, new.c.id, given.c.params).cte("new_run")
    return sa.select(new.c.id, new.c.instance_id).add_cte(new_runs)


@statement
def _insert(s: Store) -> Any:
    insert, _ = _build_insert(s)
    return insert


@statement
def _insert_runs(s: Store) -> Any:
    new = dialects.build_rows(s.database, param("rows", sa.Text), {"pk": sa.BigInteger(), "params": sa.Text()})
    return _build_insert_runs(s, new, new.c.pk, new.c.params)
