"""Runs: start a run, empty or with copies of the rows of another run.

The instance whose rows are copied is locked, so a copy shows one moment of it (LAW 2b). Copies are verbatim, including
times and commit ids. An event is copied as consumed only if its wait is copied too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import sqlalchemy as sa

from celery_durable.ancestry import Ancestry, RunFailure
from celery_durable.errors import Cancelled
from celery_durable.model import (
    CANCELLED,
    PRIVATE_TYPE_PATTERN,
    InstanceRow,
    ItemStatus,
    Origin,
    RunPlan,
    StepRow,
    StepStatus,
    StepType,
    from_us,
    parse_child_event_type,
    parse_children_event_type,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.schema.step_format import STEP_COLUMNS, STEPS

_CHUNK = 500


class StepChild(NamedTuple):
    """A child of a step; of a map, that of the item at this position."""

    step: StepRow
    instance: InstanceRow
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a run starts with: copies of the steps ``keys`` of another run, and that run's events.

    The versions of a fork start above ``source_version``, so new events come after the copied ones. ``retried`` are
    steps to run again; a map among them keeps its finished items. For a linear run, ``reopened`` and ``planned`` are
    rows to insert besides the copies. The reopened step is the failed one: it continues as last called and keeps the
    event that it consumed. A planned step starts anew.
    """

    pk: int
    origin: Origin
    keys: tuple[str, ...]
    ancestry: Ancestry
    source_version: int
    retried: tuple[str, ...] = ()
    plan: RunPlan = field(default_factory=RunPlan)
    cancel_requested_us: int | None = None
    """When the run that it continues was asked to stop, if a step call that it keeps has raised that."""
    reopened: tuple[StepRow, ...] = ()
    planned: tuple[StepRow, ...] = ()
    awaited: tuple[StepChild, ...] = ()
    """The children of that run for which steps wait again, each with the waiting step and its own locked row."""


# --- cancel ---------------------------------------------------------------------------------------


@statement
def _select_cancel_requested(s: Store) -> Any:
    r = s.tables.run.c
    is_it = (r.instance_pk == param("pk", sa.BigInteger), r.run_number == param("run", sa.Integer))
    return sa.select(r.reason).where(*is_it, r.cancel_requested_at.is_not(None))


def find_cancellation(tx: Tx, pk: int, run_number: int) -> Cancelled | None:
    """Return what a step call of a run that was asked to stop raises; None if nobody asked."""
    found = tx.run(_select_cancel_requested, pk=pk, run=run_number).first()
    return None if found is None else Cancelled(found.reason)


def is_cancel_requested(tx: Tx, pk: int, run_number: int) -> bool:
    """Return whether somebody asked a run to stop."""
    return find_cancellation(tx, pk, run_number) is not None


def find_raised_cancellation(tx: Tx, pk: int, run_number: int) -> Cancelled | None:
    """Return what a step call of a run has raised because the run was cancelled; None if none has."""
    st = tx.t.step.c
    is_it = (st.status == StepStatus.CANCELLED.value, st.error_name == CANCELLED)
    query = sa.select(st.error_message).where(st.instance_pk == pk, st.run_number == run_number, *is_it).limit(1)
    found = tx.execute(query).first()
    return None if found is None else Cancelled(found.error_message or None)


def has_steps(tx: Tx, row: InstanceRow) -> bool:
    """Return whether the current run of an instance has recorded a step, or begins with some."""
    st = tx.t.step.c
    query = sa.select(st.seq).where(st.instance_pk == row.pk, st.run_number == row.run_number).limit(1)
    return tx.execute(query).first() is not None


# --- start ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a new run starts with: its parameters, and the steps of its plan or the rows of a continuation."""

    params: str
    commit_id: str
    plan: RunPlan
    reason: str | None = None
    continuation: Continuation | None = None

    def encode(self, number: int) -> dict[str, Any]:
        origin = None if self.continuation is None else self.continuation.origin
        return {
            "run": number,
            "params": self.params,
            "reason": self.reason,
            "version": self.plan.version,
            "commit_id": self.commit_id,
            "origin_id": None if origin is None else origin.instance_id,
            "origin_run": None if origin is None else origin.run_number,
            "origin_step": None if origin is None else origin.step_key,
            "ancestry": None if self.continuation is None else self.continuation.ancestry.text,
        }


def run_values(s: Store) -> dict[str, Any]:
    """Return the values of a new run but for its instance, from the parameters of `RunStart.encode`."""
    return {
        "run_number": param("run", sa.Integer),
        "params": param("params", sa.Text),
        "reason": param("reason", sa.Text),
        "definition_version": param("version", sa.Integer),
        "forked_from_instance_id": param("origin_id", sa.String),
        "forked_from_run_number": param("origin_run", sa.Integer),
        "forked_from_step_key": param("origin_step", sa.String),
        "ancestry": param("ancestry", sa.Text),
        "created_at": s.clock(),
        "commit_id": param("commit_id", sa.String),
        "log_count": sa.literal_column("0"),
        "dropped_log_count": sa.literal_column("0"),
    }


