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
    duration_us,
    from_us,
    to_us,
)
from celery_durable.store.claims import GuardResult, guard, guard_params, guard_update
from celery_durable.store.engine import Store, Tx, param, statement

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
            *(c for c in st.c if c.name not in ("instance_pk", "run_number")),
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
        steps=tuple(to_step_row(row) for row in rows if row.step_key is not None),
    )


def to_step_row(row: Any) -> StepRow:
    """Convert a row of the step table to a `StepRow`."""
    return StepRow(
        step_key=row.step_key,
        seq=row.seq,
        name=row.name,
        type=StepType(row.type),
        status=StepStatus(row.status),
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        timeout=None if row.timeout_ms is None else timedelta(milliseconds=row.timeout_ms),
        next_retry_at=from_us_or_none(row.next_retry_at),
        wake_at=from_us_or_none(row.wake_at),
        wait_event_type=row.wait_event_type,
        result=row.result,
        error_name=row.error_name,
        error_message=row.error_message,
        event_seq=row.event_seq,
        created_at=from_us_or_none(row.created_at),
        started_at=from_us_or_none(row.started_at),
        finished_at=from_us_or_none(row.finished_at),
        commit_id=row.commit_id,
    )


def from_us_or_none(us: int | None) -> datetime | None:
    """Convert stored microseconds to a datetime; None stays None."""
    return None if us is None else from_us(us)


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


def _step_values(now: Any) -> dict[str, Any]:
    """The columns of a step write, built from ``now`` and the parameters of `_parameters`.

    ``wake_at_us`` is an instant. The other parameters in microseconds are offsets from ``now``.
    """

    def after(name: str) -> Any:
        return now + param(name, sa.BigInteger)  # NULL if the parameter is NULL

    return {
        "status": param("status", sa.String),
        "attempts": param("attempts", sa.Integer),
        "max_attempts": param("max_attempts", sa.Integer),
        "timeout_ms": param("timeout_ms", sa.BigInteger),
        "next_retry_at": after("retry_in_us"),
        "wake_at": sa.func.coalesce(param("wake_at_us", sa.BigInteger), after("wake_in_us")),
        "wait_event_type": param("event_type", sa.String),
        "event_seq": param("event_seq", sa.BigInteger),
        "result": param("result", sa.Text),
        "error_name": param("error_name", sa.String),
        "error_message": param("error_message", sa.Text),
        "commit_id": param("commit_id", sa.String),
        "started_at": after("started_offset_us"),
        "finished_at": after("finished_offset_us"),
    }


def _key_values(pk: Any, run_number: Any, now: Any) -> dict[str, Any]:
    return {
        "instance_pk": pk,
        "run_number": run_number,
        "step_key": param("key", sa.String),
        "seq": param("seq", sa.Integer),
        "name": param("name", sa.String),
        "type": param("type", sa.String),
        "created_at": now,
    }


def _parameters(write: StepWrite) -> dict[str, Any]:
    return {
        "key": write.key,
        "status": write.status.value,
        "attempts": write.attempts,
        "max_attempts": write.max_attempts,
        "timeout_ms": None if write.timeout is None else write.timeout // timedelta(milliseconds=1),
        "retry_in_us": None if write.retry_in is None else duration_us(write.retry_in),
        "wake_at_us": None if write.wake_at is None else to_us(write.wake_at),
        "wake_in_us": None if write.wake_in is None else duration_us(write.wake_in),
        "event_type": write.event_type,
        "event_seq": write.event_seq,
        "result": write.result,
        "error_name": write.error_name,
        "error_message": write.error_message,
        "commit_id": write.commit_id,
        "started_offset_us": None if write.ran_for is None else -duration_us(write.ran_for),
        "finished_offset_us": 0 if write.is_finished else None,
    }


def _insert_parameters(write: StepWrite) -> dict[str, Any]:
    return {"seq": write.seq, "name": write.name, "type": write.type.value}


def _time_columns(st: sa.Table) -> list[Any]:
    return [st.c.next_retry_at, st.c.wake_at, st.c.created_at, st.c.started_at, st.c.finished_at]


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
    values = _key_values(held.c.id, held.c.run_number, s.clock()) | _step_values(s.clock())
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
        .values(_step_values(s.clock()))
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
    parameters = guard_params(claim, lease=lease, resets_crash_count=write.resets_crash_count) | _parameters(write)
    if write.is_new:
        found = tx.run(_guard_and_insert, **parameters, **_insert_parameters(write)).first()
    else:
        found = tx.run(_guard_and_update, **parameters, replaces=write.replaces).first()
    if found is None:
        raise Superseded(str(claim.ref))
    return WrittenStep(_as_row(write, found), found.pause_requested)


@statement
def _insert(s: Store) -> Any:
    now = param("now_us", sa.BigInteger)
    identity = _key_values(param("pk", sa.BigInteger), param("run", sa.Integer), now)
    return sa.insert(s.tables.step).values(identity | _step_values(now)).inline()


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
        .values(_step_values(param("now_us", sa.BigInteger)))
    )


@dataclass(frozen=True, slots=True)
class _Times:
    next_retry_at: int | None
    wake_at: int | None
    created_at: int | None
    started_at: int | None
    finished_at: int | None


def write_step(tx: Tx, claim: Claim, guard_result: GuardResult, write: StepWrite) -> StepRow:
    """Write one step row in a guarded transaction, with the times of the guard; raises Superseded.

    Returns the row as `load` reads it, except that ``created_at`` of an overwritten row is None.
    """
    now = to_us(guard_result.now)
    parameters = {"pk": claim.pk, "run": claim.ref.run_number, "now_us": now, **_parameters(write)}
    if write.is_new:
        tx.run(_insert, **parameters, **_insert_parameters(write))
    elif tx.run(_update, **parameters, replaces=write.replaces).rowcount == 0:
        raise Superseded(str(claim.ref))

    def after(us: int | None) -> int | None:
        return None if us is None else now + us

    times = _Times(
        next_retry_at=after(parameters["retry_in_us"]),
        wake_at=parameters["wake_at_us"] if parameters["wake_at_us"] is not None else after(parameters["wake_in_us"]),
        created_at=now if write.is_new else None,
        started_at=after(parameters["started_offset_us"]),
        finished_at=after(parameters["finished_offset_us"]),
    )
    return _as_row(write, times)


def _as_row(write: StepWrite, times: Any) -> StepRow:
    return StepRow(
        step_key=write.key,
        seq=write.seq,
        name=write.name,
        type=write.type,
        status=write.status,
        attempts=write.attempts,
        max_attempts=write.max_attempts,
        timeout=write.timeout,
        next_retry_at=from_us_or_none(times.next_retry_at),
        wake_at=from_us_or_none(times.wake_at),
        wait_event_type=write.event_type,
        result=write.result,
        error_name=write.error_name,
        error_message=write.error_message,
        event_seq=write.event_seq,
        created_at=from_us_or_none(times.created_at),
        started_at=from_us_or_none(times.started_at),
        finished_at=from_us_or_none(times.finished_at),
        commit_id=write.commit_id,
    )


@statement
def _select_commit(s: Store) -> Any:
    st = s.tables.step
    return sa.select(st).where(
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
