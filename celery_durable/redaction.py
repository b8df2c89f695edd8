"""Redaction: what people are shown of a record, with every value that people or their code wrote led past one hook.

The hook is the application's, given to `Durable`. The HTTP API and the commands show records that passed here; what is
stored, and what the application's own code reads, stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from celery_durable.explain import Facts
from celery_durable.model import (
    AuditRecord,
    ErrorInfo,
    EventRecord,
    History,
    HistoryPage,
    InstanceDetails,
    InstanceStatus,
    InstanceSummary,
    LogRecord,
    Page,
    Published,
    StepRecord,
    is_answer,
)

logger = logging.getLogger("celery_durable")

REDACTED = "[redacted]"
Kind = Literal[
    "params", "output", "result", "payload", "data", "published", "error", "message", "reason", "label", "by"
]
_TEXTS = ("error", "message", "reason", "label", "by")


@dataclass(frozen=True, slots=True)
class RedactionContext:
    """What a value is, for a `redact` hook.

    ``name``: the step's, label's or key's, the event's type, the log line's category; else None.
    """

    kind: Kind
    workflow: str
    instance_id: str
    name: str | None = None


Redact = Callable[[Any, RedactionContext], Any]
"""Returns what is shown in a value's place: JSON data; text for an error, message, reason, label or author (``by``).
If it raises, ``"[redacted]"`` is shown."""


class Redaction:
    """What may be shown of one instance; without a hook, everything."""

    def __init__(self, hook: Redact | None, workflow: str, instance_id: str) -> None:
        self._hook, self._workflow, self._instance_id = hook, workflow, instance_id

    def value(self, value: Any, kind: Kind, name: str | None = None) -> Any:
        """One value."""
        if self._hook is None or value is None:
            return value
        try:
            seen = self._hook(value, RedactionContext(kind, self._workflow, self._instance_id, name))
        except Exception:
            logger.exception("The redaction hook failed at %s of %s/%s", kind, self._workflow, self._instance_id)
            return REDACTED
        return seen if kind not in _TEXTS or isinstance(seen, str) else REDACTED

    def status(self, status: InstanceStatus) -> InstanceStatus:
        """With its output, or its error."""
        return replace(status, output=self.value(status.output, "output"), error=self._error(status.error))

    def summary(self, item: InstanceSummary) -> InstanceSummary:
        """A line of a list."""
        return replace(item, error=self._error(item.error), labels=self._labels(item.labels))

    def details(self, details: InstanceDetails) -> InstanceDetails:
        """An instance with its current run and step."""
        step = details.current_step
        return replace(
            details,
            status=self.status(details.status),
            params=self.value(details.params, "params"),
            reason=self.value(details.reason, "reason"),
            current_step=None if step is None else self.step(step),
            labels=self._labels(details.labels),
        )

    def history(self, found: History) -> History:
        """All of a run."""
        return replace(
            found,
            **self._run(found),
            steps=tuple(self.step(step) for step in found.steps),
            events=tuple(self.event(event) for event in found.events),
        )

    def page(self, page: HistoryPage) -> HistoryPage:
        """A page of each list of a run."""
        logs = page.logs
        return replace(
            page,
            **self._run(page),
            steps=Page(tuple(self.step(step) for step in page.steps.items), page.steps.cursor),
            events=Page(tuple(self.event(event) for event in page.events.items), page.events.cursor),
            logs=None if logs is None else Page(tuple(self.log(line) for line in logs.items), logs.cursor),
        )

    def _run(self, run: History | HistoryPage) -> dict[str, Any]:
        return {
            "status": self.status(run.status),
            "params": self.value(run.params, "params"),
            "reason": self.value(run.reason, "reason"),
            "labels": self._labels(run.labels),
            "audit": tuple(self._audited(record) for record in run.audit),
        }

    def _audited(self, record: AuditRecord) -> AuditRecord:
        return replace(
            record,
            by=self.value(record.by, "by", record.step_key),
            reason=self.value(record.reason, "reason", record.step_key),
            error_before=self._error(record.error_before, record.step_key),
        )

    def step(self, step: StepRecord) -> StepRecord:
        """A step with its result."""
        return replace(
            step, result=self.value(step.result, "result", step.name), error=self._error(step.error, step.name)
        )

    def event(self, event: EventRecord) -> EventRecord:
        """An event with its payload.

        What others answered to a step is first of all its result, or its error: who hides these hides them here.
        """
        payload, step = event.payload, event.consumed_by_step_key
        if self._hook is not None and is_answer(event.type) and isinstance(payload, dict):
            if step is None:  # nobody knows yet whose it is
                return replace(event, payload=REDACTED)
            if "error" in payload:
                error = payload["error"]
                payload = {"error": {**error, "message": self.value(error["message"], "error", step)}}
            else:
                payload = {"output": self.value(payload["output"], "result", step)}
        return replace(event, payload=self.value(payload, "payload", event.type))

    def log(self, line: LogRecord) -> LogRecord:
        """A log line with its data."""
        message = self.value(line.message, "message", line.category)
        return replace(line, message=message, data=self.value(line.data, "data", line.category))

    def published(self, found: Mapping[str, Published]) -> dict[str, Published]:
        """Published values by key."""
        return {key: replace(each, value=self.value(each.value, "published", key)) for key, each in found.items()}

    def facts(self, facts: Facts) -> Facts:
        """What a diagnosis rests on: its sentence quotes errors and reasons."""
        run, last = facts.run, facts.last_step
        return replace(
            facts,
            run=replace(
                run,
                error_message=self.value(run.error_message, "error"),
                reason=self.value(run.reason, "reason"),
            ),
            open_steps=tuple(self.step(step) for step in facts.open_steps),
            last_step=None if last is None else self.step(last),
        )

    def _labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {name: self.value(value, "label", name) for name, value in labels.items()}

    def _error(self, error: ErrorInfo | None, name: str | None = None) -> ErrorInfo | None:
        return None if error is None else ErrorInfo(error.name, self.value(error.message, "error", name))
