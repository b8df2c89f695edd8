"""The commands of topics: emit and waiters."""

from __future__ import annotations

from typing import Any

import click

from celery_durable.cli.backends.stored import database_now, open_durable
from celery_durable.cli.command import Command, output_option
from celery_durable.cli.inputs import JsonInput
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import RunRef

_COLUMNS = (
    Column("WORKFLOW"),
    Column("ID"),
    Column("RUN"),
    Column("STEP"),
    Column("SINCE"),
    Column("TIMES OUT", is_optional=True),
)


@click.command(
    cls=Command,
    examples=["""emit user.updated --payload '{"user_id": "7"}'""", "emit prices/eur.usd --payload 1.08 --id tick-12"],
)
@click.argument("topic")
@click.option(
    "--payload",
    type=JsonInput(),
    metavar="JSON|@file|-",
    help="The payload as JSON, from a file, or from standard input.",
)
@click.option("--id", "id", help="Makes emitting idempotent: a run gets an emission with this id once.")
@click.pass_context
def emit(ctx: click.Context, topic: str, payload: Any, id: str | None) -> None:
    """Send a payload to all instances that wait for a topic now.

    Use it to answer wait_for_topic. The emission is not stored for later waits. In a pipe: topic, number of waits.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    resumed = durable.internals.operations.topics.emit(topic, payload, id=id)
    if not console.is_for_people:
        console.print_record(topic, str(resumed))
        return
    console.print_entry(["Emitted", Styled(topic, "bold"), f"to {resumed} {'wait' if resumed == 1 else 'waits'}"])


@click.command(cls=Command, examples=["waiters user.updated", "waiters user.updated --limit 100"])
@click.argument("topic")
@click.option("--limit", type=click.IntRange(1, 1000), default=25, show_default=True, help="Maximum number of rows.")
@click.option("--cursor", help="The cursor that the previous page printed.")
@output_option
@click.pass_context
def waiters(ctx: click.Context, topic: str, limit: int, cursor: str | None) -> None:
    """List the instances that wait for a topic, oldest first.

    Use it before emit. In a pipe: workflow, id, run, step, since, times out.
    """
    durable, console = open_durable(ctx), Console.from_context(ctx)
    page = durable.internals.operations.topics.waiters(topic, cursor=cursor, limit=limit)
    times = Times(database_now(durable), exact=not console.is_for_people)
    rows: list[list[Cell]] = []
    waiting: list[documents.Document] = []
    for each in page.items:
        rows.append([
            each.workflow, Styled(each.instance_id, "bold"), str(each.run_number), each.step,
            times.format(each.opened_at), times.format(each.deadline),
        ])  # fmt: skip
        waiting.append(
            documents.run_of(RunRef(each.workflow, each.instance_id, each.run_number))
            | {"stepName": each.step, "openedAt": each.opened_at, "deadline": each.deadline}
        )
    console.print_list(
        _COLUMNS,
        rows,
        document=documents.page("waiters", waiting, page.cursor),
        if_empty=f"No instance waits for topic {topic!r}.",
    )
    console.print_more(page.cursor)
