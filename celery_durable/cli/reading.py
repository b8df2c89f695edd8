"""The verbs that only look, ls and logs; they know instances of workflows that this process has never heard of."""

from __future__ import annotations

from functools import partial

import click

from celery_durable.app import Durable
from celery_durable.cli import render
from celery_durable.cli.follow import LOGS_PER_PAGE, LOOK_SECONDS, lines_after
from celery_durable.cli.render import Times
from celery_durable.cli.screen import Screen
from celery_durable.cli.verb import Verb, database_now, open_durable
from celery_durable.model import LogLevel, Status

_LEVELS = list(LogLevel)  # from the least to the most important


@click.command(
    cls=Verb,
    examples=["ls", "ls -w order -s errored", "ls --limit 100 --cursor WyJpIiwgNDJd"],
)
@click.option("-w", "--workflow", help="Only instances of this workflow.")
@click.option("-s", "--status", type=click.Choice([str(status) for status in Status]), help="Only in this status.")
@click.option("--limit", type=click.IntRange(1, 1000), default=25, show_default=True, help="How many at most.")
@click.option("--cursor", help="Go on after an earlier page; it printed the cursor.")
@click.pass_context
def ls(ctx: click.Context, workflow: str | None, status: str | None, limit: int, cursor: str | None) -> None:
    """List instances, newest first.

    Use it to find an id, or what is in trouble. Piped: workflow, id, status, run, created, changed, next time due,
    error.
    """
    durable, screen = open_durable(ctx), Screen.of(ctx)
    wanted = None if status is None else Status(status)
    page = durable.operations.list(workflow, status=wanted, cursor=cursor, limit=limit)
    times = Times(database_now(durable), exact=not screen.is_terminal)
    if page.items:
        screen.table(render.INSTANCE_COLUMNS, [render.instance_cells(item, times) for item in page.items])
    else:
        described = (f" {status}" if status else "") + " instances" + (f" of workflow {workflow!r}" if workflow else "")
        screen.aside(f"No{described}.")
    if page.cursor is not None:
        screen.aside(f"There are more: --cursor {page.cursor}")


@click.command(
    cls=Verb,
    examples=["logs order order-42", "logs order order-42 -f", "logs order order-42 --level warn --category payments"],
)
@click.argument("workflow")
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--run", type=click.IntRange(1), help="A run before the current one.")
@click.option("--level", type=click.Choice([str(level) for level in _LEVELS]), help="This level and above.")
@click.option("--category", help="Only lines of this category.")
@click.option("--replays", is_flag=True, help="Also what was said again when the workflow's code was replayed.")
@click.pass_context
def logs(
    ctx: click.Context,
    workflow: str,
    id: str,
    follow: bool,
    run: int | None,
    level: str | None,
    category: str | None,
    replays: bool,
) -> None:
    """Show what an instance has logged.

    Use it to read what step.log and the engine said, oldest first; times are UTC. Piped: time, level, category, message
    with its data.
    """
    durable, screen = open_durable(ctx), Screen.of(ctx)
    wanted = None if level is None else _LEVELS[_LEVELS.index(LogLevel(level)) :]
    number = durable.operations.history(workflow, id, run=run).run_number
    read = partial(
        durable.operations.logs, workflow, id, run=number, limit=LOGS_PER_PAGE, levels=wanted, category=category
    )
    seen = 0
    while True:
        is_over = not follow or _is_over(durable, workflow, id, number)
        for line in lines_after(seen, read):
            seen = line.id
            if replays or not line.is_replay:
                screen.entry(render.log_cells(line))
        if is_over:
            if not seen:
                screen.aside("No log lines.")
            return
        durable.runtime.sleep(LOOK_SECONDS)


def _is_over(durable: Durable, workflow: str, instance_id: str, run: int) -> bool:
    row = durable.operations.get(workflow, instance_id).instance
    return row.status.is_terminal or row.run_number != run
