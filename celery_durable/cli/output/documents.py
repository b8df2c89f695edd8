"""The JSON that commands print with ``-o json``.

Its fields are those of the HTTP API. docs/reference/cli.md lists them.

The response models of the API are imported when a document is made: a table needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from celery_durable.explain import Diagnosis
from celery_durable.model import (
    AttemptRecord,
    EventWait,
    History,
    InstanceStatus,
    InstanceSummary,
    LogRecord,
    Published,
    RunRef,
    Stats,
    StepRecord,
)
from celery_durable.values import Parameter

Document = dict[str, Any]


Values = Mapping[str, Published]
"""Published values by key."""
Change = StepRecord | AttemptRecord | LogRecord | InstanceStatus | Values
"""What a follower of a run sees: a step, a failed attempt, a log line, the end, or a published value by its key."""


def convert(record: InstanceSummary | History | AttemptRecord | Diagnosis | Change) -> Document:
    """Return a record with the fields that the HTTP API has for it.

    An instance has those of a list, a run has all its steps, events and failed attempts, and an explanation says why an
    instance does not move.
    """
    from celery_durable.wire import views
    from celery_durable.wire.encoding import to_data
    from celery_durable.wire.runs import export_run

    match record:
        case InstanceSummary():
            return {"workflowName": record.workflow, **views.listed_instance(record).to_data()}
        case History():
            return to_data(export_run(record))
        case Diagnosis():
            return views.explanation(record).to_data()
        case StepRecord():
            return views.step_view(record).to_data()
        case AttemptRecord():
            return views.attempt_view(record).to_data()
        case LogRecord():
            return views.log_view(record).to_data()
        case InstanceStatus():
            return views.status_view(record).to_data()
    return {key: view.to_data() for key, view in views.published_views(record).items()}


def workflow(name: str, parameters: Sequence[Parameter]) -> Document:
    """Return a workflow with its parameters."""
    from celery_durable.wire import views

    return views.workflow_view(name, parameters).to_data()


def stats(found: Stats, queues: Mapping[str, int | None]) -> Document:
    """Return counts, due runs and queues."""
    from celery_durable.wire import views

    return views.stats_view(found, queues).to_data()


def waits(found: Sequence[EventWait]) -> Document:
    """Return the steps that wait for an event."""
    from celery_durable.wire import views

    return views.wait_list(found).to_data()


def page(name: str, items: Iterable[Document], cursor: str | None) -> Document:
    """Return a page of a list, with the cursor of the next one."""
    return {name: list(items), **({} if cursor is None else {"cursor": cursor}), "hasNextPage": cursor is not None}


def change(record: Change) -> Document:
    """Return a change of a run."""
    names = {StepRecord: "step", AttemptRecord: "attempt", LogRecord: "log", InstanceStatus: "details"}
    return {names.get(type(record), "published"): convert(record)}


def run_of(ref: RunRef) -> Document:
    """Return the fields that name a run."""
    return {"workflowName": ref.workflow, "instanceId": ref.instance_id, "runNumber": ref.run_number}


def fields(record: object, **attributes: str) -> Document:
    """Return some attributes of a record. Each keyword is the name of a field."""
    return {name: attrgetter(attribute)(record) for name, attribute in attributes.items()}
