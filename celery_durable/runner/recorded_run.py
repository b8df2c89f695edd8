"""Recorded runs to replay: from the store, from a `History`, or from the output of `export`."""

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
    child_type,
    task_type,
    topic_type,
)
from celery_durable.store import history, instances, step_rows
from celery_durable.store.engine import Tx
from celery_durable.store.step_rows import RunState

_LARGEST_RUN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One recorded run.

    ``claim``: like the claim of its workers, but without a token, so it cannot write. ``error_name``: of the error that
    ended the run. ``is_partial``: the run continues another run, whose time and random numbers are not known here.
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
    """Read a run from the store; ``number`` None is the current run. Raises InstanceNotFound and RunNotFound."""
    row = instances.read(tx, workflow, instance_id)
    number = row.run_number if number is None else number
    run = history.run(tx, row.pk, number) if number <= _LARGEST_RUN else None
    if run is None:
        raise RunNotFound(workflow, instance_id, number, row.run_number)
    claim = _claim(row.pk, RunRef(workflow, instance_id, number), row.created_at, run.created_at)
    return _recorded(claim, step_rows.load(tx, claim), history.past_status(row, run), run.error_name)


def from_history(history: History, *, created_at: datetime | None = None) -> RecordedRun:
    """Build a run from its history. ``created_at``: of the instance, by default that of the run."""
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
            wait_event_type=_awaited(step, position),
            result=json.dumps(step.result),
            error_name=None if step.error is None else step.error.name,
            error_message=None if step.error is None else step.error.message,
            created_at=step.created_at or history.created_at,
            finished_at=step.finished_at,
            # Steps that one commit finished have the same `finished_at`, so it stands for the commit id.
            commit_id=str(position if step.finished_at is None else step.finished_at),
        )
        for position, step in enumerate(history.steps, start=1)
    ]
    run_state = RunState(
        params=json.dumps(history.params),
        created_at=history.created_at,
        started_at=history.started_at,
        logs=0,
        ancestry=Ancestry.parse(None, ref=ref, created_at=history.created_at),
        steps=tuple(rows),
    )
    claim = _claim(0, ref, history.created_at if created_at is None else created_at, history.created_at)
    error = history.status.error
    found = _recorded(claim, run_state, history.status.status, None if error is None else error.name)
    return replace(found, is_partial=history.origin is not None)


def _awaited(step: StepRecord, position: int) -> str | None:
    """The event type that the step's row waits for."""
    if step.wait_topic is not None:
        return topic_type(step.wait_topic, position)
    if step.task is not None:
        return task_type(step.task, 0, position, step.attempts)
    if step.child is not None:
        return child_type(step.child.workflow, step.child.instance_id, position)
    return step.wait_event_type


def from_export(said: Any) -> RecordedRun:
    """Build a run from the parsed output of `export`; raises ValueRefused."""
    if not isinstance(said, Mapping) or said.get("version") != EXPORT_VERSION or "steps" not in said:
        raise ValueRefused(f"This is no run that `export` printed, or one of another version than {EXPORT_VERSION}.")
    try:
        return from_history(_history(said), created_at=_maybe(said.get("instance_created_at")))
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueRefused(f"This is not all of what `export` printed of a run: {type(exc).__name__}: {exc}.") from exc


def _history(said: Mapping[str, Any]) -> History:
    """The history as far as a replay needs it."""
    origin = said.get("origin")
    return History(
        workflow=said["workflow"],
        instance_id=said["instance_id"],
        run_number=said["run_number"],
        status=InstanceStatus(Status(said["status"]["status"]), _error(said["status"]), said["status"]["output"]),
        params=said["params"],
        created_at=datetime.fromisoformat(said["created_at"]),
        started_at=_maybe(said["started_at"]),
        completed_at=_maybe(said["completed_at"]),
        reason=said["reason"],
        steps=tuple(_step(each) for each in said["steps"]),
        events=(),
        origin=None if origin is None else Origin(**origin),
    )


def _step(said: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step_key=said["step_key"],
        name=said["name"],
        type=StepType(said["type"]),
        status=StepStatus(said["status"]),
        attempts=said["attempts"],
        max_attempts=said["max_attempts"],
        timeout=None if said["timeout"] is None else timedelta(seconds=said["timeout"]),
        next_retry_at=_maybe(said["next_retry_at"]),
        wake_at=_maybe(said["wake_at"]),
        wait_event_type=said["wait_event_type"],
        result=said["result"],
        error=_error(said),
        created_at=_maybe(said["created_at"]),
        started_at=_maybe(said["started_at"]),
        finished_at=_maybe(said["finished_at"]),
        wait_topic=said.get("wait_topic"),
        task=said.get("task"),
        child=None if said.get("child") is None else Child(**said["child"]),
    )


def _error(said: Mapping[str, Any]) -> ErrorInfo | None:
    return None if said["error"] is None else ErrorInfo(**said["error"])


def _maybe(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _claim(pk: int, ref: RunRef, created_at: datetime, began: datetime) -> Claim:
    return Claim(
        pk=pk, ref=ref, token="", queue="", crash_count=0, created_at=created_at, claimed_at=began, run_at=began
    )


def _recorded(claim: Claim, run_state: RunState, status: Status, error_name: str | None) -> RecordedRun:
    """Build the record. Steps that terminate() cancelled are open again, as the code left them."""
    cut = {row.step_key for row in ancestry.cancelled_by_terminate(run_state.steps)}
    steps = [replace(row, status=StepStatus.WAITING) if row.step_key in cut else row for row in run_state.steps]
    return RecordedRun(claim, replace(run_state, steps=tuple(steps)), status, error_name)
