"""`replay`: checks the current code against a recorded run, without running steps or writing anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from celery_durable.cli.backends.stored import attached_durable, open_durable
from celery_durable.cli.command import Output, command, output_option
from celery_durable.cli.errors import REFUSED, CliError
from celery_durable.cli.inputs import Context, ExportedFiles, OptionalId, OptionalWorkflow, RunNumber
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.errors import ValueRefused
from celery_durable.model import StepRow
from celery_durable.runner import Runner
from celery_durable.runner.recorded_run import RecordedRun, from_export
from celery_durable.runner.replay_check import ReplayResult
from celery_durable.testing import local_servers

_COLUMNS = (Column("STEP"), Column("TYPE"), Column(""))


@command(
    "replay order order-42",
    "replay order order-42 --run 1",
    "replay --file order-42.json",
    options=[output_option],
)
def replay(
    ctx: Context,
    console: Output,
    workflow: OptionalWorkflow,
    id: OptionalId,
    run: RunNumber,
    files: ExportedFiles,
) -> None:
    """Check the current code against a recorded run.

    Use it before a deploy that changes a workflow: on instances of staging, or in CI on exported runs. It executes the
    code between the steps, runs no step, and writes nothing. The exit code is 1 if the code differs from the record.
    Changes of an open step (event type, topic, task, child, timeout) are shown, but are no difference. In a pipe: kind
    (run, step, differs, changed, end), then its fields.
    """
    if bool(files) == (workflow is not None) or (workflow is not None and id is None) or (run is not None and files):
        raise click.UsageError("Name an instance, WORKFLOW ID, or files, --file FILE.")
    runner = open_runner(ctx, files)
    matches = True
    for recorded in read_runs(runner, workflow, id, run, files):
        found = runner.check_replay(recorded)
        matches = matches and found.matches
        _show(console, recorded, found)
    if not matches:
        ctx.exit(REFUSED)


def open_runner(ctx: click.Context, files: Sequence[Path]) -> Runner:
    """Return the runner of the app, with all workflows; without a database if ``files`` have the runs."""
    durable = attached_durable(ctx) if files else open_durable(ctx)
    durable.app.loader.import_default_modules()
    if files:
        local_servers.use_no_store(durable)
    return durable.internals.runner


def read_runs(
    runner: Runner, workflow: str | None, instance_id: str | None, run: int | None, files: Sequence[Path]
) -> list[RecordedRun]:
    """Read the runs in the files, or without files a run of the instance; raises CliError, RunNotFound."""
    if files:
        return [recorded for path in files for recorded in read_exported_runs(path)]
    assert workflow is not None
    assert instance_id is not None
    return [runner.read_recorded_run(workflow, instance_id, run=run)]


def read_exported_runs(path: Path) -> Iterator[RecordedRun]:
    """Read the runs in a file with one or several outputs of `export`; raises CliError."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        while text:
            document, end = json.JSONDecoder().raw_decode(text)
            yield from_export(document)
            text = text[end:].lstrip()
    except (OSError, ValueError, ValueRefused) as exc:
        raise CliError(
            f"{path} cannot be read: {exc}", "Export the run again: celery -A <your app> durable export order order-42"
        ) from exc


def _show(console: Console, recorded: RecordedRun, found: ReplayResult) -> None:
    ref, replayed, uncalled = found.ref, _keys(found.replayed), _keys(found.uncalled)
    steps = [row for row in recorded.run_state.steps if row.step_key in replayed | uncalled]
    changes = [
        *((Styled("differs", "red"), each) for each in found.differences),
        *((Styled("changed", "yellow"), each) for each in found.open_step_changes),
    ]
    rows: list[list[Cell]] = [
        [
            row.name,
            render.type_word(row.type),
            Styled("replayed", "green") if row.step_key in replayed else Styled("not called", "red"),
        ]
        for row in steps
    ]
    if console.is_json:
        console.print_json(_document(recorded, found, steps), is_line=True)
    elif console.is_for_people:
        console.print_line(Styled(str(ref), "bold"), recorded.status)
        if rows:
            console.print_table(_COLUMNS, rows)
        for word, each in changes:
            console.print_line(word, each.sentence)
            console.print_line(Styled(each.advice, "dim"), indent=2)
        console.print_line(found.end)
    else:
        console.print_record("run", ref.workflow, ref.instance_id, str(ref.run_number), recorded.status)
        for cells in rows:
            console.print_record("step", *cells)
        for word, each in changes:
            console.print_record(word, each.sentence, each.advice)
        console.print_record("end", found.end)
    if recorded.is_partial:
        console.print_note(
            f"{ref} continues another run. An export does not contain the values that step.now(), step.random() and "
            "step.uuid() returned in that run. If the code depends on them, replay the run from the database."
        )


def _document(recorded: RecordedRun, found: ReplayResult, steps: Sequence[StepRow]) -> documents.Document:
    replayed = _keys(found.replayed)
    return {
        **documents.run_of(found.ref),
        "status": recorded.status,
        "matches": found.matches,
        "steps": [
            {"stepKey": row.step_key, "name": row.name, "type": row.type, "isReplayed": row.step_key in replayed}
            for row in steps
        ],
        "differences": list(map(asdict, found.differences)),
        "openStepChanges": list(map(asdict, found.open_step_changes)),
        "end": found.end,
    }


def _keys(rows: Iterable[StepRow]) -> set[str]:
    return {row.step_key for row in rows}