@statement
def _insert_run(s: Store) -> Any:
    return sa.insert(s.tables.run).values({"instance_pk": param("pk"), **run_values(s)}).inline()


@statement
def _insert_step(s: Store) -> Any:
    is_ready = param("status", sa.String) == constant(StepStatus.READY)
    values: dict[str, Any] = {"instance_pk": param("pk"), "run_number": param("run")}
    values |= {column.name: param(column.name, column.parameter_type) for column in STEP_COLUMNS}
    values |= {"next_retry_at": sa.case((is_ready, s.clock())), "created_at": s.clock()}
    return sa.insert(s.tables.step).values(values).inline()


def insert(tx: Tx, pk: int, number: int, start: RunStart) -> None:
    """Insert a run of an instance that is locked or new, with the rows that it starts with."""
    tx.run(_insert_run, pk=pk, **start.encode(number))
    insert_rows(tx, pk, number, start)


def insert_rows(tx: Tx, pk: int, number: int, start: RunStart) -> None:
    """Insert the rows that a new run starts with; most runs start with none."""
    _insert_rows(tx, start.plan.step_rows(), pk=pk, run_number=number, commit_id=start.commit_id)
    if start.continuation is not None:
        _copy_rows(tx, start.continuation, pk=pk, run_number=number, commit_id=start.commit_id)


def insert_planned_steps(tx: Tx, pks: Sequence[int], start: RunStart) -> None:
    """Insert the steps with which the first runs of these new instances start; most start with none."""
    steps = [STEPS.encode_row(step) | {"run": 1, "commit_id": start.commit_id} for step in start.plan.step_rows()]
    tx.run_many(_insert_step, [{"pk": pk, **step} for pk in pks for step in steps])


def _insert_rows(tx: Tx, steps: Sequence[StepRow], *, pk: int, run_number: int, commit_id: str) -> None:
    key = {"pk": pk, "run": run_number}
    rows = [key | STEPS.encode_row(step) | {"commit_id": commit_id} for step in steps]
    if rows:
        tx.run_many(_insert_step, rows)


def _copy_rows(tx: Tx, continuation: Continuation, *, pk: int, run_number: int, commit_id: str) -> None:
    """Copy a continuation's steps and events. An event stays consumed if its step exists: others are inserted later."""
    if continuation.cancel_requested_us is not None:
        r = tx.t.run
        mine = (r.c.instance_pk == pk, r.c.run_number == run_number)
        tx.execute(sa.update(r).where(*mine).values(cancel_requested_at=continuation.cancel_requested_us))
    copy_steps(tx, continuation, continuation.keys, pk=pk, run_number=run_number)
    _insert_rows(tx, continuation.reopened, pk=pk, run_number=run_number, commit_id=commit_id)
    is_done = tx.t.item.c.status == ItemStatus.DONE.value
    _copy(tx, tx.t.item, continuation, continuation.retried, is_done, pk=pk, run_number=run_number)
    e, st = tx.t.event, tx.t.step.c
    is_kept = sa.exists().where(
        st.instance_pk == pk, st.run_number == run_number, st.step_key == e.c.consumed_by_step_key
    )
    values: dict[str, Any] = {column.name: column for column in e.c}
    values |= {"instance_pk": sa.literal(pk, sa.BigInteger), "run_number": sa.literal(run_number, sa.Integer)}
    for name in ("delivered_at", "consumed_by_step_key"):
        values[name] = sa.case((is_kept, e.c[name]))
    # An emission or an answer to a wait of the old run does not apply to a wait of the new one.
    source = sa.select(*values.values()).where(
        *_source_conditions(e, continuation),
        sa.or_(is_kept, sa.and_(e.c.type.not_like(PRIVATE_TYPE_PATTERN), e.c.actor.is_(None))),
    )
    tx.execute(sa.insert(e).from_select(list(values), source))
    waiting = {each.step.step_key: each.step for each in continuation.awaited}
    new = [*continuation.planned, *waiting.values()]
    _insert_rows(tx, new, pk=pk, run_number=run_number, commit_id=commit_id)
    for step in waiting.values():
        if step.type is StepType.MAP:
            _copy_failed_items(tx, continuation, step, pk=pk, run_number=run_number)


