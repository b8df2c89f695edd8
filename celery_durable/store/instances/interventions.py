"""Manual changes: complete a step by hand, and record who changed a step or ended a run, and why.

The transaction locks the instance. Completing a step also releases its claim, so a worker that still runs it records
nothing more.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    AuditRecord,
    ErrorInfo,
    InstanceRow,
    StepBefore,
    StepRow,
    StepStatus,
    StoredEvent,
    from_us,
    iso,
    to_us,
)
from celery_durable.store.engine import Tx
from celery_durable.store.runs import holds


def complete_step(
    tx: Tx, row: InstanceRow, step: StepRow, *, event: StoredEvent | None, result: str | None, commit_id: str
) -> None:
    """Complete a step of a locked instance's run with a given result; a wait with an event."""
    st, now = tx.t.step, tx.store.clock()
    values: dict[str, Any] = {"result": result}
    if event is not None:
        # An event must be in time for its wait, so a passed deadline is moved.
        until = event.created_at if step.wake_at is None else max(step.wake_at, event.created_at)
        values = {"result": event.result_json, "wake_at": to_us(until)}
    updated = tx.execute(
        sa.update(st)
        .where(st.c.instance_pk == row.pk, st.c.run_number == row.run_number, st.c.step_key == step.step_key)
        .values(
            status=StepStatus.COMPLETED.value,
            next_retry_at=None,
            error_name=None,
            error_message=None,
            commit_id=commit_id,
            finished_at=now,
            **values,
        )
    )
    assert updated.rowcount == 1  # the row was read under the lock
    holds.release(tx, row.pk, row.run_number, step.step_key)
    if event is not None:
        e = tx.t.event
        tx.execute(
            sa.update(e)
            .where(e.c.instance_pk == row.pk, e.c.run_number == row.run_number, e.c.seq == event.seq)
            .values(delivered_at=now, consumed_by_step_key=step.step_key)
        )


def complete_linear_step(tx: Tx, row: InstanceRow, step: StepRow, *, result: str, commit_id: str) -> None:
    """Complete a step of a locked linear run, and make the next step, if there is one, ready."""
    st, now = tx.t.step, tx.store.clock()
    done = {"status": StepStatus.DONE.value, "result": result, "next_retry_at": None, "finished_at": now}
    done |= {"wake_at": None, "wait_event_type": None, "error_name": None, "error_message": None}
    ready = {"status": StepStatus.READY.value, "next_retry_at": now}
    for seq, was, values in (
        (step.seq, step.status, done),
        (step.seq + 1, StepStatus.LINEAR_PENDING, ready),
    ):
        tx.execute(
            sa.update(st)
            .where(st.c.instance_pk == row.pk, st.c.run_number == row.run_number)
            .where(st.c.seq == seq, st.c.status == was.value)
            .values(commit_id=commit_id, **values)
        )


def subtract_started_attempts(tx: Tx, row: InstanceRow, *, excluding: str) -> None:
    """Subtract the started attempts of the other steps: these have not failed, their worker only lost its claim."""
    st = tx.t.step
    of_run = (st.c.instance_pk == row.pk, st.c.run_number == row.run_number)
    tx.execute(
        sa.update(st)
        .where(*of_run, st.c.step_key != excluding, st.c.status == StepStatus.PENDING.value, st.c.attempts > 0)
        .values(attempts=st.c.attempts - 1)
    )


# --- audit --------------------------------------------------------------------------------------


def insert_audit_record(
    tx: Tx, row: InstanceRow, step: StepRow | None, *, action: str, actor: str, reason: str | None, commit_id: str
) -> None:
    """Record what is done to a step, and what the step was before, or what is done to the whole run."""
    before = step and {
        "status": step.status.value,
        "type": step.type.value,
        "attempts": step.attempts,
        "nextRetryAt": None if step.next_retry_at is None else iso(step.next_retry_at),
        "wakeAt": None if step.wake_at is None else iso(step.wake_at),
        "error": None if step.error_name is None else {"name": step.error_name, "message": step.error_message},
    }
    tx.execute(
        sa.insert(tx.t.audit).values(
            instance_pk=row.pk,
            run_number=row.run_number,
            step_key="" if step is None else step.step_key,
            action=action,
            actor=actor,
            reason=reason,
            step_before=json.dumps(before, ensure_ascii=False),
            commit_id=commit_id,
            created_at=tx.store.clock(),
        )
    )


def find_by_commit(tx: Tx, row: InstanceRow, *, commit_id: str) -> int | None:
    """Return the run that the transaction with this id changed, or None if it was not applied."""
    a = tx.t.audit.c
    query = sa.select(a.run_number).where(a.instance_pk == row.pk, a.commit_id == commit_id)
    return tx.execute(query).scalar()


def read_audit(tx: Tx, pk: int, run_number: int) -> tuple[AuditRecord, ...]:
    """Return what people did to a run and to its steps, in order."""
    a = tx.t.audit
    query = sa.select(a).where(a.c.instance_pk == pk, a.c.run_number == run_number).order_by(a.c.id)
    return tuple(_to_audit_record(each) for each in tx.execute(query))


def _to_audit_record(row: Any) -> AuditRecord:
    return AuditRecord(
        run_number=row.run_number,
        step_key=row.step_key or None,
        action=row.action,
        by=row.actor,
        reason=row.reason,
        before=_read_before(json.loads(row.step_before)),
        created_at=from_us(row.created_at),
    )


def _read_before(before: dict[str, Any] | None) -> StepBefore | None:
    if before is None:
        return None
    error = before["error"]
    return StepBefore(
        status=StepStatus(before["status"]),
        attempts=before["attempts"],
        error=None if error is None else ErrorInfo(error["name"], error["message"]),
    )
