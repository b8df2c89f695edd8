"""The steps of a run: load them, and write the row of a step under the guard.

A step boundary is one commit: first the step's own writes, then the guard, then these rows (LAW 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_durable.ancestry import Ancestry
from celery_durable.errors import Cancelled, Superseded
from celery_durable.model import (
    Claim,
    InstanceRow,
    NewRun,
    RunRef,
    StepRow,
    StepWrite,
    WorkflowKind,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement, statement_for
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.schema.step_format import STEP_COLUMNS, STEPS, Source, StepColumn, Written

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
    cancellation: Cancelled | None = None
    """What the next unfinished step call raises: somebody has asked the run to stop."""

    @classmethod
    def of_new_run(cls, ref: RunRef, new_run: NewRun) -> RunState:
        """The state of a run that no pass has started, as `load` would return it."""
        created_at = new_run.created_at
        ancestry = Ancestry.parse(None, ref=ref, created_at=created_at)
        return cls(new_run.params, created_at, None, 0, ancestry, ())

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
            sa.case((is_first, r.c.ancestry)).label("ancestry"), r.c.cancel_requested_at,
            sa.case((is_first, r.c.reason)).label("reason"),
            *STEPS.select(st),
        )
        .select_from(joined)
        .where(r.c.instance_pk == param("pk"), r.c.run_number == param("run"))
        .order_by(*order)
    )  # fmt: skip


HOT_STATEMENTS = (_select_run_and_steps,)


def load(tx: Tx, claim: Claim) -> RunState:
    """Read the run's parameters, and its steps in call order; raises Superseded if the instance was deleted."""
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
        cancellation=None if first.cancel_requested_at is None else Cancelled(first.reason),
        steps=tuple(STEPS.read(row[-len(STEP_COLUMNS) :]) for row in rows if row.step_key is not None),
    )


# --- step rows ----------------------------------------------------------------------------------


def insert_values(
    columns: Sequence[StepColumn],
    fields: Sequence[str],
    pk: Any,
    run_number: Any,
    now: Any,
    *,
    get_value: Callable[[str, Any], Any] = param,
) -> dict[str, Any]:
    """Build the values of a new row at the time ``now``, from the parameters of `StepFormat.encode_write`.

    ``fields``: the names of these parameters. The columns that are NULL without them are left out. ``get_value``
    returns the expression of one: it takes the name and the type.
    """
    values = {column.name: _expression(column, fields, now, get_value) for column in columns}
    given = {name: value for name, value in values.items() if value is not None}
    return {"instance_pk": pk, "run_number": run_number} | given


def update_values(columns: Sequence[StepColumn], fields: Sequence[str], now: Any) -> dict[str, Any]:
    """Build the values for a row that is overwritten. The other columns keep the value of the first commit."""
    return {column.name: _expression(column, fields, now, param) for column in columns if column.is_updated}


def _expression(column: StepColumn, fields: Sequence[str], now: Any, get_value: Callable[[str, Any], Any]) -> Any:
    """Return the expression of a column: that of its first source in ``fields``, or None for NULL."""
    if not column.sources:
        return now
    source = next((each for each in column.sources if each.field in fields), None)
    return None if source is None else _source_expression(column, source, now, get_value)


def _source_expression(column: StepColumn, source: Source, now: Any, get_value: Callable[[str, Any], Any]) -> Any:
    match source.written:
        case Written.VALUE:
            return get_value(source.field, column.parameter_type)
        case Written.AFTER:
            return now + get_value(source.field, sa.BigInteger)
        case Written.BEFORE:
            return now - get_value(source.field, sa.BigInteger)
        case Written.IF:
            return now


def unchanged_since_read(st: sa.Table) -> list[Any]:
    """Conditions for the row as the claim last read it: a statement of a broken connection may arrive late."""
    return [st.c.step_key == param("key", sa.String), st.c.commit_id == param("replaces", sa.String)]


@statement_for
def _insert(s: Store, fields: Sequence[str]) -> Any:
    pk, run_number, now = param("pk", sa.BigInteger), param("run", sa.Integer), param("now_us", sa.BigInteger)
    return sa.insert(s.tables.step).values(insert_values(STEP_COLUMNS, fields, pk, run_number, now)).inline()


@statement_for
def _update(s: Store, fields: Sequence[str]) -> Any:
    st = s.tables.step
    return (
        sa.update(st)
        .where(
            st.c.instance_pk == param("pk", sa.BigInteger),
            st.c.run_number == param("run", sa.Integer),
            *unchanged_since_read(st),
        )
        .values(update_values(STEP_COLUMNS, fields, param("now_us", sa.BigInteger)))
    )


def write_step(tx: Tx, claim: Claim, guard_result: GuardResult, write: StepWrite) -> StepRow:
    """Write one step row in a guarded transaction, and return it; raises Superseded."""
    parameters = STEPS.encode_write(write)
    fields, key = tuple(parameters), {"pk": claim.pk, "run": claim.ref.run_number, "now_us": to_us(guard_result.now)}
    if write.replaces is None:
        tx.run(_insert(fields), **key, **parameters)
    elif tx.run(_update(fields), **key, **parameters, replaces=write.replaces).rowcount == 0:
        raise Superseded(str(claim.ref))
    return STEPS.to_written_row(write, fields, guard_result.now)


def insert_new(tx: Tx, fields: tuple[str, ...], rows: Sequence[tuple[Claim, int, dict[str, Any]]]) -> None:
    """Insert new rows under held guards. Of each: its claim, the guard's time in µs, the parameters ``fields``."""
    keys = [{"pk": claim.pk, "run": claim.ref.run_number, "now_us": now_us} for claim, now_us, _ in rows]
    tx.run_many(_insert(fields), [key | row[2] for key, row in zip(keys, rows, strict=True)])


def find_row(tx: Tx, row: InstanceRow, key: str) -> StepRow | None:
    """Return a step of the current run of an instance by its key, or of a linear run by its name."""
    st = tx.t.step
    has_key, has_name = st.c.step_key == key, st.c.name == key
    of_run = (st.c.instance_pk == row.pk, st.c.run_number == row.run_number)
    is_it = sa.or_(has_key, has_name) if row.kind is WorkflowKind.LINEAR else has_key
    query = sa.select(*STEPS.select(st)).where(*of_run, is_it)
    found = tx.execute(query.order_by(sa.case((has_key, 0), else_=1)).limit(1)).first()
    return None if found is None else STEPS.read(found)


def read_names(tx: Tx, row: InstanceRow) -> list[str]:
    """Return the keys of the steps of the current run, or the names of a linear run, in order."""
    st = tx.t.step.c
    mine = (st.instance_pk == row.pk, st.run_number == row.run_number)
    column = st.name if row.kind is WorkflowKind.LINEAR else st.step_key
    return list(tx.execute(sa.select(column).where(*mine).order_by(st.seq)).scalars())


@statement
def _select_commit(s: Store) -> Any:
    st = s.tables.step
    return (
        sa.select(*STEPS.select(st))
        .where(st.c.instance_pk == param("pk"), st.c.run_number == param("run"), st.c.commit_id == param("commit_id"))
        .order_by(st.c.seq, st.c.step_key)
    )


def find_commit(tx: Tx, claim: Claim, *, commit_id: str) -> list[StepRow]:
    """Return the step rows of a commit in doubt; none if it was rolled back. Call `claims.is_held` first: it waits."""
    rows = tx.run(_select_commit, pk=claim.pk, run=claim.ref.run_number, commit_id=commit_id)
    return [STEPS.read(row) for row in rows]
