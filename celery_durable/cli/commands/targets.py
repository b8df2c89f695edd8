"""Commands on several instances: those that the user names, or all that match a condition of `--where`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Annotated, Any

import click

from celery_durable.cli.backends.backend import Backend, ListQuery
from celery_durable.cli.command import Command, command, open_backend
from celery_durable.cli.errors import REFUSED, CliError, convert_error
from celery_durable.cli.inputs import Option, OptionalWorkflow
from celery_durable.cli.output.console import Console, Styled
from celery_durable.commands import Target
from celery_durable.conditions import Condition, read_condition
from celery_durable.errors import DurableError, StoreUnavailable, ValueRefused
from celery_durable.model import InstanceSummary

_PAGE = 100
_MAX_LISTED = 10


class WhereInput(click.ParamType[Condition]):
    """``key=value`` pairs, separated by spaces."""

    name = "CONDITION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        if isinstance(value, Condition):
            return value
        try:
            return read_condition(value)
        except ValueRefused as exc:
            self.fail(str(exc), param, ctx)


_TARGETS = {
    "workflow": OptionalWorkflow,
    "id": Annotated[tuple[str, ...], click.argument("id", nargs=-1)],
    "where": Annotated[
        Condition | None,
        Option(
            "--where",
            type=WhereInput(),
            help="Select all that match: workflow=, status=, error= (name), step= and message= (of the failure), "
            "older= and since= (last change), label.NAME=, separated by spaces.",
        ),
    ],
    "yes": Annotated[bool, Option("--yes", help="With --where: apply the change. Without it, only show the matches.")],
}


def find_matching(backend: Backend, where: Condition) -> Iterator[InstanceSummary]:
    """Yield the instances that match, newest first. They are read page by page."""
    now, cursor = backend.now(), None
    while True:
        page = backend.list(ListQuery(where.workflow, _PAGE, where.listed_status, cursor, where.labels))
        yield from (item for item in page.items if where.matches(item, now))
        cursor = page.cursor
        if cursor is None:
            return


def on_targets(*examples: str) -> Callable[[Callable[..., Sequence[str]]], Command]:
    """Make a command of a function that changes one instance, and returns what it did, as cells.

    It has WORKFLOW ID... and --where, with which it changes the instances that `Condition.selects` for its name.
    """

    def declare(change: Callable[..., Sequence[str]]) -> Command:
        @wraps(change)
        def run(workflow: str | None, id: tuple[str, ...], where: Condition | None, yes: bool, **options: Any) -> None:
            if (where is None) == (not id) or (where is not None and workflow is not None):
                raise click.UsageError("Name the instances, WORKFLOW ID..., or a condition, --where 'workflow=...'.")
            if yes and where is None:
                raise click.UsageError("--yes is for --where.")
            ctx = click.get_current_context()
            backend, console = open_backend(ctx), Console.from_context(ctx)
            apply = partial(_apply_to_each, console, partial(change, backend, **options))
            if where is None:
                assert workflow is not None
                apply([Target(*each.split("/")) if "/" in each else Target(workflow, each) for each in id])
                return
            matching = find_matching(backend, where)
            name = change.__name__
            found = [Target(each.workflow, each.id) for each in matching if where.selects(name, each.status)]
            if yes and found:
                apply(found)
            else:
                _print_matches(console, ctx.info_name, found)
            count = f"{len(found)} instance{'' if len(found) == 1 else 's'}"
            if found and not yes:
                console.print_note(f"Would {ctx.info_name} {count}; nothing was changed. Add --yes to do it.")
            else:
                console.print_note(f"{count}.")

        run.__annotations__ = {**_TARGETS, **change.__annotations__}
        return command(*examples)(run)

    return declare


def _print_matches(console: Console, change: str | None, found: Sequence[Target]) -> None:
    if not console.is_for_people:
        for each in found:
            console.print_record(f"Would {change}", f"{each.workflow}/{each.instance_id}")
        return
    for each in found[:_MAX_LISTED]:
        console.print_line(f"{each.workflow}/{each.instance_id}", indent=2)
    if len(found) > _MAX_LISTED:
        console.print_line(f"and {len(found) - _MAX_LISTED} more", indent=2)


def _apply_to_each(console: Console, action: Callable[[Target], Sequence[str]], targets: Sequence[Target]) -> None:
    """Apply the action to each target. If one of several fails, its error is printed and the others continue."""
    exit_code = 0
    for target in targets:
        try:
            action_done, *details = action(target)
        except StoreUnavailable:  # the other targets would wait for it, too
            raise
        except (DurableError, CliError) as exc:
            if len(targets) == 1:
                raise
            refused = exc if isinstance(exc, CliError) else convert_error(exc)
            refused.show()
            exit_code = exit_code or refused.exit_code or REFUSED
        else:
            console.print_entry([action_done, Styled(f"{target.workflow}/{target.instance_id}", "bold"), *details])
    if exit_code:
        click.get_current_context().exit(exit_code)
