"""The JSON that commands print with ``-o json``: the fields of the HTTP API, in docs/reference/cli.md.

What makes JSON of records is imported when a document is made: a table does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from celery_durable.model import (
    AttemptRecord,
    History,
    InstanceStatus,
    LogRecord,
    Published,
    Record,
    RunRef,
    StepRecord,
)

Document = dict[str, Any]


Values = Mapping[str, Published]
Change = StepRecord | AttemptRecord | LogRecord | InstanceStatus | Values
"""What a follower of a run sees: a step, a failed attempt, a log line, the end, or a published value by its key."""


def convert(record: Record | Values) -> Document:
    """Return the JSON of a record. A run has all its steps, events and failed attempts."""
    from celery_durable.wire.encoding import export_run, to_data

    if isinstance(record, Record):
        return to_data(export_run(record) if isinstance(record, History) else record)
    return {key: to_data(each) for key, each in record.items()}


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
