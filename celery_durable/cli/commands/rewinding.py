"""The commands that repeat steps or complete them by hand: rewind, fork, retry, set-result and skip."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from typing import Any

import click

from celery_durable import commands
from celery_durable.cli.backends.backend import Backend
from celery_durable.cli.command import Command, open_backend
from celery_durable.cli.commands.lifecycle import Targets, on_targets
from celery_durable.cli.inputs import JsonInput
from celery_durable.cli.output.console import Console, Styled
from celery_durable.commands import Target
from celery_durable.model import Status
from celery_durable.wire import requests

_REASON = click.option("--reason", help="Why; stored with the new run.")
_AUDIT_REASON = click.option("--reason", help="Why; stored with the run.")
_BY = click.option("--by", help="Your name, stored with the run; by default the user of this system.")


@click.command(
    cls=Command,
    examples=[
        "rewind order order-42 'charge card'",
        "rewind order order-42 'charge card' --reason 'the price was wrong'",
    ],
)
@click.argument("workflow")
@click.argument("id")
@click.argument("step")
@_REASON
@click.pass_context
def rewind(ctx: click.Context, workflow: str, id: str, step: str, reason: str | None) -> None:
    """Run an instance again from a step.

    Use it if the results before the step are right. A new run keeps all events and the finished steps that were called
    before it. The step and all later steps run again, with their side effects. Earlier runs stay readable.
    """
    found = open_backend(ctx).call(commands.rewind, Target(workflow, id), requests.Rewind(step=step, reason=reason))
    _print_done(ctx, "Rewound", workflow, id, f"run {found.run_number}", f"from {step}")


@click.command(
    cls=Command,
    examples=[
        "retry order order-42",
        "retry order order-42 --reason 'the bank is back'",
        "retry --where 'workflow=order error=BankAway since=2h' --yes",
    ],
)
@on_targets
@_REASON
def retry(targets: Targets, reason: str | None) -> None:
    """Retry the failed step of errored instances.

    Use it after you have fixed the cause of the failure. A new run keeps the results from before the failure, and the
    failed step gets new attempts.
    """

    def action(backend: Backend, target: Target) -> Sequence[str]:
        found = backend.call(commands.retry, target, requests.Reason(reason=reason))
        return ["Retried", f"run {found.run_number}"]

    targets.apply(action, {Status.ERRORED})


@click.command(cls=Command, examples=["fork order order-42 'charge card' --id order-42-trial"])
@click.argument("workflow")
@click.argument("id")
@click.argument("step")
@click.option("--id", "new_id", help="The new instance's id, unique per workflow; random by default.")
@click.pass_context
def fork(ctx: click.Context, workflow: str, id: str, step: str, new_id: str | None) -> None:
    """Create an instance that continues from a step of another.

    Use it to try a different outcome. The new instance gets the same parameters, all events, and the finished steps
    that were called before this step. The other instance is not changed.
    """
    body = requests.Fork(step=step, id=new_id)
    new_instance_id = open_backend(ctx).call(commands.fork, Target(workflow, id), body).id
    if Console.from_context(ctx).is_for_people:
        _print_done(ctx, "Forked", workflow, new_instance_id, f"from {step} of {id}")
    else:
        Console.from_context(ctx).print_record(new_instance_id)


@click.command(
    "set-result",
    cls=Command,
    examples=["""set-result order order-42 'charge card' '"payment 17"' --reason 'paid by hand'"""],
)
@click.argument("workflow")
@click.argument("id")
@click.argument("step")
@click.argument("value", type=JsonInput(), metavar="JSON|@file|-")
@_BY
@_AUDIT_REASON
@click.pass_context
def set_result(
    ctx: click.Context, workflow: str, id: str, step: str, value: Any, by: str | None, reason: str | None
) -> None:
    """Complete a step by hand, with a result.

    Use it if the work was done by other means. The step must be open, or its failure must have ended the instance. A
    wait gets the value as the payload of an event. The name and the reason are stored, and show displays them. Over
    HTTP, the server may replace --by with the user that it has authenticated.
    """
    body = requests.SetResult(step=step, result=value, by=by or _user(), reason=reason)
    found = open_backend(ctx).call(commands.set_result, Target(workflow, id), body)
    _print_done(ctx, "Completed", workflow, id, f"run {found.run_number}", step)


@click.command(cls=Command, examples=["skip order order-42 'cool off' --reason 'the customer waits on the phone'"])
@click.argument("workflow")
@click.argument("id")
@click.argument("step")
@_BY
@_AUDIT_REASON
@click.pass_context
def skip(ctx: click.Context, workflow: str, id: str, step: str, by: str | None, reason: str | None) -> None:
    """Complete a step by hand, without a result.

    Use it to end a sleep, or to continue without a step. The result of the step is null. The rules of set-result apply.
    """
    body = requests.Skip(step=step, by=by or _user(), reason=reason)
    found = open_backend(ctx).call(commands.skip, Target(workflow, id), body)
    _print_done(ctx, "Skipped", workflow, id, f"run {found.run_number}", step)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        raise click.UsageError("Your user name is unknown on this system: use --by.") from None


def _print_done(ctx: click.Context, action: str, workflow: str, instance_id: str, *more: str) -> None:
    Console.from_context(ctx).print_entry([action, Styled(f"{workflow}/{instance_id}", "bold"), *more])
