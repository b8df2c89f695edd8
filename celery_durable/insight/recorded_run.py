"""Recorded runs for the replay check: read from the store, from a `History`, or from the output of `export`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from celery_durable import ancestry
from celery_durable.ancestry import Ancestry
from celery_durable.errors import RunNotFound, ValueRefused
from celery_durable.model import (
    SHOWN_AS_STORED,
    Claim,
    History,
    RunRef,
    Status,
    StepRecord,
    StepRow,
    StepStatus,
    child_event_type,
    from_us,
    task_event_type,
    topic_event_type,
)
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances
from celery_durable.store.runs import history, step_rows
from celery_durable.store.runs.open_runs import OpenRun
from celery_durable.store.runs.step_rows import RunState
from celery_durable.wire.encoding import ExportedRun, parse

_MAX_RUN_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One recorded run. ``claim`` has an empty token, so nothing can be written under it.

    ``error_name``: of the error that ended the run. ``is_partial``: a rewind or fork without its earlier run, so its
    time and random numbers are unknown.
    """

    claim: Claim
    run_state: RunState
    status: Status
    error_name: str | None = None
    is_partial: bool = False

    @property
    def ref(self) -> RunRef:
        return self.claim.ref


def read_run(tx: Tx, workflow: str, instance_id: str, number: int | None) -> RecordedRun:
    """Read a run from the store, by default the current one. Raises InstanceNotFound and RunNotFound."""
    row = instances.read(tx, workflow, instance_id)
    number = row.run_number if number is None else number
    run = history.read_run(tx, row.pk, number) if number <= _MAX_RUN_NUMBER else None
    if run is None:
        raise RunNotFound(workflow, instance_id, number, row.run_number)
    claim = _build_claim(row.pk, RunRef(workflow, instance_id, number), row.created_at, run.created_at)
    return _build_recorded_run(claim, step_rows.load(tx, claim), history.derive_run_status(row, run), run.error_name)


def from_open_run(run: OpenRun) -> RecordedRun:
    """Build a run from the rows that a batch of open runs has."""
    claim = _build_claim(run.pk, run.ref, from_us(run.created_at), run.state.created_at)
    return _build_recorded_run(claim, run.state, run.status, None)


def from_history(history: History) -> RecordedRun:
    """Build a run from its history."""
    ref = RunRef(history.workflow, history.instance_id, history.run_number)
    rows = [_build_row(step, position) for position, step in enumerate(history.steps, start=1)]
    run_state = RunState(
        params=json.dumps(history.params),
        created_at=history.created_at,
        started_at=history.started_at,
        log_count=0,
        ancestry=Ancestry.parse(None, ref=ref, created_at=history.created_at),
        steps=tuple(rows),
    )
    claim = _build_claim(0, ref, history.instance_created_at, history.created_at)
    error = history.status.error
    recorded = _build_recorded_run(claim, run_state, history.status.status, None if error is None else error.name)
    return replace(recorded, is_partial=history.origin is not None)


def _build_row(step: StepRecord, position: int) -> StepRow:
    return StepRow(
        **{name: getattr(step, name) for name in SHOWN_AS_STORED},
        seq=position,
        wait_event_type=_get_awaited_type(step, position),
        result=json.dumps(step.result),
        error_name=None if step.error is None else step.error.name,
        error_message=None if step.error is None else step.error.message,
        # Steps that one commit finished have the same `finished_at`, so it serves as the commit id.
        commit_id=str(position if step.finished_at is None else step.finished_at),
    )


def _get_awaited_type(step: StepRecord, position: int) -> str | None:
    if step.wait_topic is not None:
        return topic_event_type(step.wait_topic, position)
    if step.task is not None:
        return task_event_type(step.task, 0, position, step.attempts)
    if step.child is not None:
        return child_event_type(step.child.workflow, step.child.instance_id, position)
    return step.wait_event_type


def from_export(exported: Any) -> RecordedRun:
    """Build a run from the parsed output of `export`; raises ValueRefused."""
    try:
        document = parse(ExportedRun, exported)
    except ValueError as exc:
        raise ValueRefused(f"This is no run that `export` printed: {exc}.") from exc
    return from_history(document.to_history(document.workflow, document.instance_id))


def _build_claim(pk: int, ref: RunRef, created_at: datetime, run_created_at: datetime) -> Claim:
    return Claim(
        pk=pk,
        ref=ref,
        token="",
        queue="",
        crash_count=0,
        created_at=created_at,
        claimed_at=run_created_at,
        run_at=run_created_at,
    )


def _build_recorded_run(claim: Claim, run_state: RunState, status: Status, error_name: str | None) -> RecordedRun:
    """Build the record. Steps that terminate() cancelled become open again: the code was waiting at them."""
    cancelled_keys = {row.step_key for row in ancestry.select_rows_cancelled_by_terminate(run_state.steps)}
    steps = [
        replace(row, status=StepStatus.WAITING) if row.step_key in cancelled_keys else row for row in run_state.steps
    ]
    return RecordedRun(claim, replace(run_state, steps=tuple(steps)), status, error_name)
