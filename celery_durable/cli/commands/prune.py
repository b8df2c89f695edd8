"""`prune`: deletes instances that ended long ago."""

from __future__ import annotations

from datetime import timedelta

import click

from celery_durable.cli.backends.stored import open_durable
from celery_durable.cli.command import Command
from celery_durable.cli.inputs import DurationInput
from celery_durable.cli.output.console import Console, Styled
from celery_durable.model import TERMINAL, Status


@click.command(
    cls=Command,
    examples=["prune --older-than '90 days'", "prune --older-than '1 h' --workflow order --status complete --yes"],
)
@click.option(
    "--older-than", type=DurationInput(), required=True, help="Only instances that ended at least this long ago."
)
@click.option("--workflow", help="Only instances of this workflow.")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(sorted(str(status) for status in TERMINAL)),
    help="Only instances with this status; repeatable.",
)
@click.option("--yes", is_flag=True, help="Delete them. Without it, they are only counted.")
@click.pass_context
def prune(
    ctx: click.Context, older_than: timedelta, workflow: str | None, statuses: tuple[str, ...], yes: bool
) -> None:
    """Delete instances that ended long ago.

    Use it if durable_retention_seconds was not set, or was set too late. It deletes all runs, steps, events and log
    lines of an instance. Instances that have not ended are never deleted.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    wanted = tuple(Status(status) for status in statuses) or tuple(TERMINAL)
    operations = durable.internals.operations
    if yes:
        deleted = operations.retention.prune(older_than=older_than, workflow=workflow, statuses=wanted)
        console.print_entry(["Deleted", Styled(str(deleted), "bold")])
    else:
        found = operations.retention.count_ended(older_than=older_than, workflow=workflow, statuses=wanted)
        console.print_entry(["Would delete", Styled(str(found), "bold")])
        console.print_note("Nothing was deleted. Add --yes to delete.")
