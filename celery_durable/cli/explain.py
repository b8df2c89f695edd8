"""`explain`: why an instance is not moving, and what to do."""

from __future__ import annotations

import json

import click

from celery_durable.cli.command import CliError, Command, open_backend, typed
from celery_durable.cli.console import Console, Styled
from celery_durable.explain import Code, Diagnosis

_LOOKS = {
    **dict.fromkeys((Code.DONE, Code.RUNNING), "green"),
    **dict.fromkeys((Code.SLEEPING, Code.SCHEDULED, Code.DUE), "cyan"),
    **dict.fromkeys(
        (Code.WAITING_EVENT, Code.WAITING_TASKS, Code.WAITING_CHILD, Code.RETRY_SCHEDULED, Code.CRASHING), "yellow"
    ),
    **dict.fromkeys((Code.PAUSED, Code.TERMINATED), "magenta"),
}


@click.command(cls=Command, examples=["explain order order-42", "explain order/order-42 --json"])
@click.argument("workflow", metavar="WORKFLOW[/ID]")
@click.argument("id", required=False)
@click.option("--json", "as_json", is_flag=True, help="The code, the sentence, the facts and the actions as JSON.")
@click.pass_context
def explain(ctx: click.Context, workflow: str, id: str | None, as_json: bool) -> None:
    """Tell why an instance is not moving.

    Use it when something waits, and you want to know for what, and whether somebody has to do something. Looks at the
    database alone: at the instance, and at the heartbeats of dispatchers and workers. Piped: the code and the sentence,
    then one line for each action.
    """
    name, _, rest = workflow.partition("/")
    instance_id = id or rest
    if not instance_id:
        raise click.UsageError("Name the instance too: WORKFLOW/ID.")
    backend, console = open_backend(ctx), Console.of(ctx)
    found = backend.explain(name, instance_id)
    if found is None:
        raise CliError(
            "The server does not explain.", "It is of an older version; show tells where the instance stands"
        )
    if as_json:
        said = {"code": found.code, "sentence": found.sentence, "facts": found.facts, "actions": actions(ctx, found)}
        click.echo(json.dumps(said, indent=2))
    elif console.is_terminal:
        console.line(Styled(f"{name}/{instance_id}", "bold"), Styled(found.code, _LOOKS.get(found.code, "red")))
        show_diagnosis(ctx, console, found)
    else:
        console.record(found.code, found.sentence)
        for action in actions(ctx, found):
            console.record("action", action)


def show_diagnosis(ctx: click.Context, console: Console, found: Diagnosis) -> None:
    """The sentence, and below it what to type, for people."""
    console.line(found.sentence, indent=2)
    for action in actions(ctx, found):
        console.line(Styled(f"Try: {action}", "dim"), indent=2)


def actions(ctx: click.Context, found: Diagnosis) -> list[str]:
    """What to type."""
    return [typed(ctx, action) for action in found.actions]
