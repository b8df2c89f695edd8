"""The lists for operators with access to the database: waiters, leases and outbox."""

from __future__ import annotations

from typing import Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import OpenDurable, database_now, open_durable
from celery_durable.cli.command import Output, command, output_option
from celery_durable.cli.errors import command_line
from celery_durable.cli.inputs import Context, Cursor, Option, PageLimit, RowLimit
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import RunRef
from celery_durable.store.runs.outbox import OutboxEntry

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
    rows: list[list[Cell]] = []
    waiting: list[documents.Document] = []
    for each in page.items:
        ref = RunRef(each.workflow, each.instance_id, each.run_number)
        name = Styled(each.instance_id, "bold")
        rows.append(times.cells(each.workflow, name, each.run_number, each.step, each.opened_at, each.deadline))
        fields = documents.fields(each, stepName="step", openedAt="opened_at", deadline="deadline")
        waiting.append(documents.run_of(ref) | fields)
    document, empty = documents.page("waiters", waiting, page.cursor), f"No instance waits for topic {topic!r}."
    console.print_list(_WAITER_COLUMNS, rows, document=lambda: document, if_empty=empty)
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
