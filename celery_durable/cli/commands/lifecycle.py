"""The commands pause, resume, wake, terminate and restart, for one instance, several, or all that match a condition."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from celery_durable import commands
from celery_durable.cli.backends.backend import Backend
from celery_durable.cli.command import Command, open_backend
from celery_durable.cli.commands.where import Condition, WhereInput, find_matching
from celery_durable.cli.errors import REFUSED, CliError, convert_error
from celery_durable.cli.output.console import Console, Styled
from celery_durable.commands import Target
from celery_durable.errors import DurableError
from celery_durable.model import TERMINAL, Status
from celery_durable.wire import requests

Action = Callable[[Backend, Target], Sequence[str]]
"""Changes one instance and returns the cells to print."""
_UNFINISHED = frozenset(Status) - TERMINAL
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Targets:
    """The instances that the user selected: those named by ``ids``, or all that match ``where``."""

    ctx: click.Context
    workflow: str | None
    ids: tuple[str, ...]
    where: Condition | None
    yes: bool

    def apply(self, action: Action, statuses: frozenset[Status] | set[Status]) -> None:
        """Apply the action to the named instances, or to all that match the condition and have one of ``statuses``."""
        if (self.where is None) == (not self.ids) or (self.where is not None and self.workflow is not None):
            raise click.UsageError("Name the instances, WORKFLOW ID..., or a condition, --where 'workflow=...'.")
        if self.yes and self.where is None:
            raise click.UsageError("--yes is for --where.")
        backend, console = open_backend(self.ctx), Console.from_context(self.ctx)
        do = functools.partial(action, backend)
        if self.where is None:
            assert self.workflow is not None
            _apply_to_each(self.ctx, console, do, [Target(self.workflow, each) for each in self.ids])
            return
        found = [
            Target(item.workflow, item.id) for item in find_matching(backend, self.where) if item.status in statuses
        ]
        if self.yes and found:
            _apply_to_each(self.ctx, console, do, found)
        elif console.is_for_people:
            for each in found[:_MAX_LISTED]:
                console.print_line(f"{each.workflow}/{each.instance_id}", indent=2)
            if len(found) > _MAX_LISTED:
                console.print_line(f"and {len(found) - _MAX_LISTED} more", indent=2)
        else:
            for each in found:
                console.print_record(f"Would {self.ctx.info_name}", f"{each.workflow}/{each.instance_id}")
        count = f"{len(found)} instance{'' if len(found) == 1 else 's'}"
        if found and not self.yes:
            count = f"Would {self.ctx.info_name} {count}; nothing was changed. Add --yes to do it."
        else:
            count += "."
        console.print_note(count)


def on_targets(fn: Callable[..., None]) -> Callable[..., None]:
    """Add WORKFLOW ID... and --where to a command. ``fn`` gets them as `Targets` in its first argument."""

    @click.pass_context
    def command(
        ctx: click.Context,
        /,
        workflow: str | None,
        id: tuple[str, ...],
        where: Condition | None,
        yes: bool,
        **options: Any,
    ) -> None:
        fn(Targets(ctx, workflow, id, where, yes), **options)

    functools.update_wrapper(command, fn)
    for add in (
        click.option("--yes", is_flag=True, help="With --where: apply the change. Without it, only show the matches."),
        click.option(
            "--where",
            type=WhereInput(),
            help="Select all that match: workflow=, status=, error= (name), older= and since= (last change), "
            "label.NAME=, separated by spaces.",
        ),
        click.argument("id", nargs=-1),
        click.argument("workflow", required=False),
    ):
        command = add(command)
    return command


@click.command(cls=Command, examples=["pause order order-42", "pause --where 'workflow=order status=active'"])
@on_targets
def pause(targets: Targets) -> None:
    """Stop instances at their next step boundary.

    Use it to hold instances while you investigate. A running step finishes first. Timers and deadlines continue.
    """

    def action(backend: Backend, target: Target) -> Sequence[str]:
        backend.call(commands.pause, target, requests.NoBody())
        seen = backend.read_snapshot(target.workflow, target.instance_id)
        is_paused = seen is not None and seen.status is Status.PAUSED
        return ["Paused" if is_paused else "Will pause when the running step ends"]

    targets.apply(action, _UNFINISHED - {Status.PAUSED})


@click.command(cls=Command, examples=["resume order order-42", "resume --where 'workflow=order' --yes"])
@on_targets
def resume(targets: Targets) -> None:
    """Resume paused instances.

    Use it after pause. It withdraws a pause that has not taken effect yet. Other instances are not changed.
    """

    def action(backend: Backend, target: Target) -> Sequence[str]:
        was = backend.read_snapshot(target.workflow, target.instance_id)
        backend.call(commands.resume, target, requests.NoBody())
        is_paused = was is not None and (was.status is Status.PAUSED or was.is_pausing)
        return ["Resumed" if is_paused else "Was not paused"]

    targets.apply(action, {Status.PAUSED})


@click.command(
    cls=Command, examples=["wake order order-42", "wake --where 'workflow=order status=active older=5m' --yes"]
)
@on_targets
def wake(targets: Targets) -> None:
    """Make a worker check instances now.

    Use it if messages were lost and you do not want to wait for the next sweep, to skip the pause after a crash, or to
    start a scheduled instance early. It does not end a sleep or a wait for an event.
    """

    def action(backend: Backend, target: Target) -> Sequence[str]:
        found = backend.call(commands.wake, target, requests.NoBody())
        return ["Woken" if found.woken else "Not woken: it is paused, or a worker holds it"]

    targets.apply(action, _UNFINISHED - {Status.PAUSED})


@click.command(
    cls=Command,
    examples=[
        "terminate order order-42",
        "terminate order order-42 --reason 'sold twice'",
        "terminate --where 'workflow=order status=waiting older=30d' --reason 'nobody answered' --yes",
    ],
)
@on_targets
@click.option("--reason", help="Why; stored with the run.")
def terminate(targets: Targets, reason: str | None) -> None:
    """End instances permanently, without a result.

    Use it for instances that must not continue. A running step may finish, but nothing of it is recorded.
    """

    def action(backend: Backend, target: Target) -> Sequence[str]:
        backend.call(commands.terminate, target, requests.Reason(reason=reason))
        return ["Terminated"]

    targets.apply(action, _UNFINISHED)


@click.command(
    cls=Command,
    examples=[
        "restart order order-42",
        "restart order order-42 --reason 'the bug is fixed'",
        "restart --where 'workflow=order status=errored error=CardDeclined since=2h' --yes",
    ],
)
@on_targets
@click.option("--reason", help="Why; stored with the new run.")
def restart(targets: Targets, reason: str | None) -> None:
    """Run instances again from the beginning.

    Use it after you have fixed the cause of a failure. Parameters stay the same. All steps run again, with their side
    effects. Earlier runs stay readable. --where selects only ended instances, unless it names a status.
    """

    def action(backend: Backend, target: Target) -> Sequence[str]:
        found = backend.call(commands.restart, target, requests.Reason(reason=reason))
        return ["Restarted", f"run {found.run_number}"]

    statuses = TERMINAL if targets.where is None or targets.where.status is None else frozenset(Status)
    targets.apply(action, statuses)


def _apply_to_each(
    ctx: click.Context,
    console: Console,
    action: Callable[[Target], Sequence[str]],
    targets: Sequence[Target],
) -> None:
    """Apply the action to each target. If one of several fails, its error is printed and the others continue."""
    exit_code = 0
    for target in targets:
        try:
            action_done, *details = action(target)
        except (DurableError, CliError) as exc:
            if len(targets) == 1:
                raise
            refused = exc if isinstance(exc, CliError) else convert_error(exc)
            refused.show()
            exit_code = exit_code or refused.exit_code or REFUSED
        else:
            console.print_entry([action_done, Styled(f"{target.workflow}/{target.instance_id}", "bold"), *details])
    if exit_code:
        ctx.exit(exit_code)
