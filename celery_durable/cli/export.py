"""`export`: all that is recorded of a run, as JSON."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timedelta
from typing import Any

import click

from celery_durable.cli.verb import Verb, open_backend
from celery_durable.model import iso

VERSION = 1


@click.command(cls=Verb, examples=["export order order-42", "export order order-42 --run 1 --no-logs"])
@click.argument("workflow")
@click.argument("id")
@click.option("--run", type=click.IntRange(1), help="A run before the current one.")
@click.option("--logs/--no-logs", default=True, help="With the log lines, or without them.")
@click.pass_context
def export(ctx: click.Context, workflow: str, id: str, run: int | None, logs: bool) -> None:
    """Print all that is recorded of a run as JSON.

    Use it to keep the history of an instance, to attach it to a bug report, or to look into it with jq. Holds
    parameters, results and payloads as they are stored.
    """
    backend = open_backend(ctx)
    told = backend.history(workflow, id, run=run)
    said = {"version": VERSION, **dataclasses.asdict(told)}
    if logs:
        tail = backend.tail(workflow, id, run=told.run_number)
        said["logs"] = [dataclasses.asdict(line) for line in tail.news()]
    click.echo(json.dumps(said, default=_plain, ensure_ascii=False, indent=2))


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return iso(value)
        case timedelta():
            return value.total_seconds()
    raise TypeError(f"{type(value).__name__} is no part of a history")
