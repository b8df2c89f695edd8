"""Builds records from response models, as a client of the HTTP API received them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from celery_durable.explain import Diagnosis
from celery_durable.model import (
    AttemptRecord,
    AuditRecord,
    Child,
    Count,
    ErrorInfo,
    EventRecord,
    EventWait,
    History,
    InstanceStatus,
    InstanceSummary,
    ItemCounts,
    ItemFailure,
    LogRecord,
    Origin,
    Overdue,
    ParentStep,
    Published,
    RunningStep,
    RunRef,
    Stats,
    StepBefore,
    StepRecord,
    StepStatus,
    StepType,
)
from celery_durable.wire import responses
from celery_durable.wire.responses import StepState


def history(workflow: str, instance_id: str, view: responses.HistoryView) -> History:
    """Return a complete run. ``view`` has the run, and all its steps, events and failed attempts."""
    assert view.run is not None
    run, types = view.run, {step.step_key: step.type for step in view.steps}
    origin, parent = run.origin, run.parent
    return History(
        workflow=workflow,
        instance_id=instance_id,
        run_number=view.run_number,
        status=InstanceStatus(run.details.status, _error(run.details.error), run.details.output),
        params=run.params,
        instance_created_at=run.instance_created_at,
        created_at=run.created_at,
        started_at=run.started_at,
        completed_at=run.completed_at,
        reason=run.reason,
        steps=tuple(map(step_record, view.steps)),
        events=tuple(_event_record(seq, event) for seq, event in enumerate(view.events)),
        origin=None if origin is None else Origin(origin.instance_id, origin.run_number, origin.step_key),
        audit=tuple(_audit_record(view.run_number, record, types) for record in run.audit),
        labels=run.labels,
        attempts=tuple(map(attempt_record, view.attempts or ())),
        parent=None
        if parent is None
        else ParentStep(parent.workflow_name, parent.instance_id, parent.run_number, parent.step_key),
        max_run=None if run.max_run_ms is None else timedelta(milliseconds=run.max_run_ms),
    )


def summary(workflow: str, view: responses.ListedInstance) -> InstanceSummary:
    """Return an instance in a list."""
    running = view.running
    return InstanceSummary(
        id=view.id,
        workflow=workflow,
        run_number=view.run_number,
        status=view.details.status,
        error=_error(view.details.error),
        run_at=view.run_at,
        created_at=view.created_at,
        updated_at=view.updated_at,
        labels=view.labels,
        current_step=None if view.current_step is None else step_record(view.current_step),
        running=None if running is None else RunningStep(running.step_key, running.attempt, running.since),
        worker=view.worker,
    )


def step_record(view: responses.CurrentStep) -> StepRecord:
    """Return a step. Only a `StepView` has a result and times."""
    child, items = view.child, view.items
    whole = view if isinstance(view, responses.StepView) else None
    return StepRecord(
        step_key=view.step_key,
        name=view.name,
        type=view.type,
        status=_step_status(view.status, view.type),
        attempts=view.attempts,
        max_attempts=view.max_attempts,
        timeout=None if view.timeout_ms is None else timedelta(milliseconds=view.timeout_ms),
        next_retry_at=view.next_retry_at,
        wake_at=view.wake_at,
        wait_event_type=view.wait_event_type,
        result=None if whole is None else whole.result,
        error=_error(view.error),
        created_at=None if whole is None else whole.created_at,
        started_at=None if whole is None else whole.started_at,
        finished_at=None if whole is None else whole.finished_at,
        wait_topic=view.wait_topic,
        task=view.task,
        task_id=view.task_id,
        child=None if child is None else Child(child.workflow_name, child.instance_id),
        items=None if items is None else _items(items),
    )


def _items(view: responses.ItemsView) -> ItemCounts:
    failures = (
        ItemFailure(each.position, each.attempts, ErrorInfo(each.error.name, each.error.message))
        for each in view.failures
    )
    return ItemCounts(view.total, view.done, view.failed, tuple(failures))


def stats(view: responses.StatsView) -> tuple[Stats, dict[str, int | None]]:
    """Return counts and due runs, and the lengths of queues by name."""
    counts = [(each.workflow_name, each.status, Count(each.count, each.is_exact)) for each in view.instances]
    overdue = Overdue(Count(view.due.count, view.due.is_exact), view.due.oldest)
    return Stats(counts, overdue), {each.name: each.messages for each in view.queues}


def event_wait(view: responses.EventWaitView) -> EventWait:
    """Return a step that waits for an event."""
    ref = RunRef(view.workflow_name, view.instance_id, view.run_number)
    return EventWait(ref, view.status, view.step_name, view.wait_event_type, view.since, view.wake_at)


def log_record(view: responses.LogView) -> LogRecord:
    """Return a log line."""
    return LogRecord(
        id=int(view.id),
        run_number=view.run_number,
        level=view.level,
        category=view.category,
        message=view.message,
        data=view.data,
        step_key=view.step_key,
        attempt=view.attempt,
        is_replay=view.is_replay,
        created_at=view.created_at,
    )


def attempt_record(view: responses.AttemptView) -> AttemptRecord:
    """Return an attempt that did not succeed."""
    return AttemptRecord(
        id=int(view.id),
        step_key=view.step_key,
        item=view.item,
        attempt=view.attempt,
        outcome=view.outcome,
        error=ErrorInfo(view.error.name, view.error.message),
        traceback=view.traceback,
        file=view.file,
        line=view.line,
        worker=view.worker,
        pid=view.pid,
        task_id=view.task_id,
        started_at=view.started_at,
        ended_at=view.ended_at,
        step=view.step,
    )


def published(views: Mapping[str, responses.PublishedView]) -> dict[str, Published]:
    """Return published values by key."""
    return {key: Published(view.value, updated_at=view.updated_at) for key, view in views.items()}


def diagnosis(view: responses.Explanation) -> Diagnosis:
    """Return why an instance is in its current state."""
    return Diagnosis(view.code, view.sentence, view.facts, tuple(view.actions))


def _event_record(seq: int, view: responses.EventView) -> EventRecord:
    return EventRecord(
        seq=seq,
        event_id=view.id,
        type=view.type,
        payload=view.payload,
        created_at=view.created_at,
        delivered_at=view.delivered_at,
        consumed_by_step_key=view.consumed_by_step_key,
    )


def _audit_record(run: int, view: responses.AuditView, types: Mapping[str, StepType]) -> AuditRecord:
    """Return a manual change. ``types``: the types of steps by key, because linear steps have other statuses."""
    before = view.before
    return AuditRecord(
        run_number=run,
        step_key=view.step_key,
        action=view.action,
        by=view.by,
        reason=view.reason,
        before=StepBefore(
            status=_step_status(before.status, types.get(view.step_key)),
            attempts=before.attempts,
            error=_error(before.error),
        ),
        created_at=view.created_at,
    )


def _error(view: responses.ErrorView | None) -> ErrorInfo | None:
    return None if view is None else ErrorInfo(view.name, view.message)


def _step_status(state: StepState, type_: StepType | None) -> StepStatus:
    return LINEAR_STATUSES[state] if type_ is StepType.LINEAR else StepStatus(state.value)


LINEAR_STATUSES = {
    StepState.PLANNED: StepStatus.LINEAR_PENDING,
    StepState.READY: StepStatus.READY,
    StepState.RUNNING: StepStatus.RUNNING,
    StepState.WAITING: StepStatus.LINEAR_WAITING,
    StepState.DONE: StepStatus.DONE,
    StepState.DEAD: StepStatus.DEAD,
}
"""The statuses of linear steps. Some stored names differ from other statuses only in case, and generated clients cannot
distinguish those."""
