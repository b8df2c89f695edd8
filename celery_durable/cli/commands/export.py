"""`export`: prints the complete record of a run as JSON."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import click

from celery_durable.cli.command import OpenBackend, command
from celery_durable.cli.inputs import InstanceId, RunNumber, Workflow
from celery_durable.model import EXPORT_VERSION
from celery_durable.store.watchdog import limit_database_time


@command("export order order-42", "export order order-42 --run 1 --no-logs")
def export(
    backend: OpenBackend,
    workflow: Workflow,
    id: InstanceId,
    run: RunNumber,
    logs: Annotated[bool, click.option("--logs/--no-logs", default=True, help="Include log lines, or leave them out.")],
) -> None:
    """Print the complete record of a run as JSON.

    Use it to archive the history of an instance, to attach it to a bug report, to query it with jq, or to replay it on
    another machine (replay --file). It contains parameters, results and payloads, after the application's redaction.
    """
    seen = backend.read_snapshot(workflow, id)
    assert seen is not None
    with limit_database_time(None):  # a run may be as large as it likes (LAW 7)
        history = backend.history(workflow, id, run=run)
        document = {"version": EXPORT_VERSION, "instance_created_at": seen.created_at, **dataclasses.asdict(history)}
        if logs:
            tail = backend.tail(workflow, id, run=history.run_number)
            document["logs"] = [dataclasses.asdict(line) for line in tail.read_new_lines()]
    click.echo(json.dumps(document, default=encode_json, ensure_ascii=False, indent=2))


def encode_json(value: Any) -> Any:
    """Encode datetimes as ISO 8601 and timedeltas as seconds."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
    raise TypeError(f"{type(value).__name__} cannot be exported")
