"""The commands on limits: `limits` lists them, `limits show` and `limits set` read and change one."""

from __future__ import annotations

from typing import Annotated

import click

from celery_durable.cli import CommandGroup
from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.commands.changes import require_name
from celery_durable.cli.inputs import Cursor, Option, PageLimit
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import LimitHold, LimitRecord, format_duration
from celery_durable.wire.requests import ChangeLimit

LimitName = Annotated[str, click.argument("name")]
_COLUMNS = (
    Column("LIMIT"),
    Column("KEY", is_optional=True),
    *map(Column, ("HELD", "AT ONCE", "WAITING")),
    *(Column(title, is_optional=True) for title in ("LONGEST WAIT", "RATE", "SET BY")),
)
_HOLD_COLUMNS = (
    *map(Column, ("WORKFLOW", "ID", "RUN", "STEP")),
    Column("ITEM", is_optional=True),
    Column("FAIR", is_optional=True),
    Column("SINCE"),
)


class LimitCommands(CommandGroup):
    """`limits` without the name of a command is `limits list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx)):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=LimitCommands,
    module_by_command={"list": "limits.list_limits", "show": "limits.show_limit", "set": "limits.set_limit"},
    epilog="""\b
Examples:
  celery -A proj durable limits
  celery -A proj durable limits show stripe
  celery -A proj durable limits set stripe --at-once 40""",
)
def limits() -> None:
    """List limits, show who holds and awaits one, and change its numbers.

    Use it when instances wait for limits. Without the name of a command, it lists all limits.
    """


@command("limits list", "limits list --limit 100 -o json", options=[output_option])
def list_limits(backend: OpenBackend, console: Output, limit: PageLimit, cursor: Cursor) -> None:
    """List the limits that steps have asked for.

    Use it to see which limits are used up. A limit with keys has a row for each key. In a pipe: name, key, held, at
    once, waiting, longest wait, rate, who has set the numbers.
    """
    page = backend.limits(cursor=cursor, limit=limit)
    console.print_list(
        _COLUMNS,
        [_cells(each) for each in page.items],
        document=lambda: documents.page("limits", map(documents.convert, page.items), page.cursor),
        if_empty="No step has asked for a limit yet.",
    )
    console.print_more(page.cursor)


def _cells(limit: LimitRecord) -> list[Cell]:
    wait = limit.longest_wait
    return [
        Styled(limit.name, "bold"),
        limit.key,
        str(limit.held),
        "" if limit.at_once is None else str(limit.at_once),
        str(limit.waiting),
        "" if wait is None else format_duration(wait),
        limit.rate or "",
        limit.set_by or "",
    ]


@command("limits show stripe", "limits show tenant --key acme", options=[output_option])
def show_limit(
    backend: OpenBackend,
    console: Output,
    name: LimitName,
    key: Annotated[str, Option("--key", default="", show_default=False, help="One key of a limit that has keys.")],
) -> None:
    """Show who holds a limit, and who waits for it.

    Use it to find what the waiting steps wait for. It lists up to 100 holders, longest first, and the first 20 that
    wait. In a pipe: limit, and the fields of list; then holder or waiting, workflow, id, run, step, item, fair, since.
    """
    found = backend.limit(name, key)
    if console.is_json:
        console.print_json(documents.convert(found))
        return
    if console.is_for_people:
        console.print_table(_COLUMNS, [_cells(found.limit)])
    else:
        console.print_record("limit", *_cells(found.limit))
    times = Times(backend.now(), exact=not console.is_for_people)
    for kind, holds in (("holder", found.holders), ("waiting", found.waiting)):
        if console.is_for_people and holds:
            console.print_heading("HELD BY" if kind == "holder" else "WAITING")
        console.print_section(kind, _HOLD_COLUMNS, [_hold_cells(each, times) for each in holds])


def _hold_cells(hold: LimitHold, times: Times) -> list[Cell]:
    step, item = hold.step_key or "", "" if hold.position is None else str(hold.position)
    return times.cells(hold.workflow, hold.instance_id, hold.run_number, step, item, hold.fair_key, hold.since)


@command(
    "limits set stripe --at-once 40 --rate '120 per second'",
    "limits set tenant --key acme --at-once 2",
    "limits set stripe --reset",
)
def set_limit(
    backend: OpenBackend,
    console: Output,
    name: LimitName,
    at_once: Annotated[int | None, Option("--at-once", type=click.IntRange(1), help="How many hold it at once.")],
    rate: Annotated[str | None, Option("--rate", help="How many start in a time, such as '90 per second'.")],
    reset: Annotated[bool, Option("--reset", help="Let the numbers of the code count again.")],
    key: Annotated[str | None, Option("--key", help="Only this key; by default all keys, also later ones.")],
    by: Annotated[str | None, Option("--by", help="Your name, stored with the limit; by default the user.")],
) -> None:
    """Change the numbers of a limit, until you reset them.

    Use it when a service allows more or less than the code says. What you leave out stays as it is. A lower number
    stops no step that runs; with a higher one, waiting steps continue at once.
    """
    if reset is (at_once is not None or rate is not None):
        raise click.UsageError("Give --at-once, --rate, or both; or --reset.")
    backend.change_limit(name, ChangeLimit(at_once=at_once, rate=rate, reset=reset, key=key, by=require_name(by)))
    numbers = [*([] if at_once is None else [f"{at_once} at once"]), *([] if rate is None else [rate])]
    console.print_entry(["Reset" if reset else "Set", Styled(name, "bold"), *([key] if key else []), *numbers])
