"""`watch`: follows an instance until it ends, or refreshes a list."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import click

from celery_durable.cli.backends.backend import Backend, ListQuery
from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.commands.follow import Follower, print_update
from celery_durable.cli.inputs import Option, OptionalId, OptionalWorkflow
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import RunRef, Status


@command("watch order order-42", "watch order -s waiting --every 10s", options=[output_option])
def watch(
    backend: OpenBackend,
    console: Output,
    workflow: OptionalWorkflow,
    id: OptionalId,
    status: Annotated[Status | None, Option("-s", "--status", help="List: only instances with this status.")],
    limit: Annotated[
        int, Option("--limit", type=click.IntRange(1, 100), default=25, help="List: maximum number of rows.")
    ],
    every: Annotated[timedelta, Option("--every", default="2s", help="List: time between refreshes.")],
    timeout: Annotated[timedelta | None, Option("--timeout", help="Instance: how long to watch at most.")],
) -> None:
    """Watch an instance until it ends, or a list as it changes.

    Use it to follow progress. For an instance, it prints a line for each step, failed attempt, log line, published
    value and the end, and fails if the instance fails. A terminal shows a published progress value as a bar. For a
    list, it runs until you interrupt it: a terminal refreshes the table, a pipe gets a record for each new or changed
    instance.
    """
    if id is None:
        _watch_list(backend, console, ListQuery(workflow, limit, status), every)
        return
    if status is not None or workflow is None:
        raise click.UsageError("--status is for lists.")
    seen = backend.read_snapshot(workflow, id)
    follower = Follower(backend, RunRef(workflow, id, seen.run_number))
    for update in follower.read_to_end(timeout or None):  # 0 means without limit
        print_update(console, update)
    follower.read_outcome()


def _watch_list(backend: Backend, console: Console, query: ListQuery, every: timedelta) -> None:
    shown_states: dict[tuple[str, str], object] = {}
    while True:
        items = backend.list(query).items
        times = Times(backend.now(), exact=not console.is_for_people)
        if console.is_for_people:
            click.clear()
            about = " ".join(filter(None, [query.workflow, query.status and f"({query.status})"])) or "all workflows"
            console.print_line(
                Styled(about, "bold"), Styled(f"every {every.total_seconds():g} s; Ctrl-C ends it", "dim")
            )
            console.print_table(render.INSTANCE_COLUMNS, [render.instance_cells(item, times) for item in items])
        else:
            for item in reversed(items):
                state = item.status, item.run_number, item.updated_at
                if shown_states.get((item.workflow, item.id)) != state:
                    shown_states[item.workflow, item.id] = state
                    if console.is_json:
                        console.print_json(documents.convert(item), is_line=True)
                    else:
                        console.print_record(*render.instance_cells(item, times))
        backend.runtime.sleep(every.total_seconds())
