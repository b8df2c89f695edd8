"""The JSON that commands print with ``-o json``. Its fields are those of the HTTP API; docs/cli.md lists them.

The response models of the API are imported when a document is made: a table needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from celery_durable.explain import Diagnosis
from celery_durable.model import History, InstanceStatus, InstanceSummary, LogRecord, Published, RunRef, StepRecord

Document = dict[str, Any]


def instance(item: InstanceSummary) -> Document:
    """Return an instance in a list."""
    from celery_durable.wire import views

    return {"workflowName": item.workflow, **views.listed_instance(item).to_data()}


def page(name: str, items: Iterable[Document], cursor: str | None) -> Document:
    """Return a page of a list, with the cursor of the next one."""
    return {name: list(items), **({} if cursor is None else {"cursor": cursor}), "hasNextPage": cursor is not None}


def run(history: History) -> Document:
    """Return a run with all its steps and events."""
    from celery_durable.wire import views

    return {
        "workflowName": history.workflow,
        "instanceId": history.instance_id,
        "runNumber": history.run_number,
        "run": views.run_view(history).to_data(),
        "steps": [views.step_view(step).to_data() for step in history.steps],
        "events": [views.event_view(event).to_data() for event in history.events],
    }


def log(line: LogRecord) -> Document:
    """Return a log line."""
    from celery_durable.wire import views

    return views.log_view(line).to_data()


def published(found: Mapping[str, Published]) -> Document:
    """Return published values by key."""
    from celery_durable.wire import views

    return {key: view.to_data() for key, view in views.published_views(found).items()}


Change = StepRecord | LogRecord | InstanceStatus | Mapping[str, Published]
"""What a follower of a run sees: a step, a log line, the end, or a published value by its key."""


def change(record: Change) -> Document:
    """Return a change of a run."""
    from celery_durable.wire import views

    match record:
        case StepRecord():
            return {"step": views.step_view(record).to_data()}
        case LogRecord():
            return {"log": log(record)}
        case InstanceStatus():
            return {"details": views.status_view(record).to_data()}
    return {"published": published(record)}


def explanation(diagnosis: Diagnosis) -> Document:
    """Return why an instance does not move."""
    from celery_durable.wire import views

    return views.explanation(diagnosis).to_data()


def run_of(ref: RunRef) -> Document:
    """Return the fields that name a run."""
    return {"workflowName": ref.workflow, "instanceId": ref.instance_id, "runNumber": ref.run_number}


def fields(record: object, **attributes: str) -> Document:
    """Return some attributes of a record. Each keyword is the name of a field."""
    return {name: attrgetter(attribute)(record) for name, attribute in attributes.items()}
