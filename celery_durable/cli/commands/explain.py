"""`explain`: says why an instance does not move, and what to do."""

from __future__ import annotations

import click

from celery_durable.cli.command import Output, command, json_option, open_backend, output_option
from celery_durable.cli.errors import adapt_commands
from celery_durable.cli.inputs import Context, InstanceId, Workflow
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Console, Styled
from celery_durable.explain import Code, Diagnosis

_STYLES = {
    **dict.fromkeys((Code.DONE, Code.RUNNING), "green"),
    **dict.fromkeys((Code.SLEEPING, Code.SCHEDULED, Code.DUE), "cyan"),
    **dict.fromkeys(
        (Code.WAITING_EVENT, Code.WAITING_TASKS, Code.WAITING_CHILD, Code.RETRY_SCHEDULED, Code.CRASHING), "yellow"
    ),
    **dict.fromkeys((Code.PAUSED, Code.TERMINATED), "magenta"),
}


@command("explain order order-42", "explain order/order-42 --json", options=[output_option, json_option])
def explain(
    ctx: Context,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
) -> None:
    """Explain why an instance does not move.

    Use it to find out what an instance waits for, and whether you have to do something. It reads only the database: the
    instance, and the heartbeats of dispatchers and workers. In a pipe: the code and the sentence, then one line per
    action.
    """
    diagnosis = open_backend(ctx).explain(workflow, id)
    if console.is_json:
        console.print_json(documents.convert(diagnosis) | {"actions": adapted_actions(ctx, diagnosis)})
    elif console.is_for_people:
        console.print_line(
            Styled(f"{workflow}/{id}", "bold"), Styled(diagnosis.code, _STYLES.get(diagnosis.code, "red"))
        )
        print_diagnosis(ctx, console, diagnosis)
    else:
        console.print_record(diagnosis.code, diagnosis.sentence)
        for action in adapted_actions(ctx, diagnosis):
            console.print_record("action", action)


def print_diagnosis(ctx: click.Context, console: Console, diagnosis: Diagnosis) -> None:
    """Print the sentence, and below it the commands to run, for people."""
    console.print_line(diagnosis.sentence, indent=2)
    for action in adapted_actions(ctx, diagnosis):
        console.print_line(Styled(f"Try: {action}", "dim"), indent=2)


def adapted_actions(ctx: click.Context, diagnosis: Diagnosis) -> list[str]:
    """Return the commands to run, as this user can type them."""
    return [adapt_commands(ctx, action) for action in diagnosis.actions]
