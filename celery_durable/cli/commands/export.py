"""`export`: prints the complete record of a run as JSON."""

from __future__ import annotations

import json
from typing import Annotated

import click

from celery_durable.cli.command import OpenBackend, command
from celery_durable.cli.inputs import InstanceId, RunNumber, Workflow
from celery_durable.model import RunRef
from celery_durable.wire.encoding import to_data
from celery_durable.wire.runs import export_run


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
    from celery_durable.store.engine.time_limits import limit_database_time  # with it comes SQLAlchemy

    with limit_database_time(None):  # a run may be as large as it likes (LAW 7)
        history = backend.history(workflow, id, run=run)
        read_logs = backend.tail(RunRef(workflow, id, history.run_number))() if logs else None
        lines = None if read_logs is None else list(read_logs)
    click.echo(json.dumps(to_data(export_run(history, lines)), ensure_ascii=False, indent=2))
