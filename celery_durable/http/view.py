"""Builds response bodies from records, after the application's redaction hook has redacted them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_durable.explain import Facts, explain
from celery_durable.model import (
    HistoryPage,
    InstanceDetails,
    InstanceStatus,
    InstanceSummary,
    LogRecord,
    Published,
    StepRecord,
)
from celery_durable.redaction import Redaction
from celery_durable.wire import responses, views


class View:
    """Builds the response bodies for one instance."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def status(self, status: InstanceStatus) -> responses.StatusView:
        """Return the status with the output or the error."""
        return views.status_view(self._redaction.redact_status(status))

    def instance(self, details: InstanceDetails) -> responses.InstanceView:
        """Return an instance without its history."""
        details = self._redaction.redact_details(details)
        row, step = details.instance, details.current_step
        meta: dict[str, Any] = {} if step is None else {"current_step": views.current_step_view(step)}
        meta |= views.running_fields(row.running, row.claimed_by) | views.limit_fields(row.max_run)
        return responses.InstanceView(
            id=row.instance_id,
            details=views.status_view(details.status),
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
        return views.listed_instance(self._redaction.redact_summary(item))

    def item_of_any(self, item: InstanceSummary) -> responses.InstanceOfAny:
        """Return an item of a list of the instances of all workflows."""
        return views.instance_of_any(self._redaction.redact_summary(item))

    def history(self, page: HistoryPage, *, with_run: bool) -> responses.HistoryView:
        """Return a page of each list of a run. ``with_run`` adds the run itself."""
        page = self._redaction.redact_page(page)
        more: dict[str, Any] = {"run": views.run_view(page)} if with_run else {}
        if page.logs is not None:
            more |= {"logs": [views.log_view(line) for line in page.logs.items]} | views.paging_fields(
                "logs", page.logs.cursor
            )
        if page.attempts is not None:
            attempts = [views.attempt_view(attempt) for attempt in page.attempts.items]
            more |= {"attempts": attempts} | views.paging_fields("attempts", page.attempts.cursor)
        return responses.HistoryView(
            run_number=page.run_number,
            steps=[views.step_view(step) for step in page.steps.items],
            events=[views.event_view(event) for event in page.events.items],
            **views.paging_fields("steps", page.steps.cursor),
            **views.paging_fields("events", page.events.cursor),
            **more,
        )

    def step(self, step: StepRecord) -> responses.StepView:
        """Return a step with its result."""
        return views.step_view(self._redaction.redact_step(step))

    def log(self, line: LogRecord) -> responses.LogView:
        """Return a log line with its data."""
        return views.log_view(self._redaction.redact_log(line))

    def published(self, found: Mapping[str, Published]) -> dict[str, responses.PublishedView]:
        """Return published values by key."""
        return views.published_views(self._redaction.redact_published(found))

    def explanation(self, facts: Facts) -> responses.Explanation:
        """Return why the instance is in its current state. Its sentence is built from redacted facts."""
        return views.explanation(explain(self._redaction.redact_facts(facts)))
