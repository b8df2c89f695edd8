"""Queries of `durable chaos`. They only read, because the tables may belong to a staging system in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import RUNNABLE, DueRun, RunRef, Status, StepType, from_us, to_us
from celery_durable.store.engine import Tx
from celery_durable.store.runs import schedule

_CHUNK = 500
_RUNNABLE = [status.value for status in RUNNABLE]


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim that a node held at the time ``at`` of the database."""

    pk: int
    ref: RunRef
    crash_count: int
    at: datetime


def find_held_claims(tx: Tx, node: str, *, lease: timedelta) -> list[HeldClaim]:
    """Return the claims that a worker node holds. ``lease`` is the length of a lease."""
    i = tx.t.instance.c
    columns = (i.id, i.workflow, i.instance_id, i.run_number, i.crash_count, tx.store.clock().label("now_us"))
    where = (*schedule.conditions_due_within(tx, within=lease), i.status == Status.ACTIVE.value)
    rows = tx.execute(sa.select(*columns).where(*where, i.claimed_by == node))
    return [
        HeldClaim(row.id, RunRef(row.workflow, row.instance_id, row.run_number), row.crash_count, from_us(row.now_us))
        for row in rows
    ]


def find_due_soon(tx: Tx, *, within: timedelta, limit: int) -> dict[int, DueRun]:
    """Return up to ``limit`` runs that are due or whose start, wait or lease ends ``within`` this time, by instance."""
    i = tx.t.instance.c
    where = (*schedule.conditions_due_within(tx, within=within), i.status.in_(_RUNNABLE))
    rows = tx.execute(sa.select(i.id, i.workflow, i.instance_id, i.run_number, i.queue).where(*where).limit(limit))
    return {row.id: DueRun(RunRef(row.workflow, row.instance_id, row.run_number), row.queue) for row in rows}


def find_progress_after(tx: Tx, held: HeldClaim) -> datetime | None:
    """Return when a run first progressed after ``held.at``: the end of a step or of the run, or the start of a wait."""
    s, r = tx.t.step.c, tx.t.run.c
    step = (s.instance_pk == held.pk, s.run_number == held.ref.run_number)
    times = sa.union_all(
        sa.select(s.finished_at.label("at")).where(*step),
        sa.select(s.created_at).where(*step, s.type != StepType.DO.value),
        sa.select(r.completed_at).where(r.instance_pk == held.pk, r.run_number == held.ref.run_number),
    ).subquery()
    found = tx.execute(sa.select(sa.func.min(times.c.at)).where(times.c.at > to_us(held.at))).scalar_one()
    return None if found is None else from_us(found)


def count_progress(tx: Tx, pks: Sequence[int], *, since: datetime) -> tuple[Counter[str], int]:
    """Count these instances by status, and the steps of theirs that finished at or after ``since``."""
    i, s = tx.t.instance.c, tx.t.step.c
    statuses, steps = Counter[str](), 0
    for chunk in _chunks(pks):
        rows = tx.execute(sa.select(i.status, sa.func.count().label("n")).where(i.id.in_(chunk)).group_by(i.status))
        statuses.update({row.status: row.n for row in rows})
        ended = (s.instance_pk.in_(chunk), s.finished_at >= to_us(since))
        steps += tx.execute(sa.select(sa.func.count()).select_from(tx.t.step).where(*ended)).scalar_one()
    return statuses, steps


def find_contradictions(tx: Tx, pks: Sequence[int]) -> list[str]:
    """Return one sentence for each broken invariant in the rows of these instances; see docs/design.md."""
    found: list[str] = []
    i, r, s = tx.t.instance.c, tx.t.run.c, tx.t.step.c
    for chunk in _chunks(pks):
        current = (r.instance_pk == i.id, r.run_number == i.run_number)
        rows = tx.execute(
            sa.select(tx.t.instance, r.output, r.error_name, r.completed_at)
            .join_from(tx.t.instance, tx.t.run, sa.and_(*current))
            .where(i.id.in_(chunk))
        )
        found += [f"{row.workflow}/{row.instance_id}: {why}" for row in rows for why in _find_broken_invariants(row)]
        keys = (s.instance_pk, s.run_number, s.seq)
        twice = sa.select(*keys).where(s.instance_pk.in_(chunk)).group_by(*keys).having(sa.func.count() > 1)
        found += [f"instance {row.instance_pk}: two steps are number {row.seq}" for row in tx.execute(twice)]
        over = sa.select(s.instance_pk, s.step_key).where(s.instance_pk.in_(chunk), s.attempts > s.max_attempts)
        found += [
            f"instance {row.instance_pk}: step {row.step_key!r} has more attempts than it may"
            for row in tx.execute(over)
        ]
    return found


def _find_broken_invariants(row: Any) -> Iterator[str]:
    is_claimed, is_live = row.claim_token is not None, row.status in _RUNNABLE
    is_over = row.status != Status.PAUSED.value and not is_live
    if is_claimed != (row.lease_until is not None) or is_claimed != (row.claimed_by is not None):
        yield "an incomplete claim"
    if is_claimed and row.status != Status.ACTIVE.value:
        yield f"claimed while {row.status}"
    if is_live and (row.run_at is None or row.next_check_at is None):
        yield f"{row.status}, but no sweep will find it"
    if is_over != (row.completed_at is not None):
        yield f"{row.status}, but its run ended at {row.completed_at}"
    if (row.output is not None) != (row.status == Status.COMPLETE.value):
        yield f"{row.status}, with{'out' if row.output is None else ''} an output"
    if (row.error_name is not None) != (row.status == Status.ERRORED.value):
        yield f"{row.status}, with the error {row.error_name}"


def _chunks(pks: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(pks), _CHUNK):
        yield pks[begin : begin + _CHUNK]
