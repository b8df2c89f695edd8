"""The lists across all workflows that both programs have: stats and waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import click

from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.inputs import OfWorkflow, Option, RowLimit
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import Count, Stats, Status

_WAIT_COLUMNS = tuple(map(Column, ("EVENT", "WORKFLOW", "ID", "STEP", "SINCE", "TIMES OUT", "STATUS")))


@command("stats", options=[output_option])
def stats(backend: OpenBackend, console: Output) -> None:
    """Count instances by workflow and status.

    Use it for an overview. It also shows how many runs are due and not claimed, since when, and how many messages are
    in the queues. 10000+ means 10,000 or more. In a pipe: count, workflow, status, number; then due, number, since;
    then queue, name, length.
    """
    found, queues = backend.stats()
    oldest = Times(backend.now(), exact=not console.is_for_people).format(found.overdue.oldest)
    if console.is_json:
        console.print_json(documents.stats(found, queues))
    elif console.is_for_people:
        _print_stats(console, found, oldest, queues)
    else:
        for workflow, status, count in found.counts:
            console.print_record("count", workflow, status, str(count))
        console.print_record("due", str(found.overdue.count), oldest)
        for queue, length in queues.items():
            console.print_record("queue", queue, "" if length is None else str(length))


def _print_stats(console: Console, found: Stats, oldest: str, queues: Mapping[str, int | None]) -> None:
    statuses = [status for status in Status if any(each is status for _, each, _ in found.counts)]
    rows: dict[str, dict[Status, Count]] = {}
    for workflow, status, count in found.counts:
        rows.setdefault(workflow, {})[status] = count
    if rows:
        columns = [Column("WORKFLOW"), *(Column(status.upper()) for status in statuses)]
        console.print_table(
            columns, [[name, *(str(row.get(each, "-")) for each in statuses)] for name, row in rows.items()]
        )
        click.echo()
    console.print_line("due now", Styled(str(found.overdue.count), "bold"), oldest and f"the oldest {oldest}")
    for queue, length in queues.items():
        length_text = "unknown: no broker, or the queue does not exist yet" if length is None else f"{length} messages"
        console.print_line(f"queue {queue}", length_text)


@command("waits", "waits --type approval -w order", options=[output_option])
def waits(
    backend: OpenBackend,
    console: Output,
    event_type: Annotated[str | None, Option("-t", "--type", "event_type", help="Only waits for events of this type.")],
    workflow: OfWorkflow,
    limit: RowLimit,
) -> None:
    """List the instances that wait for an event.

    Use it to find where to send an event. Waits of the newest instances come first. In a pipe: type, workflow, id,
    step, since, times out, status of the instance.
    """
    found = backend.waits(workflow=workflow, event_type=event_type, limit=limit)
    cells = Times(backend.now(), exact=not console.is_for_people).cells
    rows = [
        cells(each.event_type, each.ref.workflow, each.ref.instance_id, each.step, each.since, each.until, each.status)
        for each in found
    ]
    nothing = "No instance waits for an event" + (f" of type {event_type!r}." if event_type else ".")
    console.print_list(_WAIT_COLUMNS, rows, document=lambda: documents.waits(found), if_empty=nothing)
