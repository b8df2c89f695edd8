"""Reads of all runs that have not ended, in batches by key. Takes no locks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_durable.ancestry import Ancestry
from celery_durable.model import RUNNABLE, RunRef, Status, StepRow, from_us, from_us_or_none
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.runs.step_rows import RunState
from celery_durable.store.schema.step_format import STEPS

_OPEN = [status.value for status in (*RUNNABLE, Status.PAUSED)]


@dataclass(frozen=True, slots=True)
class OpenRun:
    pk: int
    ref: RunRef
    status: Status
    created_at: int
    state: RunState


def count(tx: Tx, *, workflow: str | None) -> dict[str, int]:
    """Count the open runs of each workflow; read from an index."""
    i = tx.t.instance.c
    query = (
        sa.select(i.workflow, sa.func.count().label("n"))
        .where(i.status.in_(_OPEN), bounds.in_lists(i))
        .group_by(i.workflow)
        .order_by(i.workflow)
    )
    if workflow is not None:
        query = query.where(i.workflow == workflow)
    return {row.workflow: row.n for row in tx.execute(query)}


def list_keys(tx: Tx, *, workflow: str, after_pk: int, limit: int) -> list[int]:
    """Return the keys of open runs of a workflow after ``after_pk``, in ascending order."""
    i = tx.t.instance.c
    # The index of workflow and status has the keys of one status in order. All are asked in one statement, so that a
    # run whose status changes meanwhile is neither missed nor read twice.
    parts = [
        sa.select(i.id)
        .where(i.workflow == workflow, i.status == status, i.id > after_pk, bounds.in_lists(i))
        .order_by(i.id)
        .limit(limit)
        .subquery()
        for status in _OPEN
    ]
    keys = sa.union_all(*(sa.select(part.c.id) for part in parts)).subquery().c
    return list(tx.execute(sa.select(keys.id).order_by(keys.id).limit(limit)).scalars())


def read(tx: Tx, keys: Sequence[int]) -> list[OpenRun]:
    """Return those of these runs that have not ended, by ascending key."""
    i, r = tx.t.instance, tx.t.run
    current = sa.and_(r.c.instance_pk == i.c.id, r.c.run_number == i.c.run_number)
    query = (
        sa.select(
            i.c.id, i.c.workflow, i.c.instance_id, i.c.status, i.c.created_at, r.c.run_number, r.c.params,
            r.c.created_at.label("run_created_at"), r.c.started_at, r.c.log_count, r.c.ancestry, r.c.definition_version,
        )
        .join_from(i, r, current)
        .where(i.c.id.in_(keys), i.c.status.in_(_OPEN))
        .order_by(i.c.id)
    )  # fmt: skip
    rows = tx.execute(query).all()
    steps = _read_steps(tx, keys)
    runs = []
    for row in rows:
        ref, created_at = RunRef(row.workflow, row.instance_id, row.run_number), from_us(row.run_created_at)
        state = RunState(
            params=row.params,
            created_at=created_at,
            started_at=from_us_or_none(row.started_at),
            log_count=row.log_count,
            ancestry=Ancestry.parse(row.ancestry, ref=ref, created_at=created_at),
            steps=tuple(steps[row.id, row.run_number]),
            definition_version=row.definition_version,
        )
        runs.append(OpenRun(row.id, ref, Status(row.status), row.created_at, state))
    return runs


def _read_steps(tx: Tx, keys: Sequence[int]) -> defaultdict[tuple[int, int], list[StepRow]]:
    i, s = tx.t.instance.c, tx.t.step
    query = (
        sa.select(s.c.instance_pk, s.c.run_number, *STEPS.select(s))
        .join_from(s, tx.t.instance, sa.and_(s.c.instance_pk == i.id, s.c.run_number == i.run_number))
        .where(s.c.instance_pk.in_(keys))
        .order_by(s.c.instance_pk, s.c.seq, s.c.step_key)
    )
    steps: defaultdict[tuple[int, int], list[StepRow]] = defaultdict(list)
    for row in tx.execute(query):
        columns: Sequence[Any] = row
        steps[columns[0], columns[1]].append(STEPS.read(columns[2:]))
    return steps
