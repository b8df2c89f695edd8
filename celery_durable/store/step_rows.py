"""The record of a run: load it, and commit step boundaries, events and logs under the guard.

A boundary is one commit: first the step's own writes, then the guard, then these rows (LAW 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.ancestry import Ancestry
from celery_durable.errors import Superseded
from celery_durable.model import (
    FINISHED_STEPS,
    LEASE_EXPIRED,
    Claim,
    StepRow,
    StepStatus,
    StepType,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.claims import GuardResult, guard, guard_params, guard_update
from celery_durable.store.engine import Store, Tx, param, statement
from celery_durable.store.step_columns import (
    STEP_COLUMNS,
    TIME_COLUMNS,
    Source,
    StepColumn,
    Written,
    columns_of,
    encode_write,
    to_step_row,
    to_written_row,
)

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
            *columns_of(st),
        )
        .select_from(joined)
        .where(r.c.instance_pk == param("pk"), r.c.run_number == param("run"))
        .order_by(*order)
    )  # fmt: skip


def load(tx: Tx, claim: Claim) -> RunState:
    """Read the run's parameters and its steps in call order. It reads only rows that the claim protects.

    Raises Superseded if the instance was ended and deleted after the claim.
    """
    rows = tx.run(_select_run_and_steps, pk=claim.pk, run=claim.ref.run_number).all()
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
        steps=tuple(to_step_row(row[-len(STEP_COLUMNS) :]) for row in rows if row.step_key is not None),
    )


# --- step rows ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepWrite:
    """A step row to write at a boundary.

    ``replaces`` is the commit id of the row to overwrite, or None for a new row. ``ran_for`` is the time since the
    body started, or None if no body ran. ``retry_in`` and ``wake_in`` count from the time of the boundary;
    ``wake_at`` is absolute.
    """

    key: str
    seq: int
    name: str
    type: StepType
    status: StepStatus
    replaces: str | None
    commit_id: str
    attempts: int = 0
    max_attempts: int | None = None
    timeout: timedelta | None = None
    retry_in: timedelta | None = None
    wake_in: timedelta | None = None
    wake_at: datetime | None = None
    event_type: str | None = None
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    event_seq: int | None = None
    ran_for: timedelta | None = None

    @property
    def is_new(self) -> bool:
        return self.replaces is None

    @property
    def is_finished(self) -> bool:
        """Whether this write finishes the step."""
        return self.status in FINISHED_STEPS

    @property
    def resets_crash_count(self) -> bool:
        """Whether this write advances the run, which shows that its crashes are over.

        A row that says that an attempt has started (PENDING, RUNNING) is not: the attempt may still kill its worker.
        Neither is the record of an expired lease.
        """
        return self.status not in (StepStatus.PENDING, StepStatus.RUNNING) and self.error_name != LEASE_EXPIRED


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """A step row as written, with the times of the database, and whether a pause is requested."""

    row: StepRow
    pause_requested: bool


def _expression(column: StepColumn, now: Any) -> Any:
    """Build the value of a column at the time ``now``, from the parameters of `encode_write`."""
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


def _time(column: StepColumn, now: int, parameters: dict[str, Any]) -> int | None:
    """Return the value of a time column, as the database computes it from `_expression`."""
    if not column.sources:
        return now
    for source in column.sources:
        value = parameters[source.field]
        match source.written:
            case Written.VALUE if value is not None:
                return int(value)
            case Written.AFTER if value is not None:
                return now + int(value)
            case Written.BEFORE if value is not None:
                return now - int(value)
            case Written.IF if value:
                return now
    return None


def _insert_values(pk: Any, run_number: Any, now: Any) -> dict[str, Any]:
    values = {column.name: _expression(column, now) for column in STEP_COLUMNS}
    return {"instance_pk": pk, "run_number": run_number} | values


def _update_values(now: Any) -> dict[str, Any]:
    return {column.name: _expression(column, now) for column in STEP_COLUMNS if column.is_updated}


def _time_columns(st: sa.Table) -> list[Any]:
    return [st.c[column.name] for column in TIME_COLUMNS]


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
    values = _insert_values(held.c.id, held.c.run_number, s.clock())
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
        .values(_update_values(s.clock()))
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
        return WrittenStep(write_step(tx, claim, guard_result, write), guard_result.pause_requested)
    parameters = guard_params(claim, lease=lease, resets_crash_count=write.resets_crash_count) | encode_write(write)
    which = _guard_and_insert if write.replaces is None else _guard_and_update
    found = tx.run(which, **parameters, replaces=write.replaces).first()
    if found is None:
        raise Superseded(str(claim.ref))
    return WrittenStep(to_written_row(write, found[1:]), found.pause_requested)


@statement
def _insert(s: Store) -> Any:
    pk, run_number, now = param("pk", sa.BigInteger), param("run", sa.Integer), param("now_us", sa.BigInteger)
    return sa.insert(s.tables.step).values(_insert_values(pk, run_number, now)).inline()


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
        .values(_update_values(param("now_us", sa.BigInteger)))
    )


def write_step(tx: Tx, claim: Claim, guard_result: GuardResult, write: StepWrite) -> StepRow:
    """Write one step row in a guarded transaction, with the times of the guard; raises Superseded.

    Returns the row as `load` reads it, except that ``created_at`` of an overwritten row is None.
    """
    now = to_us(guard_result.now)
    parameters = {"pk": claim.pk, "run": claim.ref.run_number, "now_us": now, **encode_write(write)}
    if write.replaces is None:
        tx.run(_insert, **parameters)
    elif tx.run(_update, **parameters, replaces=write.replaces).rowcount == 0:
        raise Superseded(str(claim.ref))
    columns = (column if column.is_updated or write.is_new else None for column in TIME_COLUMNS)
    return to_written_row(write, [None if column is None else _time(column, now, parameters) for column in columns])


@statement
def _select_commit(s: Store) -> Any:
    st = s.tables.step
    return sa.select(*columns_of(st)).where(
        st.c.instance_pk == param("pk"),
        st.c.run_number == param("run"),
        st.c.step_key == param("key"),
        st.c.commit_id == param("commit_id"),
    )


def find_commit(tx: Tx, claim: Claim, *, key: str, commit_id: str) -> StepRow | None:
    """Return the step row of a boundary whose commit was in doubt, or None if it was rolled back.

    Call `claims.is_held` first: it waits until the database has decided the commit.
    """
    row = tx.run(_select_commit, pk=claim.pk, run=claim.ref.run_number, key=key, commit_id=commit_id).first()
    return None if row is None else to_step_row(row)
