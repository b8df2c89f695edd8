"""The row of a step under the guard, in one statement, which also suspends a run that only sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from celery_durable.errors import Superseded
from celery_durable.model import (
    Claim,
    LogLine,
    Status,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
    WakeReason,
    from_us,
    to_us,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import Statement, param, statement_for
from celery_durable.store.runs import outputs, step_rows
from celery_durable.store.runs.claims import RELEASED, RESUMING, guard_params, guard_update, lock_held
from celery_durable.store.schema.step_format import STEP_COLUMNS, STEPS


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """A step row as written, with the times of the database, and whether a pause is requested."""

    row: StepRow
    pause_requested: bool


@statement_for
def _guard_and_insert(s: Store, fields: Sequence[str], log_lines: int) -> Any:
    return _insert_under(s, _hold(s), fields, log_lines)


@statement_for
def _lock_and_insert(s: Store, fields: Sequence[str], log_lines: int) -> Any:
    return _insert_under(s, hold_without_change(s), fields, log_lines)


def _insert_under(s: Store, held: sa.CTE, fields: Sequence[str], log_lines: int) -> Any:
    values = step_rows.insert_values(STEP_COLUMNS, fields, held.c.id, held.c.run_number, held.c.now_us)
    source = sa.select(*values.values()).select_from(held)
    written = sa.insert(s.tables.step).from_select(list(values), source).cte("written")
    return sa.select(held.c.pause_requested, held.c.now_us).add_cte(
        written, *outputs.insert_with(s, held, held, log_lines)
    )


@statement_for
def _guard_and_update(s: Store, fields: Sequence[str], log_lines: int) -> Any:
    st, held = s.tables.step, _hold(s)
    written = (
        sa.update(st)
        .where(st.c.instance_pk == held.c.id, st.c.run_number == held.c.run_number, *step_rows.unchanged_since_read(st))
        .values(step_rows.update_values(STEP_COLUMNS, fields, held.c.now_us))
        .returning(st.c.step_key)
        .cte("written")
    )
    both = held.join(written, sa.true())
    found = sa.select(held.c.pause_requested, held.c.now_us).select_from(both)
    return found.add_cte(*outputs.insert_with(s, held, both, log_lines))


def _hold(s: Store) -> Any:
    i = s.tables.instance.c
    return guard_update(s).returning(i.id, i.run_number, i.pause_requested, s.clock().label("now_us")).cte("held")


def hold_without_change(s: Store, *conditions: Any) -> Any:
    """Build the CTE of a guard that locks the row and writes nothing to it, with the time after the wait (LAW 4)."""
    i = s.tables.instance.c
    locked = lock_held(s, i.id, i.run_number, i.pause_requested).where(*conditions).cte("locked")
    # Not in the SELECT that locks: it computes its columns before it waits for the lock (LAW 4).
    return sa.select(locked, s.clock().label("now_us")).cte("held")


def guard_and_write_step(
    tx: Tx,
    claim: Claim,
    write: StepWrite,
    *,
    lease: timedelta,
    log_lines: Sequence[LogLine] = (),
    changes_instance: bool = True,
) -> WrittenStep:
    """Take the guard and write one step row, and perhaps log lines, in one statement (PostgreSQL).

    At most `outputs.MAX_WITH_STEP` lines; all are kept. Raises Superseded if the claim is lost, or if the row to
    overwrite has changed. ``changes_instance``: False if `guard_without_change` suffices.
    """
    is_new = write.replaces is None
    # An open wait has to increment the version: `run_events` relies on it.
    assert changes_instance or (is_new and write.status is StepStatus.COMPLETED)
    parameters = STEPS.encode_write(write)
    fields = tuple(parameters)
    if changes_instance:
        choose = _guard_and_insert if is_new else _guard_and_update
        held = guard_params(claim, lease=lease, resets_crash_count=write.resets_crash_count)
    else:
        choose, held = _lock_and_insert, {"pk": claim.pk, "token": claim.token}
    logged = outputs.encode_lines(log_lines) if log_lines else {}
    try:
        found = tx.run(choose(fields, len(log_lines)), **parameters, **held, **logged, replaces=write.replaces)
    except IntegrityError as error:  # another worker has inserted the row
        raise Superseded(str(error.orig)) from error
    if not found:
        raise Superseded(str(claim.ref))
    [(pause_requested, now_us)] = found
    return WrittenStep(STEPS.to_written_row(write, fields, from_us(now_us)), pause_requested)


@statement_for
def _insert_if_unpaused(s: Store, fields: Sequence[str]) -> Any:
    """Build the statement that locks the instance and inserts a row, if the claim holds and no pause is requested.

    The limit makes MariaDB store the locked row. Otherwise it would read the clock anew for each column.
    """
    i, st = s.tables.instance.c, s.tables.step
    locked = lock_held(s, i.id, i.run_number, s.clock().label("now_us"))
    held = locked.where(i.pause_requested == sa.false()).limit(1).subquery("held")
    values = step_rows.insert_values(STEP_COLUMNS, fields, held.c.id, held.c.run_number, held.c.now_us)
    source = sa.select(*values.values()).select_from(held)
    return sa.insert(st).from_select(list(values), source).returning(st.c.created_at)


def lock_and_insert_unpaused(tx: Tx, claim: Claim, write: StepWrite) -> StepRow | None:
    """Guard and insert a new row in one statement. Returns None if the claim is lost or a pause is requested."""
    parameters = STEPS.encode_write(write)
    fields = tuple(parameters)
    found = tx.run(_insert_if_unpaused(fields), pk=claim.pk, token=claim.token, **parameters).first()
    return None if found is None else STEPS.to_written_row(write, fields, from_us(found.created_at))


# A sleep ends at its time alone, so nothing but the locked row decides about its suspension (LAW 2b). A wait for an
# event has to be suspended by `releases.suspend`: whether an event is there must be read after the lock.


@statement_for
def _suspend_and_insert(s: Store, fields: Sequence[str]) -> Any:
    i, r = s.tables.instance, s.tables.run
    held = hold_without_change(s, i.c.pause_requested == sa.false())
    values = step_rows.insert_values(STEP_COLUMNS, fields, held.c.id, held.c.run_number, held.c.now_us)
    written = sa.insert(s.tables.step).from_select(list(values), sa.select(*values.values()).select_from(held))
    until = values["wake_at"]
    released = (
        sa.update(i)
        .where(i.c.id == held.c.id)
        .values(
            **RELEASED,
            status=Status.WAITING.value,
            run_at=until,
            next_check_at=until,
            sent_at=None,
            wake_reason=WakeReason.TIMER.value,
            priority=RESUMING,
            dispatch_count=0,
            crash_count=0,
            version=i.c.version + 1,
            updated_at=held.c.now_us,
        )
    )
    started = (
        sa.update(r)
        .where(r.c.instance_pk == held.c.id, r.c.run_number == held.c.run_number, r.c.started_at.is_(None))
        .values(started_at=param("started_us", sa.BigInteger))
    )
    changes = written.cte("written"), released.cte("released"), started.cte("started")
    return sa.select(held.c.now_us).add_cte(*changes)


def suspend_for_sleep(tx: Tx, claim: Claim, write: StepWrite) -> StepRow | None:
    """Write the row of a new sleep and release the instance until its end; raises Superseded.

    Returns None, and writes nothing, if the claim is lost or a pause is requested.
    """
    assert write.replaces is None
    parameters = STEPS.encode_write(write)
    fields = tuple(parameters)
    key = {"pk": claim.pk, "token": claim.token, "started_us": to_us(claim.claimed_at)}
    try:
        now_us = tx.run(_suspend_and_insert(fields), **key, **parameters).scalar()
    except IntegrityError as error:  # another worker has inserted the row
        raise Superseded(str(error.orig)) from error
    return None if now_us is None else STEPS.to_written_row(write, fields, from_us(now_us))


def choose_hot_statements() -> list[Statement]:
    """Return the statements that record a step whose function has returned."""
    write = StepWrite(
        "", 1, "", StepType.DO, StepStatus.COMPLETED, replaces=None, commit_id="", attempts=1, max_attempts=1,
        timeout=timedelta(1), result="", ran_for=timedelta(1),
    )  # fmt: skip
    fields = tuple(STEPS.encode_write(write))
    return [choose(fields, 0) for choose in (_lock_and_insert, _guard_and_insert)]
