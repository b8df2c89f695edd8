"""The lists for operators with access to the database: stats, waits, waiters, leases and outbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import OpenDurable, database_now, open_durable
from celery_durable.cli.command import Output, command, output_option
from celery_durable.cli.errors import command_line
from celery_durable.cli.inputs import Context, Cursor, OfWorkflow, PageLimit, RowLimit, flag, option
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import RunRef, Status
from celery_durable.operations.stats import Stats
from celery_durable.store.outbox import OutboxEntry

_WAIT_COLUMNS = tuple(map(Column, ("EVENT", "WORKFLOW", "ID", "STEP", "SINCE", "TIMES OUT", "STATUS")))
_WAITER_COLUMNS = (
    *map(Column, ("WORKFLOW", "ID", "RUN", "STEP", "SINCE")),
    Column("TIMES OUT", is_optional=True),
)
_LEASE_COLUMNS = tuple(map(Column, ("WORKFLOW", "ID", "RUN", "NODE", "TASK", "LEASE ENDS", "CRASHES")))
_OUTBOX_COLUMNS = (
    *map(Column, ("KIND", "NAME", "ID", "WORKFLOW", "INSTANCE", "RUN", "ATTEMPTS", "SINCE", "NEXT")),
    Column("ERROR", keeps_full_text=False, is_optional=True),
)


@command("stats", options=[output_option])
def stats(durable: OpenDurable, console: Output) -> None:
    """Count instances by workflow and status.

    Use it for an overview. It also shows how many runs are due and not claimed, since when, and how many messages are
    in the queues. In a pipe: count, workflow, status, number; then due, number, since; then queue, name, length.
    """
    durable.app.loader.import_default_modules()
    found = durable.internals.operations.stats.read()
    oldest = _times(durable, console).format(found.overdue.oldest)
    queues = {queue: durable.internals.publisher.queue_length(queue) for queue in _queues(durable)}
    if console.is_json:
        counts = [{"workflowName": name, "status": status, "count": count} for name, status, count in found.counts]
        lengths = [{"name": queue, "messages": length} for queue, length in queues.items()]
        due = documents.fields(found.overdue, count="count", oldest="oldest")
        console.print_json({"instances": counts, "due": due, "queues": lengths})
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


def _times(durable: Durable, console: Console) -> Times:
    return Times(database_now(durable), exact=not console.is_for_people)


@command("waits", "waits --type approval -w order", options=[output_option])
def waits(
    durable: OpenDurable,
    console: Output,
    event_type: Annotated[str | None, option("-t", "--type", "event_type", help="Only waits for events of this type.")],
    workflow: OfWorkflow,
    limit: RowLimit,
) -> None:
    """List the instances that wait for an event.

    Use it to find where to send an event. Waits of the newest instances come first. In a pipe: type, workflow, id,
    step, since, times out, status of the instance.
    """
    found = durable.internals.operations.stats.waits(workflow=workflow, event_type=event_type, limit=limit)
    cells = _times(durable, console).cells
    rows = [
        cells(each.event_type, each.ref.workflow, each.ref.instance_id, each.step, each.since, each.until, each.status)
        for each in found
    ]
    names = {"status": "status", "waitEventType": "event_type", "stepName": "step", "since": "since", "wakeAt": "until"}
    waiting = [documents.run_of(each.ref) | documents.fields(each, **names) for each in found]
    nothing = "No instance waits for an event" + (f" of type {event_type!r}." if event_type else ".")
    console.print_list(_WAIT_COLUMNS, rows, document={"waits": waiting}, if_empty=nothing)


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
    rows: list[list[Cell]] = []
    waiting: list[documents.Document] = []
    for each in page.items:
        ref = RunRef(each.workflow, each.instance_id, each.run_number)
        name = Styled(each.instance_id, "bold")
        rows.append(times.cells(each.workflow, name, each.run_number, each.step, each.opened_at, each.deadline))
        fields = documents.fields(each, stepName="step", openedAt="opened_at", deadline="deadline")
        waiting.append(documents.run_of(ref) | fields)
    document = documents.page("waiters", waiting, page.cursor)
    console.print_list(_WAITER_COLUMNS, rows, document=document, if_empty=f"No instance waits for topic {topic!r}.")
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
    console.print_list(_LEASE_COLUMNS, rows, document={"leases": claims}, if_empty="No worker holds a run.")


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
    given_up: Annotated[bool, flag("--given-up", help="Only outbound events whose attempts are used up.")],
    retry: Annotated[bool, flag("--retry", help="Deliver these given-up events again, with new attempts.")],
    drop: Annotated[bool, flag("--drop", help="Delete these tasks or events for good.")],
    limit: Annotated[int, option("--limit", type=click.IntRange(1, 10000), default=100, help="How many at most.")],
) -> None:
    """List unsent messages, and retry or drop given-up events.

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
        action, changed = ("To be delivered again", operations.retry) if retry else ("Dropped", operations.drop)
        for entry in changed(ids):
            console.print_entry([action, entry.kind.value, Styled(entry.name, "bold"), entry.id])
        return
    found = operations.read(given_up=given_up, limit=limit + 1)
    times, empty = _times(durable, console), "No events were given up." if given_up else "The outbox is empty."
    shown = [(entry, _redacted_error(durable, entry)) for entry in found[:limit]]
    console.print_list(
        _OUTBOX_COLUMNS,
        [_outbox_cells(entry, error, console, times) for entry, error in shown],
        document={"outbox": [_outbox_document(entry, error) for entry, error in shown]},
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
