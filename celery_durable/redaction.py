"""Redaction: passes the user data in records through a hook of the application before they are shown.

The HTTP API and the commands show redacted records. Stored data, and data that the application reads itself, are not
redacted, except for the errors of attempts: before they are stored.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from celery_durable import values
from celery_durable.model import (
    AttemptRecord,
    AuditRecord,
    ErrorInfo,
    ErrorTrace,
    EventRecord,
    EventWait,
    History,
    HistoryPage,
    InstanceDetails,
    InstanceStatus,
    InstanceSummary,
    ItemCounts,
    LimitDetails,
    LimitHold,
    LimitRecord,
    LogRecord,
    Page,
    Published,
    StepRecord,
    is_answer,
)

R = TypeVar("R")
logger = logging.getLogger("celery_durable")

REDACTED = "[redacted]"
RedactedKind = Literal[
    "params",
    "output",
    "result",
    "payload",
    "data",
    "published",
    "error",
    "traceback",
    "message",
    "reason",
    "label",
    "by",
    "ask",
    "key",
]
_TEXT_KINDS = ("error", "traceback", "message", "reason", "label", "by", "key")


@dataclass(frozen=True, slots=True)
class RedactionContext:
    """Describes a value to a `redact` hook.

    ``name``: the name of the step, label or limit, the published key, the event type, or the log category; else None.
    """

    kind: RedactedKind
    workflow: str
    instance_id: str
    name: str | None = None


Redact = Callable[[Any, RedactionContext], Any]
"""Returns the value to show instead: JSON data; text for error, traceback, message, reason, label, ``by`` and key.
If the hook raises, ``"[redacted]"`` is shown."""


def make_no_redaction(workflow: str, instance_id: str) -> Redaction:
    """Return a redaction that leaves everything as it is."""
    return Redaction(None, workflow, instance_id)


def _needs_hook(redact: Callable[[Redaction, R], R]) -> Callable[[Redaction, R], R]:
    """Return a method that returns its record as it is, not a copy, if there is no hook."""

    @functools.wraps(redact)
    def redact_with_hook(self: Redaction, record: R, /) -> R:
        return redact(self, record) if self.has_hook else record

    return redact_with_hook


class Redaction:
    """Redacts the records of one instance. Without a hook, records stay as they are."""

    def __init__(self, hook: Redact | None, workflow: str, instance_id: str) -> None:
        self._hook, self._workflow, self._instance_id = hook, workflow, instance_id
        self.has_hook = hook is not None

    def redact_value(self, value: Any, kind: RedactedKind, name: str | None = None) -> Any:
        """Redact one value."""
        if self._hook is None or value is None:
            return value
        try:
            shown = self._hook(value, RedactionContext(kind, self._workflow, self._instance_id, name))
        except Exception:
            logger.exception("The redaction hook failed at %s of %s/%s", kind, self._workflow, self._instance_id)
            return REDACTED
        return shown if kind not in _TEXT_KINDS or isinstance(shown, str) else REDACTED

    def clean_error(self, name: str, message: str, step: str | None) -> tuple[str, str]:
        """Return the name and the message of an attempt's error as they are stored: redacted and sanitized."""
        return values.sanitize_error(name, self.redact_value(message, "error", step))

    def clean_trace(self, error: BaseException, mode: values.Tracebacks, step: str | None) -> ErrorTrace:
        """Return the traceback of an attempt's error as it is stored: redacted and shortened."""
        redact = functools.partial(self.redact_value, kind="error", name=step)
        trace = values.trace_error(error, mode, redact)
        text = self.redact_value(trace.text, "traceback", step)
        return ErrorTrace(None if text is None else values.shorten_middle(text), trace.file, trace.line)

    @_needs_hook
    def redact_status(self, status: InstanceStatus) -> InstanceStatus:
        """Redact output and error of a status."""
        return replace(
            status, output=self.redact_value(status.output, "output"), error=self._redact_error(status.error)
        )

    @_needs_hook
    def redact_summary(self, item: InstanceSummary) -> InstanceSummary:
        """Redact an instance in a list."""
        step = item.current_step
        return replace(
            item,
            details=self.redact_status(item.details),
            labels=self._redact_labels(item.labels),
            current_step=None if step is None else self.redact_step(step),
        )

    @_needs_hook
    def redact_details(self, details: InstanceDetails) -> InstanceDetails:
        """Redact an instance with its current run and step."""
        meta, step = details.meta, details.meta.current_step
        return replace(
            details,
            details=self.redact_status(details.details),
            meta=replace(
                meta,
                params=self.redact_value(meta.params, "params"),
                reason=self.redact_value(meta.reason, "reason"),
                current_step=None if step is None else self.redact_step(step),
                labels=self._redact_labels(meta.labels),
            ),
        )

    @_needs_hook
    def redact_history(self, found: History) -> History:
        """Redact the history of a run."""
        return replace(
            found,
            **self._redact_run(found),
            steps=tuple(self.redact_step(step) for step in found.steps),
            events=tuple(self.redact_event(event) for event in found.events),
            attempts=tuple(self.redact_attempt(attempt) for attempt in found.attempts),
        )

    @_needs_hook
    def redact_page(self, page: HistoryPage) -> HistoryPage:
        """Redact a page of the history of a run."""
        logs, attempts = page.logs, page.attempts
        return replace(
            page,
            **self._redact_run(page),
            steps=Page(tuple(self.redact_step(step) for step in page.steps.items), page.steps.cursor),
            events=Page(tuple(self.redact_event(event) for event in page.events.items), page.events.cursor),
            logs=None if logs is None else Page(tuple(self.redact_log(line) for line in logs.items), logs.cursor),
            attempts=None
            if attempts is None
            else Page(tuple(self.redact_attempt(attempt) for attempt in attempts.items), attempts.cursor),
        )

    def _redact_run(self, run: History | HistoryPage) -> dict[str, Any]:
        return {
            "status": self.redact_status(run.status),
            "params": self.redact_value(run.params, "params"),
            "reason": self.redact_value(run.reason, "reason"),
            "labels": self._redact_labels(run.labels),
            "audit": tuple(self._redact_audit(record) for record in run.audit),
        }

    def _redact_audit(self, record: AuditRecord) -> AuditRecord:
        return replace(
            record,
            by=self.redact_value(record.by, "by", record.step_key),
            reason=self.redact_value(record.reason, "reason", record.step_key),
            before=record.before
            and replace(record.before, error=self._redact_error(record.before.error, record.step_key)),
        )

    @_needs_hook
    def redact_step(self, step: StepRecord) -> StepRecord:
        """Redact result, error and question of a step."""
        return replace(
            step,
            result=self.redact_value(step.result, "result", step.name),
            error=self._redact_error(step.error, step.name),
            ask=self.redact_value(step.ask, "ask", step.name),
            items=None if step.items is None else self._redact_items(step.items, step.name),
        )

    def _redact_items(self, items: ItemCounts, step: str) -> ItemCounts:
        failures = (replace(each, error=self._redact_error(each.error, step) or each.error) for each in items.failures)
        return replace(items, failures=tuple(failures))

    @_needs_hook
    def redact_wait(self, wait: EventWait) -> EventWait:
        """Redact what a wait asks a person."""
        return replace(wait, ask=self.redact_value(wait.ask, "ask", wait.step_name))

    @_needs_hook
    def redact_limit(self, limit: LimitRecord) -> LimitRecord:
        """Redact the key of a limit, and who has set its numbers."""
        by = self.redact_value(limit.set_by, "by", limit.name)
        return replace(limit, key=self.redact_key(limit.key, limit.name), set_by=by)

    def redact_key(self, key: str, limit: str) -> str:
        """Redact what a function of a limit returned; empty without one."""
        shown: str = self.redact_value(key, "key", limit) if key else key
        return shown

    @_needs_hook
    def redact_event(self, event: EventRecord) -> EventRecord:
        """Redact payload and author of an event; the payload of a task's answer as result or error of its step, too."""
        event = replace(event, by=self.redact_value(event.by, "by", event.consumed_by_step_key))
        payload, step = event.payload, event.consumed_by_step_key
        if is_answer(event.type) and isinstance(payload, dict):
            if step is None:  # no step has consumed it, so its kind of value is unknown
                return replace(event, payload=REDACTED)
            if "error" in payload:
                error = payload["error"]
                payload = {"error": {**error, "message": self.redact_value(error["message"], "error", step)}}
            else:
                payload = {"output": self.redact_value(payload["output"], "result", step)}
        return replace(event, payload=self.redact_value(payload, "payload", event.type))

    @_needs_hook
    def redact_attempt(self, attempt: AttemptRecord) -> AttemptRecord:
        """Redact error and traceback of an attempt, as they were redacted before they were stored."""
        step = attempt.step
        error = self._redact_error(attempt.error, step)
        assert error is not None
        return replace(attempt, error=error, traceback=self.redact_value(attempt.traceback, "traceback", step))

    @_needs_hook
    def redact_log(self, line: LogRecord) -> LogRecord:
        """Redact message and data of a log line."""
        message = self.redact_value(line.message, "message", line.category)
        return replace(line, message=message, data=self.redact_value(line.data, "data", line.category))

    def redact_published(self, found: Mapping[str, Published]) -> dict[str, Published]:
        """Redact published values."""
        return {
            key: replace(each, value=self.redact_value(each.value, "published", key)) for key, each in found.items()
        }

    def _redact_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {name: self.redact_value(value, "label", name) for name, value in labels.items()}

    def _redact_error(self, error: ErrorInfo | None, name: str | None = None) -> ErrorInfo | None:
        return None if error is None else ErrorInfo(error.name, self.redact_value(error.message, "error", name))


def redact_limit_details(make: Callable[[str, str], Redaction], details: LimitDetails) -> LimitDetails:
    """Redact a limit and its holds, each as a value of its instance. ``make``: returns the redaction of an instance."""

    def redact_hold(hold: LimitHold) -> LimitHold:
        redaction, name = make(hold.workflow, hold.instance_id), details.limit.name
        key, fair_key = redaction.redact_key(hold.key, name), redaction.redact_key(hold.fair_key, name)
        return replace(hold, key=key, fair_key=fair_key)

    return LimitDetails(
        limit=make("", "").redact_limit(details.limit),
        holders=tuple(map(redact_hold, details.holders)),
        waiting=tuple(map(redact_hold, details.waiting)),
    )
