"""Recorded runs for the replay check: read from the store, from a `History`, or from the output of `export`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery_durable import ancestry
from celery_durable.ancestry import Ancestry
from celery_durable.errors import RunNotFound, ValueRefused
from celery_durable.model import (
    EXPORT_VERSION,
    Child,
    Claim,
    ErrorInfo,
    History,
    InstanceStatus,
    Origin,
    RunRef,
    Status,
    StepRecord,
    StepRow,
    StepStatus,
    StepType,
    child_event_type,
    from_us,
    task_event_type,
    topic_event_type,
)
from celery_durable.store import history, instances, step_rows
from celery_durable.store.engine import Tx
from celery_durable.store.open_runs import OpenRun
from celery_durable.store.step_rows import RunState

_MAX_RUN_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One recorded run.

    ``claim``: a claim with an empty token, so nothing can be written under it. ``error_name``: the name of the error
    that ended the run. ``is_partial``: the run is a rewind or fork whose earlier run is not part of the record, so its
    time and random numbers are unknown.
    """

    claim: Claim
    run_state: RunState
    status: Status
    error_name: str | None = None
    is_partial: bool = False

    @property
    def ref(self) -> RunRef:
        """The workflow, instance id and number of the run."""
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


def from_history(history: History, *, created_at: datetime | None = None) -> RecordedRun:
    """Build a run from its history. ``created_at``: when the instance was created, by default when the run was."""
    ref = RunRef(history.workflow, history.instance_id, history.run_number)
    rows = [
        StepRow(
            step_key=step.step_key,
            seq=position,
            name=step.name,
            type=step.type,
            status=step.status,
            attempts=step.attempts,
            max_attempts=step.max_attempts,
            next_retry_at=step.next_retry_at,
            wake_at=step.wake_at,
            timeout=step.timeout,
            wait_event_type=_get_awaited_type(step, position),
            result=json.dumps(step.result),
            error_name=None if step.error is None else step.error.name,
            error_message=None if step.error is None else step.error.message,
            created_at=step.created_at or history.created_at,
            finished_at=step.finished_at,
            # Steps that one commit finished have the same `finished_at`, so it serves as the commit id.
            commit_id=str(position if step.finished_at is None else step.finished_at),
        )
        for position, step in enumerate(history.steps, start=1)
    ]
    run_state = RunState(
        params=json.dumps(history.params),
        created_at=history.created_at,
        started_at=history.started_at,
        log_count=0,
        ancestry=Ancestry.parse(None, ref=ref, created_at=history.created_at),
        steps=tuple(rows),
    )
    claim = _build_claim(0, ref, history.created_at if created_at is None else created_at, history.created_at)
    error = history.status.error
    recorded = _build_recorded_run(claim, run_state, history.status.status, None if error is None else error.name)
    return replace(recorded, is_partial=history.origin is not None)


def _get_awaited_type(step: StepRecord, position: int) -> str | None:
    """The event type that the step's row waits for."""
    if step.wait_topic is not None:
        return topic_event_type(step.wait_topic, position)
    if step.task is not None:
        return task_event_type(step.task, 0, position, step.attempts)
    if step.child is not None:
        return child_event_type(step.child.workflow, step.child.instance_id, position)
    return step.wait_event_type


def from_export(exported: Any) -> RecordedRun:
    """Build a run from the parsed output of `export`; raises ValueRefused."""
    if not isinstance(exported, Mapping) or exported.get("version") != EXPORT_VERSION or "steps" not in exported:
        raise ValueRefused(f"This is no run that `export` printed, or one of another version than {EXPORT_VERSION}.")
    try:
        return from_history(_parse_history(exported), created_at=_parse_time(exported.get("instance_created_at")))
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueRefused(f"This is not all of what `export` printed of a run: {type(exc).__name__}: {exc}.") from exc


def _parse_history(exported: Mapping[str, Any]) -> History:
    """Build the history, without what a replay does not need."""
    origin = exported.get("origin")
    return History(
        workflow=exported["workflow"],
        instance_id=exported["instance_id"],
        run_number=exported["run_number"],
        status=InstanceStatus(
            Status(exported["status"]["status"]), _parse_error(exported["status"]), exported["status"]["output"]
        ),
        params=exported["params"],
        created_at=datetime.fromisoformat(exported["created_at"]),
        started_at=_parse_time(exported["started_at"]),
        completed_at=_parse_time(exported["completed_at"]),
        reason=exported["reason"],
        steps=tuple(_parse_step(each) for each in exported["steps"]),
        events=(),
        origin=None if origin is None else Origin(**origin),
    )


def _parse_step(exported: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step_key=exported["step_key"],
        name=exported["name"],
        type=StepType(exported["type"]),
        status=StepStatus(exported["status"]),
        attempts=exported["attempts"],
        max_attempts=exported["max_attempts"],
        timeout=None if exported["timeout"] is None else timedelta(seconds=exported["timeout"]),
        next_retry_at=_parse_time(exported["next_retry_at"]),
        wake_at=_parse_time(exported["wake_at"]),
        wait_event_type=exported["wait_event_type"],
        result=exported["result"],
        error=_parse_error(exported),
        created_at=_parse_time(exported["created_at"]),
        started_at=_parse_time(exported["started_at"]),
        finished_at=_parse_time(exported["finished_at"]),
        wait_topic=exported.get("wait_topic"),
        task=exported.get("task"),
        child=None if exported.get("child") is None else Child(**exported["child"]),
    )


def _parse_error(exported: Mapping[str, Any]) -> ErrorInfo | None:
    return None if exported["error"] is None else ErrorInfo(**exported["error"])


def _parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


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
