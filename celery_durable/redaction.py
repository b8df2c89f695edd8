"""Redaction: passes the user data in records through a hook of the application before they are shown.

The application gives the hook to `Durable`. The HTTP API and the commands show redacted records. Stored data, and data
that the application reads itself, are not redacted.
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
    """Describes a value to a `redact` hook.

    ``name``: the name of the step or label, the published key, the event type, or the log category; else None.
    """

    kind: Kind
    workflow: str
    instance_id: str
    name: str | None = None


Redact = Callable[[Any, RedactionContext], Any]
"""Returns the value to show instead: JSON data; text for an error, message, reason, label or author (``by``).
If the hook raises, ``"[redacted]"`` is shown."""


class Redaction:
    """Redacts the records of one instance. Without a hook, records stay as they are."""

    def __init__(self, hook: Redact | None, workflow: str, instance_id: str) -> None:
        self._hook, self._workflow, self._instance_id = hook, workflow, instance_id

    def value(self, value: Any, kind: Kind, name: str | None = None) -> Any:
        """Redact one value."""
        if self._hook is None or value is None:
            return value
        try:
            seen = self._hook(value, RedactionContext(kind, self._workflow, self._instance_id, name))
        except Exception:
            logger.exception("The redaction hook failed at %s of %s/%s", kind, self._workflow, self._instance_id)
            return REDACTED
        return seen if kind not in _TEXTS or isinstance(seen, str) else REDACTED

    def status(self, status: InstanceStatus) -> InstanceStatus:
        """Redact output and error of a status."""
        return replace(status, output=self.value(status.output, "output"), error=self._error(status.error))

    def summary(self, item: InstanceSummary) -> InstanceSummary:
        """Redact an instance in a list."""
        return replace(item, error=self._error(item.error), labels=self._labels(item.labels))

    def details(self, details: InstanceDetails) -> InstanceDetails:
        """Redact an instance with its current run and step."""
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
        """Redact the history of a run."""
        return replace(
            found,
            **self._run(found),
            steps=tuple(self.step(step) for step in found.steps),
            events=tuple(self.event(event) for event in found.events),
        )

    def page(self, page: HistoryPage) -> HistoryPage:
        """Redact a page of the history of a run."""
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
        """Redact result and error of a step."""
        return replace(
            step, result=self.value(step.result, "result", step.name), error=self._error(step.error, step.name)
        )

    def event(self, event: EventRecord) -> EventRecord:
        """Redact the payload of an event.

        The payload of an answer to a step is also redacted as the result or the error of that step.
        """
        payload, step = event.payload, event.consumed_by_step_key
        if self._hook is not None and is_answer(event.type) and isinstance(payload, dict):
            if step is None:  # no step has consumed it, so its kind of value is unknown
                return replace(event, payload=REDACTED)
            if "error" in payload:
                error = payload["error"]
                payload = {"error": {**error, "message": self.value(error["message"], "error", step)}}
            else:
                payload = {"output": self.value(payload["output"], "result", step)}
        return replace(event, payload=self.value(payload, "payload", event.type))

    def log(self, line: LogRecord) -> LogRecord:
        """Redact message and data of a log line."""
        message = self.value(line.message, "message", line.category)
        return replace(line, message=message, data=self.value(line.data, "data", line.category))

    def published(self, found: Mapping[str, Published]) -> dict[str, Published]:
        """Redact published values."""
        return {key: replace(each, value=self.value(each.value, "published", key)) for key, each in found.items()}

    def facts(self, facts: Facts) -> Facts:
        """Redact the facts of a diagnosis, because its sentence quotes errors and reasons."""
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
