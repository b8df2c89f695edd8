"""Commands for operators with access to the database: stats, waits, leases and sweep."""

from __future__ import annotations

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import database_now, open_durable
from celery_durable.cli.command import Command, output_option
from celery_durable.cli.errors import CliError
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.explain.remedies import find_remedy
from celery_durable.model import Status

_LIMIT = click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Maximum number of rows."
)
_WAIT_COLUMNS = tuple(map(Column, ("EVENT", "WORKFLOW", "ID", "STEP", "SINCE", "TIMES OUT", "STATUS")))
_LEASE_COLUMNS = tuple(map(Column, ("WORKFLOW", "ID", "RUN", "NODE", "TASK", "LEASE ENDS", "CRASHES")))


@click.command(cls=Command, examples=["stats"])
@output_option
@click.pass_context
def stats(ctx: click.Context) -> None:
    """Count instances by workflow and status.

    Use it for an overview. It also shows how many runs are due and not claimed, since when, and how many messages are
    in the queues. In a pipe: count, workflow, status, number; then due, number, since; then queue, name, length.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    durable.app.loader.import_default_modules()
    found = durable.internals.operations.stats.read()
    times = Times(database_now(durable), exact=not console.is_for_people)
    queues = {queue: durable.internals.publisher.queue_length(queue) for queue in _queues(durable)}
    oldest = times.format(found.overdue.oldest)
    if console.is_json:
        document = {
            "instances": [
                {"workflowName": workflow, "status": status, "count": count} for workflow, status, count in found.counts
            ],
            "due": {"count": found.overdue.count, "oldest": found.overdue.oldest},
            "queues": [{"name": queue, "messages": length} for queue, length in queues.items()],
        }
        console.print_json(document)
        return
    if not console.is_for_people:
        for workflow, status, count in found.counts:
            console.print_record("count", workflow, status, str(count))
        console.print_record("due", str(found.overdue.count), oldest)
        for queue, length in queues.items():
            console.print_record("queue", queue, "" if length is None else str(length))
        return
    statuses = [status for status in Status if any(each is status for _, each, _ in found.counts)]
    rows: dict[str, dict[Status, int]] = {}
    for workflow, status, count in found.counts:
        rows.setdefault(workflow, {})[status] = count
    if rows:
        columns = [Column("WORKFLOW"), *(Column(status.upper()) for status in statuses)]
        console.print_table(
            columns, [[name, *(str(row.get(each, "-")) for each in statuses)] for name, row in rows.items()]
        )
        console.print_blank_line()
    console.print_line("due now", Styled(str(found.overdue.count), "bold"), oldest and f"the oldest {oldest}")
    for queue, length in queues.items():
        length_text = "unknown: no broker, or the queue does not exist yet" if length is None else f"{length} messages"
        console.print_line(f"queue {queue}", length_text)


def _queues(durable: Durable) -> list[str]:
    known = (durable.internals.registry.get(name).queue for name in sorted(durable.internals.registry))
    return sorted({durable.internals.settings.queue, *(queue for queue in known if queue)})


@click.command(cls=Command, examples=["waits", "waits --type approval -w order"])
@click.option("-t", "--type", "event_type", help="Only waits for events of this type.")
@click.option("-w", "--workflow", help="Only instances of this workflow.")
@_LIMIT
@output_option
@click.pass_context
def waits(ctx: click.Context, event_type: str | None, workflow: str | None, limit: int) -> None:
    """List the instances that wait for an event.

    Use it to find where to send an event. Waits of the newest instances come first. In a pipe: type, workflow, id,
    step, since, times out, status of the instance.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    found = durable.internals.operations.stats.waits(workflow=workflow, event_type=event_type, limit=limit)
    times = Times(database_now(durable), exact=not console.is_for_people)
    rows: list[list[Cell]] = [
        [
            each.event_type,
            each.ref.workflow,
            each.ref.instance_id,
            each.step,
            times.format(each.since),
            times.format(each.until),
            render.style_status(each.status),
        ]
        for each in found
    ]
    waiting = [
        {
            **documents.run_of(each.ref),
            "status": each.status,
            "waitEventType": each.event_type,
            "stepName": each.step,
            "since": each.since,
            "wakeAt": each.until,
        }
        for each in found
    ]
    nothing = "No instance waits for an event" + (f" of type {event_type!r}." if event_type else ".")
    console.print_list(_WAIT_COLUMNS, rows, document={"waits": waiting}, if_empty=nothing)


@click.command(cls=Command, examples=["leases"])
@_LIMIT
@output_option
@click.pass_context
def leases(ctx: click.Context, limit: int) -> None:
    """List the runs that workers hold.

    Use it to see which worker holds an instance, and when its lease ends if the worker does not renew it. A sweep
    releases expired leases. In a pipe: workflow, id, run, node, Celery task, end of the lease, consecutive crashes.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    found = durable.internals.operations.stats.leases(limit=limit)
    times = Times(database_now(durable), exact=not console.is_for_people)
    rows = [
        [
            each.ref.workflow,
            each.ref.instance_id,
            str(each.ref.run_number),
            each.node,
            each.task_id,
            times.format(each.lease_until),
            str(each.crash_count),
        ]
        for each in found
    ]
    claims = [
        {
            **documents.run_of(each.ref),
            "node": each.node,
            "taskId": each.task_id,
            "leaseUntil": each.lease_until,
            "crashCount": each.crash_count,
        }
        for each in found
    ]
    console.print_list(_LEASE_COLUMNS, rows, document={"leases": claims}, if_empty="No worker holds a run.")


@click.command(cls=Command, examples=["sweep"])
@click.pass_context
def sweep(ctx: click.Context) -> None:
    """Search once for due work, and send messages to the workers.

    Use it if no dispatcher runs, or from cron. Sweeps may run at the same time, also beside dispatchers. A sweep
    releases a dead worker's run after sweeps have seen its lease expired for the length of a lease. A message counts as
    lost, and is sent again, if it is five seconds old, no worker has taken it, and its queue is empty. Lost Celery
    tasks of steps are not searched. The exit code is 1 if the broker or a queue took no messages.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    published = durable.internals.sweeper.sweep_as_only_sweeper()
    console.print_entry(["Published", str(published)])
    outages = durable.internals.publisher.outages().items()
    if outages:
        sentences = [
            f"{'The broker' if queue is None else 'Queue'} {each.where} takes no messages: {each.error}"
            for queue, each in outages
        ]
        raise CliError(" ".join(sentences), " ".join(dict.fromkeys(find_remedy(each.error) for _, each in outages)))
