"""The commands that change the database, or many instances in it: migrate, prune, sweep and emit."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import click

from celery_durable.cli.backends.stored import OpenDurable, reaching_database, stored_durable
from celery_durable.cli.command import Output, command
from celery_durable.cli.errors import CliError
from celery_durable.cli.inputs import Context, Option, Payload, WordInput
from celery_durable.cli.output.console import Styled
from celery_durable.explain.remedies import find_remedy
from celery_durable.model import TERMINAL, Status
from celery_durable.store.migrations import migrate as migrations


@command("migrate", "migrate --check", "migrate --sql")
def migrate(
    ctx: Context,
    console: Output,
    sql: Annotated[bool, Option("--sql", help="Print the statements for an empty database instead of running them.")],
    check: Annotated[
        bool, Option("--check", help="Change nothing; fail if tables or columns are missing or outdated.")
    ],
) -> None:
    """Create the tables, or update them.

    Use it once per deploy, before the new workers start. It only adds tables and columns, so workers of the older
    version continue.
    """
    if sql and check:
        raise click.UsageError("--sql and --check exclude each other.")
    durable = stored_durable(ctx)
    with reaching_database():
        if sql:
            click.echo(migrations.render_sql(durable.internals.store), nl=False)
        elif check:
            migrations.check_tables(durable.internals.store)
            console.print_entry(["Up to date", f"revision {migrations.read_revision(durable.internals.store)}"])
        else:
            before, after = migrations.upgrade(durable.internals.store)
            change = f"revision {after}" if before == after else f"revision {before or 'none'} -> {after}"
            console.print_entry(["Up to date" if before == after else "Migrated", change])


@command("prune --older-than '90 days'", "prune --older-than '1 h' --workflow order --status complete --yes")
def prune(
    durable: OpenDurable,
    console: Output,
    older_than: Annotated[
        timedelta, Option("--older-than", required=True, help="Only instances that ended at least this long ago.")
    ],
    workflow: Annotated[str | None, Option("--workflow", help="Only instances of this workflow.")],
    statuses: Annotated[
        tuple[Status, ...],
        Option(
            "--status",
            "statuses",
            type=WordInput(sorted(TERMINAL)),
            help="Only instances with this status; repeatable.",
        ),
    ],
    yes: Annotated[bool, Option("--yes", help="Delete them. Without it, they are only counted.")],
) -> None:
    """Delete instances that ended long ago.

    Use it if durable_retention_seconds was not set, or was set too late. It deletes all runs, steps, events and log
    lines of an instance. Instances that have not ended are never deleted.
    """
    retention = durable.internals.operations.retention
    change = retention.prune if yes else retention.count_ended
    count = change(older_than=older_than, workflow=workflow, statuses=statuses or tuple(TERMINAL))
    console.print_entry(["Deleted" if yes else "Would delete", Styled(str(count), "bold")])
    if not yes:
        console.print_note("Nothing was deleted. Add --yes to delete.")


@command("sweep")
def sweep(durable: OpenDurable, console: Output) -> None:
    """Search once for due work, and send messages to the workers.

    Use it if no dispatcher runs, or from cron. Sweeps may run at the same time, also beside dispatchers. A sweep
    releases a dead worker's run after sweeps have seen its lease expired for the length of a lease. A message counts as
    lost, and is sent again, if it is five seconds old, no worker has taken it, and its queue is empty. Lost Celery
    tasks of steps are not searched. The exit code is 1 if the broker or a queue took no messages.
    """
    console.print_entry(["Published", str(durable.internals.sweeper.sweep_as_only_sweeper())])
    outages = durable.internals.publisher.outages().items()
    if outages:
        sentences = [
            f"{'The broker' if queue is None else 'Queue'} {each.where} takes no messages: {each.error}"
            for queue, each in outages
        ]
        raise CliError(" ".join(sentences), " ".join(dict.fromkeys(find_remedy(each.error) for _, each in outages)))


@command("""emit user.updated --payload '{"user_id": "7"}'""", "emit prices/eur.usd --payload 1.08 --id tick-12")
def emit(
    durable: OpenDurable,
    console: Output,
    topic: Annotated[str, click.argument("topic")],
    payload: Payload,
    id: Annotated[
        str | None, Option("--id", help="Makes emitting idempotent: a run gets an emission with this id once.")
    ],
) -> None:
    """Send a payload to all instances that wait for a topic now.

    Use it to answer wait_for_topic. The emission is not stored for later waits. In a pipe: topic, number of waits.
    """
    resumed = durable.internals.operations.topics.emit(topic, payload, id=id)
    if console.is_for_people:
        waits = f"to {resumed} {'wait' if resumed == 1 else 'waits'}"
        console.print_line("Emitted", Styled(topic, "bold"), waits)
    else:
        console.print_record(topic, str(resumed))
