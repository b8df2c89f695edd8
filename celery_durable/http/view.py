"""Builds response bodies from records, after the application's redaction hook has redacted them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery_durable.explain import Facts, explain
from celery_durable.http import responses
from celery_durable.http.responses import StepState
from celery_durable.model import (
    AuditRecord,
    Child,
    ErrorInfo,
    EventRecord,
    HistoryPage,
    InstanceDetails,
    InstanceStatus,
    InstanceSummary,
    ItemCounts,
    LogRecord,
    Origin,
    ParentStep,
    Published,
    Status,
    StepRecord,
    StepStatus,
)
from celery_durable.redaction import Redaction


class View:
    """Builds the response bodies for one instance."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def status(self, status: InstanceStatus) -> responses.StatusView:
        """Return the status with the output or the error."""
        return _status(self._redaction.redact_status(status))

    def instance(self, details: InstanceDetails) -> responses.InstanceView:
        """Return an instance without its history."""
        details = self._redaction.redact_details(details)
        row, step = details.instance, details.current_step
        meta: dict[str, Any] = {} if step is None else {"current_step": _current(step)}
        return responses.InstanceView(
            id=row.instance_id,
            details=_status(details.status),
            meta=responses.InstanceMeta(
                workflow_name=row.workflow,
                run_number=row.run_number,
                params=details.params,
                labels=dict(details.labels),
                created_at=row.created_at,
                updated_at=row.updated_at,
                started_at=details.started_at,
                completed_at=details.completed_at,
                reason=details.reason,
                pause_requested=row.pause_requested,
                **meta,
            ),
        )

    def list_item(self, item: InstanceSummary) -> responses.ListedInstance:
        """Return an item of a list of instances."""
        item = self._redaction.redact_summary(item)
        return responses.ListedInstance(
            id=item.id,
            details=responses.StatusView(status=item.status, **_error(item.error)),
            run_number=item.run_number,
            labels=dict(item.labels),
            created_at=item.created_at,
            updated_at=item.updated_at,
        )

    def history(self, page: HistoryPage, *, with_run: bool) -> responses.HistoryView:
        """Return a page of each list of a run. ``with_run`` adds the run itself."""
        page = self._redaction.redact_page(page)
        more: dict[str, Any] = {"run": _run(page)} if with_run else {}
        if page.logs is not None:
            more |= {"logs": [_log(line) for line in page.logs.items]} | _paging("logs", page.logs.cursor)
        return responses.HistoryView(
            run_number=page.run_number,
            steps=[_step(step) for step in page.steps.items],
            events=[_event(event) for event in page.events.items],
            **_paging("steps", page.steps.cursor),
            **_paging("events", page.events.cursor),
            **more,
        )

    def step(self, step: StepRecord) -> responses.StepView:
        """Return a step with its result."""
        return _step(self._redaction.redact_step(step))

    def log(self, line: LogRecord) -> responses.LogView:
        """Return a log line with its data."""
        return _log(self._redaction.redact_log(line))

    def published(self, found: Mapping[str, Published]) -> dict[str, responses.PublishedView]:
        """Return published values by key."""
        return {
            key: responses.PublishedView(value=each.value, updated_at=each.updated_at)
            for key, each in self._redaction.redact_published(found).items()
        }

    def explanation(self, facts: Facts) -> responses.Explanation:
        """Return why the instance is in its current state. Its sentence is built from redacted facts."""
        found = explain(self._redaction.redact_facts(facts))
        return responses.Explanation(
            code=found.code, sentence=found.sentence, facts=dict(found.facts), actions=list(found.actions)
        )


def _status(status: InstanceStatus) -> responses.StatusView:
    more: dict[str, Any] = _error(status.error)
    if status.status is Status.COMPLETE:
        more["output"] = status.output
    return responses.StatusView(status=status.status, **more)


def _run(page: HistoryPage) -> responses.RunView:
    more: dict[str, Any] = {} if page.origin is None else {"origin": _origin(page.origin)}
    more |= {} if page.parent is None else {"parent": _parent(page.parent)}
    return responses.RunView(
        details=_status(page.status),
        params=page.params,
        labels=dict(page.labels),
        created_at=page.created_at,
        started_at=page.started_at,
        completed_at=page.completed_at,
        reason=page.reason,
        audit=[_audit(record) for record in page.audit],
        **more,
    )


def _audit(record: AuditRecord) -> responses.AuditView:
    error = _error(record.error_before)
    return responses.AuditView(
        step_key=record.step_key,
        action=record.action,
        by=record.by,
        reason=record.reason,
        before=responses.StepBefore(status=_state(record.status_before), attempts=record.attempts_before, **error),
        created_at=record.created_at,
    )


def _step(step: StepRecord) -> responses.StepView:
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


def _current(step: StepRecord) -> responses.CurrentStep:
    return responses.CurrentStep(**_common(step), **_error(step.error))


def _event(event: EventRecord) -> responses.EventView:
    return responses.EventView(
        id=event.event_id,
        type=event.type,
        payload=event.payload,
        created_at=event.created_at,
        delivered_at=event.delivered_at,
        consumed_by_step_key=event.consumed_by_step_key,
    )


def _log(line: LogRecord) -> responses.LogView:
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
    return responses.ItemsView(total=counts.total, done=counts.done, failed=counts.failed)


# Some stored names differ from other statuses only in case. Generated clients cannot distinguish those.
_LINEAR_STATES = {
    StepStatus.LINEAR_PENDING: StepState.PLANNED,
    StepStatus.READY: StepState.READY,
    StepStatus.RUNNING: StepState.RUNNING,
    StepStatus.LINEAR_WAITING: StepState.WAITING,
    StepStatus.DONE: StepState.DONE,
    StepStatus.DEAD: StepState.DEAD,
}


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


def _paging(name: str, cursor: str | None) -> dict[str, Any]:
    more: dict[str, Any] = {f"{name}_has_next_page": cursor is not None}
    return more if cursor is None else more | {f"{name}_cursor": cursor}
