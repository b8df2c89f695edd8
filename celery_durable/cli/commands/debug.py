"""`debug`: steps through a recorded run with pdb, without running steps or writing anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import click

from celery_durable.cli.command import Output, command
from celery_durable.cli.commands.replay import open_runner, read_runs
from celery_durable.cli.errors import CliError
from celery_durable.cli.inputs import Context, Option, OptionalId, OptionalWorkflow, RunNumber
from celery_durable.testing.debugger import StepDebugger


@command("debug order order-42", "debug order order-42 --run 1", "debug --file order-42.json")
def debug(
    ctx: Context,
    console: Output,
    workflow: OptionalWorkflow,
    id: OptionalId,
    run: RunNumber,
    file: Annotated[
        Path | None, Option("--file", help="A file with a run that `export` printed. No database is used.")
    ],
) -> None:
    """Step through a recorded run with pdb, forward and back.

    Use it to see how your code came to where a run stands. It stops at each step call, in your code, with the variables
    of that moment. It executes the code between the steps on this machine, runs no step, and writes nothing. Commands
    are those of pdb, and forward, back, goto, steps and result; help explains them.
    """
    if (file is None) == (workflow is None) or (workflow is not None and id is None) or (file is not None and run):
        raise click.UsageError("Name an instance, WORKFLOW ID, or a file, --file FILE.")
    files = [] if file is None else [file]
    runner = open_runner(ctx, files)
    runs = read_runs(runner, workflow, id, run, files)
    if len(runs) != 1:
        raise CliError(f"{file} has {len(runs)} runs.", "Export the run alone, into a file of its own.")
    [recorded] = runs
    input_ = None if sys.stdin.isatty() else sys.stdin
    debugger = StepDebugger(recorded.run_state.steps, input_=input_, output=sys.stdout)
    result = debugger.run_replays(lambda on_step: runner.check_replay(recorded, on_step))
    if result is not None:
        for difference in result.differences:
            console.print_note(f"{difference.sentence} {difference.advice}")
        console.print_note(result.end)