def _copy_failed_items(tx: Tx, continuation: Continuation, step: StepRow, *, pk: int, run_number: int) -> None:
    """Copy the failed items of a map that waits again: as sent if it waits for their child, else to be sent again."""
    item, key = tx.t.item, step.step_key
    where: dict[str, Any] = {"pk": pk, "run_number": run_number}
    positions = [each.position for each in continuation.awaited if each.step.step_key == key]
    sent = {
        "status": ItemStatus.SENT.value,
        "due_at": None if step.wake_at is None else to_us(step.wake_at),
        "answer": None,
    }
    for start in range(0, len(positions), _CHUNK):
        is_awaited = item.c.position.in_(positions[start : start + _CHUNK])
        _copy(tx, item, continuation, [key], is_awaited, **where, changed=sent)
    copied = item.alias("copied").c
    mine = (copied.instance_pk == pk, copied.run_number == run_number, copied.step_key == key)
    is_copied = sa.exists().where(*mine, copied.position == item.c.position)
    pending = {"status": ItemStatus.PENDING.value, "attempts": 0, "due_at": None, "attempt_token": None, "answer": None}
    _copy(tx, item, continuation, [key], ~is_copied, **where, changed=pending)


def copy_steps(tx: Tx, continuation: Continuation, keys: Sequence[str], *, pk: int, run_number: int) -> None:
    """Copy some steps of a continuation's run into another run; maps with their items."""
    for table in (tx.t.step, tx.t.item):
        _copy(tx, table, continuation, keys, pk=pk, run_number=run_number)


def _copy(
    tx: Tx,
    table: sa.Table,
    continuation: Continuation,
    keys: Sequence[str],
    *where: sa.ColumnElement[bool],
    pk: int,
    run_number: int,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    values: dict[str, Any] = {column.name: column for column in table.c}
    given = {"instance_pk": pk, "run_number": run_number, **changed}
    values |= {name: sa.literal(value, table.c[name].type) for name, value in given.items()}
    for start in range(0, len(keys), _CHUNK):
        mine = table.c.step_key.in_(keys[start : start + _CHUNK])
        source = sa.select(*values.values()).where(*_source_conditions(table, continuation), mine, *where)
        tx.execute(sa.insert(table).from_select(list(values), source))


def _source_conditions(table: sa.Table, continuation: Continuation) -> list[Any]:
    return [table.c.instance_pk == continuation.pk, table.c.run_number == continuation.origin.run_number]


# --- find and read ------------------------------------------------------------------------------


@statement
def _select_creator(s: Store) -> Any:
    """Find which transaction created an instance. It is recorded in the first run, which no restart changes."""
    i, r = s.tables.instance.c, s.tables.run.c
    return sa.select(r.commit_id).where(
        i.workflow == param("workflow"),
        i.instance_id == param("instance"),
        r.instance_pk == i.id,
        r.run_number == 1,
    )


def find_creator(tx: Tx, workflow: str, instance_id: str) -> str | None:
    """Return the commit id of the transaction that created an instance, or None if there is no such instance."""
    found: str | None = tx.run(_select_creator, workflow=workflow, instance=instance_id).scalar()
    return found


def find_by_commit(tx: Tx, row: InstanceRow, *, commit_id: str) -> int | None:
    """Return the number of the run that the transaction with this id started, or None."""
    r = tx.t.run.c
    query = sa.select(r.run_number).where(r.instance_pk == row.pk, r.commit_id == commit_id)
    return tx.execute(query).scalar()


@dataclass(frozen=True, slots=True)
class SourceRun:
    params: str
    ancestry: Ancestry
    failure: RunFailure | None
    definition_version: int | None
    """The version of a linear run's step list."""
    cancel_requested_us: int | None
    steps: tuple[StepRow, ...]
    """In call order, without results."""

    def find_failed_child_steps(self) -> list[StepRow]:
        """Return the child steps, and the maps over workflows, whose failure ended the run."""
        keys = () if self.failure is None else self.failure.keys
        failed = [(step, step.wait_event_type) for step in self.steps if step.step_key in keys]
        return [step for step, type_ in failed if parse_child_event_type(type_) or parse_children_event_type(type_)]


def read_source(tx: Tx, row: InstanceRow) -> SourceRun:
    """Return the current run of a locked instance, with what a continuation needs."""
    r, st = tx.t.run.c, tx.t.step.c
    run = tx.execute(
        sa.select(
            r.params, r.ancestry, r.failed_steps, r.definition_version, r.created_at, r.cancel_requested_at
        ).where(r.instance_pk == row.pk, r.run_number == row.run_number)
    ).one()
    steps = sa.select(*STEPS.select(tx.t.step, with_results=False)).where(
        st.instance_pk == row.pk, st.run_number == row.run_number
    )
    return SourceRun(
        params=run.params,
        ancestry=Ancestry.parse(run.ancestry, ref=row.ref, created_at=from_us(run.created_at)),
        failure=RunFailure.parse(run.failed_steps),
        definition_version=run.definition_version,
        cancel_requested_us=run.cancel_requested_at,
        steps=tuple(STEPS.read(each) for each in tx.execute(steps.order_by(st.seq, st.step_key))),
    )
