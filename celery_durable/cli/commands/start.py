"""`start`: creates an instance, and can follow it to its end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, get_args

import click

from celery_durable import commands, values
from celery_durable.cli.backends.backend import Backend
from celery_durable.cli.command import command, open_backend
from celery_durable.cli.commands.follow import Follower, print_update
from celery_durable.cli.errors import CliError, command_line
from celery_durable.cli.inputs import Context, Option, Workflow, label_option, merged_params
from celery_durable.cli.output import render
from celery_durable.cli.output.console import Console, Styled, to_compact_json
from celery_durable.commands import Target
from celery_durable.errors import WorkflowParamsInvalid
from celery_durable.model import IfExists, IfRunning, RunRef
from celery_durable.values import Parameter
from celery_durable.wire import requests
from celery_durable.wire.responses import InstanceItem

Params = Annotated[Any, Option("--params", help="The parameters as JSON, from a file, or from standard input.")]
SingleParams = Annotated[
    tuple[str, ...],
    Option("-P", "single_params", metavar="KEY=TEXT|KEY:=JSON", help="One parameter; overrides the one in --params."),
]

WhenExists = Annotated[
    Any,
    Option(
        "--if-exists",
        type=click.Choice(get_args(IfExists)),
        metavar="|".join(get_args(IfExists)),
        default="error",
        help="If the --id exists: fail, show its status, or postpone a run that has not begun.",
    ),
]
WhenRunning = Annotated[
    Any,
    Option(
        "--if-running",
        type=click.Choice(get_args(IfRunning)),
        metavar="|".join(get_args(IfRunning)),
        help="If the last run of the --id has not ended: do nothing, or run once more after it.",
    ),
]

_VERBS = {"created": "Started", "restarted": "Restarted, as run {run}:", "unchanged": "Still running:"}


@command(
    "start order -P order_id=42 -P cents:=1999 --id order-42",
    """start order --params '{"order_id": "42", "cents": 1999}' --follow""",
    "start order --params @order.json --wait --timeout '5 minutes'",
    "start order --params @order.json --id order-42 --restart",
    "start order -P order_id=42 --label tenant=acme --label stage=new",
    "start order -P order_id=42 --max-run '2 hours'",
    "start sync --id sync-42 --delay '30 seconds' --if-exists postpone --at-latest '5 minutes'",
    "start nightly --id nightly --if-running queue",
)
def start(
    ctx: Context,
    workflow: Workflow,
    params: Params,
    single_params: SingleParams,
    id: Annotated[str | None, Option("--id", help="The instance's id, unique per workflow; random by default.")],
    restart: Annotated[bool, Option("--restart", help="If the --id exists and has ended, start a new run of it.")],
    labels: Annotated[tuple[str, ...], label_option("A label to find the instance by; repeatable.")],
    max_run: Annotated[
        timedelta | None, Option("--max-run", help="Terminate a run that takes longer; replaces the workflow's limit.")
    ],
    delay: Annotated[timedelta | None, Option("--delay", help="How long to wait before the run starts.")],
    if_exists: WhenExists,
    if_running: WhenRunning,
    at_latest: Annotated[
        timedelta | None, Option("--at-latest", help="How long --if-exists postpone can postpone a run at most.")
    ],
    wait: Annotated[bool, Option("--wait", help="Wait for the end and print the output; fail if the instance fails.")],
    follow: Annotated[bool, Option("--follow", help="Show steps and log lines until the end; implies --wait.")],
    timeout: Annotated[
        timedelta | None, Option("--timeout", help="How long to wait. The instance continues after it.")
    ],
) -> None:
    """Start an instance of a workflow.

    Use it to try a workflow, or to start one by hand. It returns when the instance is stored. A restarted instance
    keeps its parameters and labels. In a pipe it prints the id; --restart adds the outcome (created, restarted or
    unchanged) and the run, --if-exists and --if-running the status. --wait and --follow add a record with the status
    and the output as JSON.
    """
    if timeout is not None and not (wait or follow):
        raise click.UsageError("--timeout needs --wait or --follow.")
    shows_status = if_exists != "error" or if_running is not None
    if restart:
        _check_restart(id, shows_status or delay is not None or at_latest is not None, max_run)
    if shows_status and (wait or follow):
        raise click.UsageError("--wait and --follow are for a new instance: leave out --if-exists and --if-running.")
    params_given, label_values = merged_params(params, single_params), values.parse_labels(labels)
    backend, console = open_backend(ctx), Console.from_context(ctx)
    if restart and id is not None:
        target, body = Target(workflow, id), requests.RestartOrCreate(params=params_given, labels=label_values)
        started = backend.call(commands.restart_or_create, target, body)
        instance_id, run, extra = id, started.run_number, [started.outcome, str(started.run_number)]
        verb = _VERBS[started.outcome].format(run=run)
    else:
        new = requests.CreateInstance(
            params=params_given,
            id=id,
            if_exists=if_exists,
            if_running=if_running,
            delay_ms=_milliseconds(delay),
            at_latest_ms=_milliseconds(at_latest),
            max_run_ms=_milliseconds(max_run),
            labels=label_values,
        )
        made = _create(ctx, backend, workflow, new)
        status = str(made.details.status)
        instance_id, run = made.id, 1
        extra, verb = ([status], f"Now {status}:") if shows_status else ([], "Started")
    if console.is_for_people:
        console.print_line(verb, Styled(f"{workflow}/{instance_id}", "bold"))
        if not (wait or follow):
            console.print_line(Styled(f"Show it: {command_line(ctx, f'show {workflow} {instance_id}')}", "dim"))
    else:
        console.print_record(instance_id, *extra)
    if wait or follow:
        _follow_to_end(console, Follower(backend, RunRef(workflow, instance_id, run)), timeout, shown=follow)


def _create(ctx: Context, backend: Backend, workflow: str, new: requests.CreateInstance) -> InstanceItem:
    try:
        return backend.call(commands.create, Target(workflow, new.id or ""), new)
    except (CliError, WorkflowParamsInvalid) as exc:
        if new.params is None and exc.code == WorkflowParamsInvalid.code:
            _name_params(ctx, backend, workflow)
            options = f"-P key=text -P key:=JSON, or --params JSON, or: {command_line(ctx, 'start --help')}"
            raise CliError(str(exc), f"It was started without parameters. Give them with {options}") from exc
        raise


def _check_restart(instance_id: str | None, has_other_options: bool, max_run: timedelta | None) -> None:
    if instance_id is None:
        raise click.UsageError("--restart needs --id: a random id never exists before.")
    if max_run is not None:
        raise click.UsageError("--max-run is for a new instance: a restarted one keeps its limit.")
    if has_other_options:
        raise click.UsageError("--restart excludes --if-exists, --if-running, --delay and --at-latest.")


def _milliseconds(duration: timedelta | None) -> int | None:
    return None if duration is None else duration // timedelta(milliseconds=1)


def _name_params(ctx: click.Context, backend: Backend, workflow: str) -> None:
    required = [
        each for info in backend.workflows() if info.name == workflow for each in info.parameters if each.required
    ]
    if required:
        raise CliError(
            f"{workflow!r} needs {', '.join(f'{each.name} ({each.type})' for each in required)}.",
            command_line(ctx, start_command(workflow, required)),
        )


def start_command(workflow: str, parameters: Sequence[Parameter]) -> str:
    """Return the command that starts an instance, with a place for each parameter that is required."""
    required = [each for each in parameters if each.required]
    return " ".join(
        ["start", workflow, *(f"-P {each.name}{'=' if each.type == 'str' else ':='}..." for each in required)]
    )


def _follow_to_end(console: Console, follower: Follower, timeout: timedelta | None, *, shown: bool) -> None:
    for update in follower.read_to_end(timeout):
        if shown:
            print_update(console, update)
    status = follower.read_outcome()
    if console.is_for_people:
        if not shown:
            console.print_line(render.style_status(status.status))
        console.print_block("", status.output)
    else:
        console.print_record(status.status, to_compact_json(status.output))
