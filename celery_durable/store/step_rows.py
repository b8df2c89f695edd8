"""The steps of a run: load them, and write the row of a step under the guard.

A step boundary is one commit: first the step's own writes, then the guard, then these rows (LAW 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from celery_durable.ancestry import Ancestry
from celery_durable.errors import Superseded
from celery_durable.model import (
    Claim,
    StepRow,
    StepWrite,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.claims import GuardResult, guard, guard_params, guard_update
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.store.step_columns import STEP_COLUMNS, Source, StepColumn, Written
from celery_durable.store.step_format import STEPS

# --- load ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunState:
    """A run and its steps as recorded so far."""

    params: str
    created_at: datetime
    started_at: datetime | None
    log_count: int
    ancestry: Ancestry
    steps: tuple[StepRow, ...]
    definition_version: int | None = None

    @property
    def is_start_recorded(self) -> bool:
        """Whether an earlier pass has recorded the start of the run, as the first pass that releases it does."""
        return self.started_at is not None


@statement
def _select_run_and_steps(s: Store) -> Any:
    r, st = s.tables.run, s.tables.step
    # One statement reads both. Every step row carries the run's columns; only the first row carries its large values.
    order = (st.c.seq, st.c.step_key)
    is_first = sa.func.row_number().over(order_by=order) == 1
    joined = r.outerjoin(st, sa.and_(st.c.instance_pk == r.c.instance_pk, st.c.run_number == r.c.run_number))
    return (
        sa.select(
            sa.case((is_first, r.c.params)).label("params"), r.c.created_at.label("run_created_at"),
            r.c.started_at.label("run_started_at"), r.c.log_count, r.c.definition_version,
            sa.case((is_first, r.c.ancestry)).label("ancestry"),
            *STEPS.select(st),
        )
        .select_from(joined)
        .where(r.c.instance_pk == param("pk"), r.c.run_number == param("run"))
        .order_by(*order)
    )  # fmt: skip


def load(tx: Tx, claim: Claim) -> RunState:
    """Read the run's parameters and its steps in call order. It reads only rows that the claim protects.

    Raises Superseded if the instance was ended and deleted after the claim.
    """
    rows = tx.run(_select_run_and_steps, pk=claim.pk, run=claim.ref.run_number)
    if not rows:
        raise Superseded(str(claim.ref))
    first = rows[0]
    return RunState(
        params=first.params,
        created_at=from_us(first.run_created_at),
        started_at=from_us_or_none(first.run_started_at),
        log_count=first.log_count,
        ancestry=Ancestry.parse(first.ancestry, ref=claim.ref, created_at=from_us(first.run_created_at)),
        definition_version=first.definition_version,
        steps=tuple(STEPS.read(row[-len(STEP_COLUMNS) :]) for row in rows if row.step_key is not None),
    )


# --- step rows ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """A step row as written, with the times of the database, and whether a pause is requested."""

    row: StepRow
    pause_requested: bool


def insert_values(columns: Sequence[StepColumn], pk: Any, run_number: Any, now: Any) -> dict[str, Any]:
    """Build the values of a new row at the time ``now``, from the parameters of `StepFormat.encode_write`."""
    return {"instance_pk": pk, "run_number": run_number} | {each.name: _expression(each, now) for each in columns}


def update_values(columns: Sequence[StepColumn], now: Any) -> dict[str, Any]:
    """Build the values for a row that is overwritten. The other columns keep the value of the first commit."""
    return {each.name: _expression(each, now) for each in columns if each.is_updated}


def _expression(column: StepColumn, now: Any) -> Any:
    values = [_source_expression(column, source, now) for source in column.sources]
    if not values:
        return now
    return values[0] if len(values) == 1 else sa.func.coalesce(*values)


def _source_expression(column: StepColumn, source: Source, now: Any) -> Any:
    match source.written:
        case Written.VALUE:
            return param(source.field, column.parameter_type)
        case Written.AFTER:
            return now + param(source.field, sa.BigInteger)  # NULL if the parameter is NULL
        case Written.BEFORE:
            return now - param(source.field, sa.BigInteger)
        case Written.IF:
            return sa.case((param(source.field, sa.Boolean), now))


def _time_columns(st: sa.Table) -> list[Any]:
    return [st.c[column.name] for column in STEPS.time_columns]


def _unchanged_since_read(st: sa.Table) -> list[Any]:
    """Conditions for the row as the claim last read it.

    The token alone is not enough. If a connection breaks, one of its statements may be delayed and arrive after the
    step has progressed.
    """
    return [st.c.step_key == param("key", sa.String), st.c.commit_id == param("replaces", sa.String)]


@statement
def _guard_and_insert(s: Store) -> Any:
    i, st = s.tables.instance, s.tables.step
    held = guard_update(s).returning(i.c.id, i.c.run_number, i.c.pause_requested).cte("held")
    values = insert_values(STEP_COLUMNS, held.c.id, held.c.run_number, s.clock())
    source = sa.select(*values.values()).select_from(held)
    written = sa.insert(st).from_select(list(values), source).returning(*_time_columns(st)).cte("written")
    return sa.select(held.c.pause_requested, *written.c).select_from(held.join(written, sa.true()))


@statement
def _guard_and_update(s: Store) -> Any:
    i, st = s.tables.instance, s.tables.step
    held = guard_update(s).returning(i.c.id, i.c.run_number, i.c.pause_requested).cte("held")
    written = (
        sa.update(st)
        .where(
            st.c.instance_pk == held.c.id,
            st.c.run_number == held.c.run_number,
            *_unchanged_since_read(st),
        )
        .values(update_values(STEP_COLUMNS, s.clock()))
        .returning(*_time_columns(st))
        .cte("written")
    )
    return sa.select(held.c.pause_requested, *written.c).select_from(held.join(written, sa.true()))


def guard_and_write_step(tx: Tx, claim: Claim, write: StepWrite, *, lease: timedelta) -> WrittenStep:
    """Take the guard and write one step row: a boundary that writes nothing else.

    If the database can combine writes (PostgreSQL), the guard and the row are one statement. Raises Superseded if the
    claim is lost, or if the row to overwrite has changed.
    """
    if not tx.store.database.can_combine_writes:
        guard_result = guard(tx, claim, lease=lease, resets_crash_count=write.resets_crash_count)
        with tx.store.conflict_as_superseded():
            return WrittenStep(write_step(tx, claim, guard_result, write), guard_result.pause_requested)
    parameters = guard_params(claim, lease=lease, resets_crash_count=write.resets_crash_count)
    parameters |= STEPS.encode_write(write)
    which = _guard_and_insert if write.replaces is None else _guard_and_update
    try:
        found = tx.run(which, **parameters, replaces=write.replaces).first()
    except IntegrityError as error:  # another worker has inserted the row
        raise Superseded(str(error.orig)) from error
    if found is None:
        raise Superseded(str(claim.ref))
    return WrittenStep(STEPS.to_written_row(write, found[1:]), found.pause_requested)


@statement
def _insert(s: Store) -> Any:
    pk, run_number, now = param("pk", sa.BigInteger), param("run", sa.Integer), param("now_us", sa.BigInteger)
    return sa.insert(s.tables.step).values(insert_values(STEP_COLUMNS, pk, run_number, now)).inline()


@statement
def _update(s: Store) -> Any:
    st = s.tables.step
    return (
        sa.update(st)
        .where(
            st.c.instance_pk == param("pk", sa.BigInteger),
            st.c.run_number == param("run", sa.Integer),
            *_unchanged_since_read(st),
        )
        .values(update_values(STEP_COLUMNS, param("now_us", sa.BigInteger)))
    )


def write_step(tx: Tx, claim: Claim, guard_result: GuardResult, write: StepWrite) -> StepRow:
    """Write one step row in a guarded transaction, with the times of the guard; raises Superseded.

    Returns the row as `load` reads it, except that ``created_at`` of an overwritten row is None.
    """
    now = to_us(guard_result.now)
    parameters = {"pk": claim.pk, "run": claim.ref.run_number, "now_us": now, **STEPS.encode_write(write)}
    if write.replaces is None:
        tx.run(_insert, **parameters)
    elif tx.run(_update, **parameters, replaces=write.replaces).rowcount == 0:
        raise Superseded(str(claim.ref))
    return STEPS.to_written_row(write, STEPS.compute_times(parameters, now, is_new=write.is_new))


@statement
def _select_commit(s: Store) -> Any:
    st = s.tables.step
    return (
        sa.select(*STEPS.select(st))
        .where(st.c.instance_pk == param("pk"), st.c.run_number == param("run"), st.c.commit_id == param("commit_id"))
        .order_by(st.c.seq, st.c.step_key)
    )


def find_commit(tx: Tx, claim: Claim, *, commit_id: str) -> list[StepRow]:
    """Return the step rows of a boundary whose commit was in doubt; none if it was rolled back.

    Call `claims.is_held` first: it waits until the database has decided the commit.
    """
    rows = tx.run(_select_commit, pk=claim.pk, run=claim.ref.run_number, commit_id=commit_id)
    return [STEPS.read(row) for row in rows]
