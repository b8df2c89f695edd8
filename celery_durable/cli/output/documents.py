"""The JSON that commands print with ``-o json``. Its fields are those of the HTTP API; docs/cli.md lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from celery_durable.model import History, InstanceSummary, LogRecord, Published, RunRef
from celery_durable.wire import views

Document = dict[str, Any]


def instance(item: InstanceSummary) -> Document:
    """Return an instance in a list."""
    return {"workflowName": item.workflow, **views.listed_instance(item).to_data()}


def page(name: str, items: Iterable[Document], cursor: str | None) -> Document:
    """Return a page of a list, with the cursor of the next one."""
    return {name: list(items), **({} if cursor is None else {"cursor": cursor}), "hasNextPage": cursor is not None}


def run(history: History) -> Document:
    """Return a run with all its steps and events."""
    return {
        "workflowName": history.workflow,
        "instanceId": history.instance_id,
        "runNumber": history.run_number,
        "run": views.run_view(history).to_data(),
        "steps": [views.step_view(step).to_data() for step in history.steps],
        "events": [views.event_view(event).to_data() for event in history.events],
    }


def logs(lines: Iterable[LogRecord]) -> list[Document]:
    """Return log lines."""
    return [views.log_view(line).to_data() for line in lines]


def published(found: Mapping[str, Published]) -> Document:
    """Return published values by key."""
    return {key: view.to_data() for key, view in views.published_views(found).items()}


def run_of(ref: RunRef) -> Document:
    """Return the fields that name a run."""
    return {"workflowName": ref.workflow, "instanceId": ref.instance_id, "runNumber": ref.run_number}


def fields(record: object, **attributes: str) -> Document:
    """Return some attributes of a record. Each keyword is the name of a field."""
    return {name: attrgetter(attribute)(record) for name, attribute in attributes.items()}
