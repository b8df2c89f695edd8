"""Builds response models from records. The records come redacted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from celery_durable.explain import Diagnosis
from celery_durable.model import (
    AttemptRecord,
    AuditRecord,
    Child,
    ErrorInfo,
    EventRecord,
    EventWait,
    History,
    HistoryPage,
    InstanceStatus,
    InstanceSummary,
    ItemCounts,
    LogRecord,
    Origin,
    ParentStep,
    Published,
    RunningStep,
    Stats,
    Status,
    StepRecord,
    StepStatus,
)
from celery_durable.values import Parameter
from celery_durable.wire import responses
from celery_durable.wire.records import LINEAR_STATUSES
from celery_durable.wire.responses import StepState


def status_view(status: InstanceStatus) -> responses.StatusView:
    """Return the status with the output or the error."""
    more: dict[str, Any] = _error(status.error)
    if status.status is Status.COMPLETE:
        more["output"] = status.output
    return responses.StatusView(status=status.status, **more)


def listed_instance(item: InstanceSummary) -> responses.ListedInstance:
    """Return an item of a list of instances."""
    return responses.ListedInstance(**_listed_fields(item))


def instance_of_any(item: InstanceSummary) -> responses.InstanceOfAny:
    """Return an item of a list of the instances of all workflows."""
    return responses.InstanceOfAny(workflow_name=item.workflow, **_listed_fields(item))


def _listed_fields(item: InstanceSummary) -> dict[str, Any]:
    step = item.current_step
    more: dict[str, Any] = {} if step is None else {"current_step": current_step_view(step)}
    more |= {} if item.run_at is None else {"run_at": item.run_at}
    return {
        "id": item.id,
        "details": responses.StatusView(status=item.status, **_error(item.error)),
        "run_number": item.run_number,
        "labels": dict(item.labels),
        "created_at": item.created_at,
        "updated_at": item.updated_at,
        **more,
        **running_fields(item.running, item.worker),
    }


def running_fields(step: RunningStep | None, worker: str | None) -> dict[str, Any]:
    """Return the fields that say what a worker executes; none if no worker does."""
    fields: dict[str, Any] = {} if worker is None else {"worker": worker}
    if step is not None:
        running = responses.RunningView(step_key=step.step_key, attempt=step.attempt, since=step.since)
        fields["running"] = running
    return fields


def workflow_view(name: str, parameters: Sequence[Parameter]) -> responses.WorkflowView:
    """Return a workflow with its parameters."""
    shown = [responses.ParameterView(name=each.name, type=each.type, required=each.is_required) for each in parameters]
    more: dict[str, Any] = {"parameters": shown} if shown else {}
    return responses.WorkflowView(name=name, **more)


def stats_view(found: Stats, queues: Mapping[str, int | None]) -> responses.StatsView:
    """Return counts, due runs and the lengths of queues."""
    overdue = found.overdue
    return responses.StatsView(
        instances=[
            responses.StatusCount(workflow_name=name, status=status, count=count.number, is_exact=count.is_exact)
            for name, status, count in found.counts
        ],
        due=responses.DueRuns(count=overdue.count.number, is_exact=overdue.count.is_exact, oldest=overdue.oldest),
        queues=[responses.QueueLength(name=name, messages=length) for name, length in queues.items()],
    )


def wait_list(found: Sequence[EventWait]) -> responses.WaitList:
    """Return the steps that wait for an event."""
    waits = [
        responses.EventWaitView(
            workflow_name=each.ref.workflow,
            instance_id=each.ref.instance_id,
            run_number=each.ref.run_number,
            status=each.status,
            wait_event_type=each.event_type,
            step_name=each.step,
            since=each.since,
            wake_at=each.until,
        )
        for each in found
    ]
    return responses.WaitList(waits=waits)


def published_views(found: Mapping[str, Published]) -> dict[str, responses.PublishedView]:
    """Return published values by key."""
    return {key: responses.PublishedView(value=each.value, updated_at=each.updated_at) for key, each in found.items()}


def explanation(found: Diagnosis) -> responses.Explanation:
    """Return why an instance is in its current state."""
    return responses.Explanation(
        code=found.code, sentence=found.sentence, facts=dict(found.facts), actions=list(found.actions)
    )


def run_view(page: HistoryPage | History) -> responses.RunView:
    """Return a run, without its steps and events."""
    more: dict[str, Any] = {} if page.origin is None else {"origin": _origin(page.origin)}
    more |= {} if page.parent is None else {"parent": _parent(page.parent)}
    more |= limit_fields(page.max_run)
    return responses.RunView(
        details=status_view(page.status),
        params=page.params,
        labels=dict(page.labels),
        instance_created_at=page.instance_created_at,
        created_at=page.created_at,
        started_at=page.started_at,
        completed_at=page.completed_at,
        reason=page.reason,
        audit=[_audit(record) for record in page.audit],
        **more,
    )


def limit_fields(max_run: timedelta | None) -> dict[str, int]:
    """Return the field for the limit of an instance, if it has one of its own."""
    return {} if max_run is None else {"max_run_ms": max_run // timedelta(milliseconds=1)}


def _audit(record: AuditRecord) -> responses.AuditView:
    error = _error(record.before.error)
    return responses.AuditView(
        step_key=record.step_key,
        action=record.action,
        by=record.by,
        reason=record.reason,
        before=responses.StepBefore(status=_state(record.before.status), attempts=record.before.attempts, **error),
        created_at=record.created_at,
    )


def step_view(step: StepRecord) -> responses.StepView:
    """Return a step with its result."""
    has_result = step.status in {StepStatus.COMPLETED, StepStatus.DONE} or step.result is not None
    result = {"result": step.result} if has_result else {}
    return responses.StepView(
        **_common(step),
        **result,
        **_error(step.error),
        created_at=step.created_at,
        started_at=step.started_at,
        finished_at=step.finished_at,
    )


def current_step_view(step: StepRecord) -> responses.CurrentStep:
    """Return a step without its result."""
    return responses.CurrentStep(**_common(step), **_error(step.error))


def event_view(event: EventRecord) -> responses.EventView:
    """Return an event."""
    return responses.EventView(
        id=event.event_id,
        type=event.type,
        payload=event.payload,
        created_at=event.created_at,
        delivered_at=event.delivered_at,
        consumed_by_step_key=event.consumed_by_step_key,
    )


def log_view(line: LogRecord) -> responses.LogView:
    """Return a log line with its data."""
    return responses.LogView(
        id=str(line.id),
        run_number=line.run_number,
        step_key=line.step_key,
        attempt=line.attempt,
        level=line.level,
        category=line.category,
        message=line.message,
        data=line.data,
        is_replay=line.is_replay,
        created_at=line.created_at,
    )


def attempt_view(attempt: AttemptRecord) -> responses.AttemptView:
    """Return an attempt that did not succeed."""
    return responses.AttemptView(
        id=str(attempt.id),
        step=attempt.step,
        step_key=attempt.step_key,
        item=attempt.item,
        attempt=attempt.attempt,
        outcome=attempt.outcome,
        error=responses.ErrorView(name=attempt.error.name, message=attempt.error.message),
        traceback=attempt.traceback,
        file=attempt.file,
        line=attempt.line,
        worker=attempt.worker,
        pid=attempt.pid,
        task_id=attempt.task_id,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
    )


def _error(error: ErrorInfo | None) -> dict[str, Any]:
    return {} if error is None else {"error": responses.ErrorView(name=error.name, message=error.message)}


def _parent(parent: ParentStep) -> responses.ParentView:
    return responses.ParentView(
        workflow_name=parent.workflow,
        instance_id=parent.instance_id,
        run_number=parent.run_number,
        step_key=parent.step_key,
    )


def _origin(origin: Origin) -> responses.OriginView:
    return responses.OriginView(instance_id=origin.instance_id, run_number=origin.run_number, step_key=origin.step_key)


def _child(child: Child) -> responses.ChildView:
    return responses.ChildView(workflow_name=child.workflow, instance_id=child.instance_id)


def _items(counts: ItemCounts) -> responses.ItemsView:
    failures = [
        responses.ItemFailureView(position=each.position, attempts=each.attempts, **_error(each.error))
        for each in counts.failures
    ]
    more: dict[str, Any] = {"failures": failures} if failures else {}
    return responses.ItemsView(total=counts.total, done=counts.done, failed=counts.failed, **more)


_LINEAR_STATES = {status: state for state, status in LINEAR_STATUSES.items()}


def _state(status: StepStatus) -> StepState:
    return _LINEAR_STATES.get(status) or StepState(status.value)


def _common(step: StepRecord) -> dict[str, Any]:
    return {
        "step_key": step.step_key,
        "name": step.name,
        "type": step.type,
        "status": _state(step.status),
        "attempts": step.attempts,
        "max_attempts": step.max_attempts,
        "timeout_ms": None if step.timeout is None else step.timeout // timedelta(milliseconds=1),
        "next_retry_at": step.next_retry_at,
        "wake_at": step.wake_at,
        "wait_event_type": step.wait_event_type,
        **({} if step.wait_topic is None else {"wait_topic": step.wait_topic}),
        **({} if step.task is None else {"task": step.task}),
        **({} if step.task_id is None else {"task_id": step.task_id}),
        **({} if step.child is None else {"child": _child(step.child)}),
        **({} if step.items is None else {"items": _items(step.items)}),
    }


def paging_fields(name: str, cursor: str | None) -> dict[str, Any]:
    """Return the fields that say whether a list has a next page."""
    more: dict[str, Any] = {f"{name}_has_next_page": cursor is not None}
    return more if cursor is None else more | {f"{name}_cursor": cursor}
