"""What is shown: records as answers, with every value that people or their code wrote led past the redaction hook."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from celery_durable.explain import Facts, explain
from celery_durable.http import wire
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
    Published,
    Status,
    StepRecord,
    is_answer,
)

logger = logging.getLogger("celery_durable.http")

REDACTED = "[redacted]"
Kind = Literal["params", "output", "result", "payload", "data", "published", "error", "message", "reason", "label"]
_TEXTS = ("error", "message", "reason", "label")


@dataclass(frozen=True, slots=True)
class Shown:
    """What a value is. ``name``: the step's, label's or key's, the event's type, the log line's category; else None."""

    kind: Kind
    workflow: str
    instance_id: str
    name: str | None = None


Redact = Callable[[Any, Shown], Any]
"""Answers with what is shown in a value's place: JSON data; text for an error, message, reason or label. The stored
value stays as it is. Where it raises, ``"[redacted]"`` is shown."""


class View:
    """Shows what concerns one instance."""

    def __init__(self, redact: Redact | None, workflow: str, instance_id: str) -> None:
        self._redact, self._workflow, self._instance_id = redact, workflow, instance_id

    def _seen(self, value: Any, kind: Kind, name: str | None = None) -> Any:
        if self._redact is None or value is None:
            return value
        try:
            seen = self._redact(value, Shown(kind, self._workflow, self._instance_id, name))
        except Exception:
            logger.exception("The redaction hook failed at %s of %s/%s", kind, self._workflow, self._instance_id)
            return REDACTED
        return seen if kind not in _TEXTS or isinstance(seen, str) else REDACTED

    def status(self, status: InstanceStatus) -> wire.StatusView:
        """With the output, or the error."""
        more: dict[str, Any] = self._error(status.error)
        if status.status is Status.COMPLETE:
            more["output"] = self._seen(status.output, "output")
        return wire.StatusView(status=status.status, **more)

    def instance(self, details: InstanceDetails) -> wire.InstanceView:
        """All but its history."""
        row, step = details.instance, details.current_step
        meta: dict[str, Any] = {} if step is None else {"current_step": self._current(step)}
        return wire.InstanceView(
            id=row.instance_id,
            details=self.status(details.status),
            meta=wire.InstanceMeta(
                workflow_name=row.workflow,
                run_number=row.run_number,
                params=self._seen(details.params, "params"),
                labels=self._labels(details.labels),
                created_at=row.created_at,
                updated_at=row.updated_at,
                started_at=details.started_at,
                completed_at=details.completed_at,
                reason=self._seen(details.reason, "reason"),
                pause_requested=row.pause_requested,
                **meta,
            ),
        )

    def listed(self, item: InstanceSummary) -> wire.ListedInstance:
        """A line of a list."""
        return wire.ListedInstance(
            id=item.id,
            details=wire.StatusView(status=item.status, **self._error(item.error)),
            run_number=item.run_number,
            labels=self._labels(item.labels),
            created_at=item.created_at,
            updated_at=item.updated_at,
        )

    def history(self, page: HistoryPage, *, with_run: bool) -> wire.HistoryView:
        """A page of each list."""
        more: dict[str, Any] = {"run": self._run(page)} if with_run else {}
        if page.logs is not None:
            more |= {"logs": [self.log(line) for line in page.logs.items]} | _paging("logs", page.logs.cursor)
        return wire.HistoryView(
            run_number=page.run_number,
            steps=[self.step(step) for step in page.steps.items],
            events=[self.event(event) for event in page.events.items],
            **_paging("steps", page.steps.cursor),
            **_paging("events", page.events.cursor),
            **more,
        )

    def _run(self, page: HistoryPage) -> wire.RunView:
        return wire.RunView(
            details=self.status(page.status),
            params=self._seen(page.params, "params"),
            labels=self._labels(page.labels),
            created_at=page.created_at,
            started_at=page.started_at,
            completed_at=page.completed_at,
            reason=self._seen(page.reason, "reason"),
            audit=[self._audited(record) for record in page.audit],
            **({} if page.origin is None else {"origin": _origin(page.origin)}),
        )

    def _audited(self, record: AuditRecord) -> wire.AuditView:
        error = self._error(record.error_before, record.step_key)
        return wire.AuditView(
            step_key=record.step_key,
            action=record.action,
            by=record.by,
            reason=self._seen(record.reason, "reason"),
            before=wire.StepBefore(status=record.status_before, attempts=record.attempts_before, **error),
            created_at=record.created_at,
        )

    def step(self, step: StepRecord) -> wire.StepView:
        """A step with its result."""
        has_result = step.status in {"completed", "DONE"} or step.result is not None
        result = {"result": self._seen(step.result, "result", step.name)} if has_result else {}
        return wire.StepView(
            **_common(step),
            **result,
            **self._error(step.error, step.name),
            created_at=step.created_at,
            started_at=step.started_at,
            finished_at=step.finished_at,
        )

    def event(self, event: EventRecord) -> wire.EventView:
        """An event with its payload."""
        return wire.EventView(
            id=event.event_id,
            type=event.type,
            payload=self._payload(event),
            created_at=event.created_at,
            delivered_at=event.delivered_at,
            consumed_by_step_key=event.consumed_by_step_key,
        )

    def _payload(self, event: EventRecord) -> Any:
        """What others answered to a step is first of all its result, or its error: who hides these hides them here."""
        payload, step = event.payload, event.consumed_by_step_key
        if self._redact is not None and is_answer(event.type) and isinstance(payload, dict):
            if step is None:  # nobody knows yet whose it is
                return REDACTED
            if "error" in payload:
                error = payload["error"]
                payload = {"error": {**error, "message": self._seen(error["message"], "error", step)}}
            else:
                payload = {"output": self._seen(payload["output"], "result", step)}
        return self._seen(payload, "payload", event.type)

    def log(self, line: LogRecord) -> wire.LogView:
        """A log line with its data."""
        return wire.LogView(
            id=str(line.id),
            run_number=line.run_number,
            step_key=line.step_key,
            attempt=line.attempt,
            level=line.level,
            category=line.category,
            message=self._seen(line.message, "message", line.category),
            data=self._seen(line.data, "data", line.category),
            is_replay=line.is_replay,
            created_at=line.created_at,
        )

    def published(self, key: str, found: Published) -> wire.PublishedView:
        """A published value."""
        return wire.PublishedView(value=self._seen(found.value, "published", key), updated_at=found.updated_at)

    def explanation(self, facts: Facts) -> wire.Explanation:
        """Why it stands where it stands; in the sentence, too, only what may be shown."""
        run, last = facts.run, facts.last_step
        facts = replace(
            facts,
            run=replace(
                run,
                error_message=self._seen(run.error_message, "error"),
                reason=self._seen(run.reason, "reason"),
            ),
            open_steps=tuple(self._without_secrets(step) for step in facts.open_steps),
            last_step=None if last is None else self._without_secrets(last),
        )
        found = explain(facts)
        return wire.Explanation(
            code=found.code, sentence=found.sentence, facts=dict(found.facts), actions=list(found.actions)
        )

    def _without_secrets(self, step: StepRecord) -> StepRecord:
        if step.error is None:
            return step
        return replace(step, error=ErrorInfo(step.error.name, self._seen(step.error.message, "error", step.name)))

    def _current(self, step: StepRecord) -> wire.CurrentStep:
        return wire.CurrentStep(**_common(step), **self._error(step.error, step.name))

    def _labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {name: self._seen(value, "label", name) for name, value in labels.items()}

    def _error(self, error: ErrorInfo | None, name: str | None = None) -> dict[str, Any]:
        if error is None:
            return {}
        return {"error": wire.ErrorView(name=error.name, message=self._seen(error.message, "error", name))}


def _origin(origin: Origin) -> wire.OriginView:
    return wire.OriginView(instance_id=origin.instance_id, run_number=origin.run_number, step_key=origin.step_key)


def _child(child: Child) -> wire.ChildView:
    return wire.ChildView(workflow_name=child.workflow, instance_id=child.instance_id)


def _items(counts: ItemCounts) -> wire.ItemsView:
    return wire.ItemsView(total=counts.total, done=counts.done, failed=counts.failed)


def _common(step: StepRecord) -> dict[str, Any]:
    return {
        "step_key": step.step_key,
        "name": step.name,
        "type": step.type,
        "status": step.status,
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
