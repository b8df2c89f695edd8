"""Lists of instances by keyset cursor, each with the step that it is at. Takes no locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    OPEN_STEPS,
    InstanceSummary,
    Scope,
    Status,
    StepRecord,
    StepStatus,
    from_us,
    from_us_or_none,
)
from celery_durable.store import instance_search, labels
from celery_durable.store.engine import Tx
from celery_durable.store.history import to_error_info, to_step_record, with_items
from celery_durable.store.instance_search import InstanceFilter
from celery_durable.store.instances import to_running_step
from celery_durable.store.schema import Tables
from celery_durable.store.step_format import STEPS

_OPEN = sorted(status.value for status in OPEN_STEPS)
_MAX_EXAMINED_STEPS = 10_000
"""How many steps a page may read to find the current ones. Instances beyond it are listed without a step."""


@dataclass(frozen=True, slots=True)
class InstanceList:
    """A page, and where it continues, as in `instance_search.FoundKeys`."""

    items: list[InstanceSummary]
    next_pk: int | None


def read_page(tx: Tx, chosen: InstanceFilter, *, before_pk: int | None, limit: int) -> InstanceList:
    """Return the newest instances of the filter with keys below ``before_pk``."""
    found = instance_search.find_page(tx, chosen, before_pk=before_pk, limit=limit)
    return InstanceList(_summarize(tx, found.pks), found.next_pk)


def read_named(tx: Tx, workflows: Sequence[str], instance_id: str, scope: Scope | None) -> list[InstanceSummary]:
    """Return the instances of these workflows with this id, newest first."""
    return _summarize(tx, instance_search.find_named(tx, workflows, instance_id, scope))


def _summarize(tx: Tx, pks: Sequence[int]) -> list[InstanceSummary]:
    i, r = tx.t.instance, tx.t.run
    query = sa.select(i, r.c.error_name, r.c.error_message).join(
        r, sa.and_(r.c.instance_pk == i.c.id, r.c.run_number == i.c.run_number)
    )
    rows = tx.execute(query.where(i.c.id.in_(pks)).order_by(i.c.id.desc())).all() if pks else []
    labels_of = labels.read_many(tx, pks)
    steps = _read_current_steps(tx, [row.id for row in rows if not Status(row.status).is_terminal])
    return [
        InstanceSummary(
            id=row.instance_id,
            workflow=row.workflow,
            run_number=row.run_number,
            status=Status(row.status),
            error=to_error_info(row.error_name, row.error_message),
            run_at=from_us_or_none(row.run_at),
            created_at=from_us(row.created_at),
            updated_at=from_us(row.updated_at),
            labels=labels_of.get(row.id, {}),
            current_step=steps.get(row.id),
            running=to_running_step(row),
            worker=row.claimed_by,
        )
        for row in rows
    ]


def find_current_step(tx: Tx, pk: int, run_number: int) -> StepRecord | None:
    """Return the open step that is due first, else the last step that has ended, else a planned step.

    The step comes without its result. Returns None if there is no step.
    """
    st = tx.t.step
    is_open, is_planned = st.c.status.in_(_OPEN), st.c.status == StepStatus.LINEAR_PENDING.value
    rank = sa.case((is_open, 0), (is_planned, 2), else_=1)
    due = sa.case((rank == 0, sa.func.coalesce(st.c.next_retry_at, st.c.wake_at, 0)), else_=0)
    query = (
        sa.select(*STEPS.select(st, with_results=False))
        .where(st.c.instance_pk == pk, st.c.run_number == run_number)
        .order_by(rank, due, st.c.seq.desc())
        .limit(1)
    )
    row = tx.execute(query).first()
    return None if row is None else with_items(tx, pk, run_number, [to_step_record(row, pk, run_number)])[0]


def _read_current_steps(tx: Tx, pks: Sequence[int]) -> dict[int, StepRecord]:
    """Return the open step that is due first of each of these instances that has one, without its result."""
    if not pks:
        return {}
    found = tx.execute(build_current_steps_query(tx.t, pks))
    return {row.instance_pk: to_step_record(row[2:], row.instance_pk, row.run_number) for row in found}


def build_current_steps_query(t: Tables, pks: Sequence[int]) -> sa.Select[Any]:
    """Build the query of the current steps of a page. It examines a limited number of steps."""
    i, st = t.instance.c, t.step.c
    due = sa.func.coalesce(st.next_retry_at, st.wake_at, 0).label("due")
    examined = (
        sa.select(st.instance_pk, st.run_number, st.step_key, st.status, st.seq, due)
        .join_from(t.instance, t.step, sa.and_(st.instance_pk == i.id, st.run_number == i.run_number))
        .where(i.id.in_(pks))
        .limit(_MAX_EXAMINED_STEPS)
        .subquery()
    ).c
    first = sa.func.row_number().over(partition_by=examined.instance_pk, order_by=(examined.due, examined.seq.desc()))
    ranked = (
        sa.select(examined.instance_pk, examined.run_number, examined.step_key, first.label("position"))
        .where(examined.status.in_(_OPEN))
        .subquery()
    ).c
    is_it = (ranked.instance_pk == st.instance_pk, ranked.run_number == st.run_number, ranked.step_key == st.step_key)
    columns = STEPS.select(t.step, with_results=False)
    return sa.select(st.instance_pk, st.run_number, *columns).where(*is_it, ranked.position == 1)
