"""The commands that need the app's database: migrate, prune, sweep, emit, and the lists waiters, leases and outbox."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import (
    OpenDurable,
    database_now,
    open_durable,
    reaching_database,
    stored_durable,
)
from celery_durable.cli.command import Output, command, output_option
from celery_durable.cli.errors import CliError, command_line
from celery_durable.cli.inputs import Context, Cursor, Option, PageLimit, Payload, RowLimit, WordInput
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.insight.explain.due import find_remedy
from celery_durable.model import TERMINAL, RunRef, Status
from celery_durable.store.migrations import migrate as migrations
from celery_durable.store.runs.outbox import OutboxEntry


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


_WAITER_COLUMNS = (
    *map(Column, ("WORKFLOW", "ID", "RUN", "STEP", "SINCE")),
    Column("TIMES OUT", is_optional=True),
)
_LEASE_COLUMNS = tuple(map(Column, ("WORKFLOW", "ID", "RUN", "NODE", "TASK", "LEASE ENDS", "CRASHES")))
_OUTBOX_COLUMNS = (
    *map(Column, ("KIND", "NAME", "ID", "WORKFLOW", "INSTANCE", "RUN", "ATTEMPTS", "SINCE", "NEXT")),
    Column("ERROR", keeps_full_text=False, is_optional=True),
)


def _times(durable: Durable, console: Console) -> Times:
    return Times(database_now(durable), exact=not console.is_for_people)


@command("waiters user.updated", "waiters user.updated --limit 100", options=[output_option])
def waiters(
    durable: OpenDurable,
    console: Output,
    topic: Annotated[str, click.argument("topic")],
    limit: PageLimit,
    cursor: Cursor,
) -> None:
    """List the instances that wait for a topic, oldest first.

    Use it before emit. In a pipe: workflow, id, run, step, since, times out.
    """
    page = durable.internals.operations.topics.waiters(topic, cursor=cursor, limit=limit)
    times = _times(durable, console)
    rows = [
        times.cells(
            each.workflow, Styled(each.instance_id, "bold"), each.run_number, each.step, each.opened_at, each.deadline
        )
        for each in page.items
    ]
    console.print_list(
        _WAITER_COLUMNS,
        rows,
        document=lambda: documents.page("waiters", map(documents.convert, page.items), page.cursor),
        if_empty=f"No instance waits for topic {topic!r}.",
    )
    console.print_more(page.cursor)


@command("leases", options=[output_option])
def leases(durable: OpenDurable, console: Output, limit: RowLimit) -> None:
    """List the runs that workers hold.

    Use it to see which worker holds an instance, and when its lease ends if the worker does not renew it. A sweep
    releases expired leases. In a pipe: workflow, id, run, node, Celery task, end of the lease, consecutive crashes.
    """
    found = durable.internals.operations.stats.leases(limit=limit)
    cells = _times(durable, console).cells
    rows = [cells(*_run_cells(each.ref), each.node, each.task_id, each.lease_until, each.crash_count) for each in found]
    names = {"node": "node", "taskId": "task_id", "leaseUntil": "lease_until", "crashCount": "crash_count"}
    claims = [documents.run_of(each.ref) | documents.fields(each, **names) for each in found]
    console.print_list(_LEASE_COLUMNS, rows, document=lambda: {"leases": claims}, if_empty="No worker holds a run.")


@command(
    "outbox",
    "outbox --given-up",
    "outbox --retry 0197f3a2-7f3e-5c11-b1d5-3c1f5a0c9e42",
    "outbox --drop 0197f3a2-7f3e-5c11-b1d5-3c1f5a0c9e42",
    options=[output_option],
)
def outbox(
    ctx: Context,
    ids: Annotated[tuple[str, ...], click.argument("ids", nargs=-1, metavar="[ID]...")],
    given_up: Annotated[bool, Option("--given-up", help="Only those that are not tried any more.")],
    retry: Annotated[bool, Option("--retry", help="Send these given-up tasks or events again, with new attempts.")],
    drop: Annotated[bool, Option("--drop", help="Delete these tasks or events for good.")],
    limit: Annotated[int, Option("--limit", type=click.IntRange(1, 10000), default=100, help="How many at most.")],
) -> None:
    """List unsent messages, and retry or drop those given up.

    Use it when a task or an outbound event of a step has not arrived. Sent messages are removed from the outbox.
    --retry and --drop change all named ids, or none. In a pipe: kind, name, id, workflow, instance, run, attempts,
    since, next (empty: given up), error; or action, kind, name, id.
    """
    if retry + drop + given_up > 1:
        raise click.UsageError("--retry, --drop and --given-up exclude each other.")
    if bool(ids) is not (retry or drop):
        raise click.UsageError("Name ids together with --retry or --drop only.")
    durable, console = open_durable(ctx), Console.from_context(ctx)
    operations = durable.internals.operations.outbox
    if retry or drop:
        action, changed = ("To be sent again", operations.retry) if retry else ("Dropped", operations.drop)
        for entry in changed(ids):
            console.print_entry([action, entry.kind.value, Styled(entry.name, "bold"), entry.id])
        return
    found = operations.read(given_up=given_up, limit=limit + 1)
    times, empty = _times(durable, console), "No tasks or events were given up." if given_up else "The outbox is empty."
    shown = [(entry, _redacted_error(durable, entry)) for entry in found[:limit]]
    console.print_list(
        _OUTBOX_COLUMNS,
        [_outbox_cells(entry, error, console, times) for entry, error in shown],
        document=lambda: {"outbox": [_outbox_document(entry, error) for entry, error in shown]},
        if_empty=empty,
    )
    if len(found) > limit:
        console.print_note(f"There are more: {command_line(ctx, f'outbox --limit {10 * limit}')}")


def _outbox_cells(entry: OutboxEntry, error: Any, console: Console, times: Times) -> list[Cell]:
    given_up: Cell = Styled("given up", "red") if console.is_for_people else ""
    due = given_up if entry.is_given_up else entry.next_at
    name = Styled(entry.name, "bold")
    return times.cells(
        entry.kind.value, name, entry.id, *_run_cells(entry.ref), entry.attempts, entry.since, due, error or ""
    )


def _outbox_document(entry: OutboxEntry, error: Any) -> documents.Document:
    return {
        **documents.fields(entry, id="id", kind="kind.value", name="name"),
        **({} if entry.ref is None else documents.run_of(entry.ref)),
        **documents.fields(entry, attempts="attempts", since="since", nextAt="next_at"),
        "error": error,
    }


def _redacted_error(durable: Durable, entry: OutboxEntry) -> Any:
    ref = entry.ref
    redaction = durable.internals.redaction(*(("", "") if ref is None else (ref.workflow, ref.instance_id)))
    return redaction.redact_value(entry.error, "error", entry.name)


def _run_cells(ref: RunRef | None) -> tuple[str, str, str]:
    return ("", "", "") if ref is None else (ref.workflow, ref.instance_id, str(ref.run_number))
