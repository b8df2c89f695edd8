"""`outbox`: lists tasks and outbound events that have not been sent, and retries or drops given-up events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import database_now, open_durable
from celery_durable.cli.command import Command, output_option
from celery_durable.cli.errors import command_line
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.store.outbox import OutboxEntry

_COLUMNS = (
    *map(Column, ("KIND", "NAME", "ID", "WORKFLOW", "INSTANCE", "RUN", "ATTEMPTS", "SINCE", "NEXT")),
    Column("ERROR", keeps_full_text=False, is_optional=True),
)


@click.command(
    cls=Command,
    examples=[
        "outbox",
        "outbox --given-up",
        "outbox --retry 0197f3a2-7f3e-5c11-b1d5-3c1f5a0c9e42",
        "outbox --drop 0197f3a2-7f3e-5c11-b1d5-3c1f5a0c9e42",
    ],
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--given-up", is_flag=True, help="Only outbound events whose attempts are used up.")
@click.option("--retry", is_flag=True, help="Deliver these given-up events again, with new attempts.")
@click.option("--drop", is_flag=True, help="Delete these tasks or events for good.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many at most.")
@output_option
@click.pass_context
def outbox(ctx: click.Context, ids: tuple[str, ...], given_up: bool, retry: bool, drop: bool, limit: int) -> None:
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
    if retry:
        _print_action(console, "To be delivered again", durable.internals.operations.outbox.retry(ids))
    elif drop:
        _print_action(console, "Dropped", durable.internals.operations.outbox.drop(ids))
    else:
        found = durable.internals.operations.outbox.read(given_up=given_up, limit=limit + 1)
        times = Times(database_now(durable), exact=not console.is_for_people)
        console.print_list(
            _COLUMNS,
            [_row(durable, entry, console, times) for entry in found[:limit]],
            document={"outbox": [_document(durable, entry) for entry in found[:limit]]},
            if_empty="No events were given up." if given_up else "The outbox is empty.",
        )
        if len(found) > limit:
            console.print_note(f"There are more: {command_line(ctx, f'outbox --limit {10 * limit}')}")


def _print_action(console: Console, action: str, entries: Sequence[OutboxEntry]) -> None:
    for entry in entries:
        console.print_entry([action, entry.kind.value, Styled(entry.name, "bold"), entry.id])


def _row(durable: Durable, entry: OutboxEntry, console: Console, times: Times) -> list[Cell]:
    ref = entry.ref
    run_cells = ["", "", ""] if ref is None else [ref.workflow, ref.instance_id, str(ref.run_number)]
    given_up: Cell = Styled("given up", "red") if console.is_for_people else ""
    return [
        entry.kind.value,
        Styled(entry.name, "bold"),
        entry.id,
        *run_cells,
        str(entry.attempts),
        times.format(entry.since),
        given_up if entry.is_given_up else times.format(entry.next_at),
        _error(durable, entry) or "",
    ]


def _document(durable: Durable, entry: OutboxEntry) -> documents.Document:
    return {
        "id": entry.id,
        "kind": entry.kind.value,
        "name": entry.name,
        **({} if entry.ref is None else documents.run_of(entry.ref)),
        "attempts": entry.attempts,
        "since": entry.since,
        "nextAt": entry.next_at,
        "error": _error(durable, entry),
    }


def _error(durable: Durable, entry: OutboxEntry) -> Any:
    ref = entry.ref
    redaction = durable.internals.redaction(*(("", "") if ref is None else (ref.workflow, ref.instance_id)))
    return redaction.redact_value(entry.error, "error", entry.name)
