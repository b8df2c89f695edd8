"""`replay`, `debug` and `preflight`: run the current code on recorded runs, without running steps or writing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click

from celery_durable.app.internals import Internals
from celery_durable.cli.backends.stored import attached_durable, open_durable
from celery_durable.cli.command import Output, command, output_option
from celery_durable.cli.errors import NOT_FOUND, REFUSED, CliError
from celery_durable.cli.inputs import Context, ExportedFiles, Option, OptionalId, OptionalWorkflow, RunNumber
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.errors import ValueRefused
from celery_durable.insight.explain.summaries import type_word
from celery_durable.insight.preflight import Occurrences, Preflight, WorkflowReport
from celery_durable.insight.recorded_run import RecordedRun, from_export, read_run
from celery_durable.insight.replay_check import ReplayResult, check_replay
from celery_durable.model import StepRow
from celery_durable.store.engine import Store
from celery_durable.store.engine.time_limits import limit_database_time
from celery_durable.testing import databases
from celery_durable.testing.debugger import StepDebugger

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
    internals = open_internals(ctx, files)
    matches = True
    for recorded in read_runs(internals.store, workflow, id, run, files):
        found = check_replay(internals.runner, recorded)
        matches = matches and found.matches
        _show(console, recorded, found)
    if not matches:
        ctx.exit(REFUSED)


def open_internals(ctx: click.Context, files: Sequence[Path]) -> Internals:
    """Return the parts of the app, with all workflows; without a database if ``files`` have the runs."""
    durable = attached_durable(ctx) if files else open_durable(ctx)
    durable.app.loader.import_default_modules()
    if files:
        databases.use_no_store(durable)
    return durable.internals


def read_runs(
    store: Store, workflow: str | None, instance_id: str | None, run: int | None, files: Sequence[Path]
) -> list[RecordedRun]:
    """Read the runs in the files, or without files a run of the instance; raises CliError, RunNotFound."""
    if files:
        return [recorded for path in files for recorded in read_exported_runs(path)]
    assert workflow is not None
    assert instance_id is not None
    return [store.read(lambda tx: read_run(tx, workflow, instance_id, run))]


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
            type_word(row.type),
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
    internals = open_internals(ctx, files)
    runs = read_runs(internals.store, workflow, id, run, files)
    if len(runs) != 1:
        raise CliError(f"{file} has {len(runs)} runs.", "Export the run alone, into a file of its own.")
    [recorded] = runs
    input_ = None if sys.stdin.isatty() else sys.stdin
    debugger = StepDebugger(recorded.run_state.steps, input_=input_, output=sys.stdout)
    result = debugger.run_replays(lambda on_step: check_replay(internals.runner, recorded, on_step))
    if result is not None:
        for difference in result.differences:
            console.print_note(f"{difference.sentence} {difference.advice}")
        console.print_note(result.end)


_REPORT_COLUMNS = (Column("WORKFLOW"), Column("GO ON"), Column("CHANGED"), Column("DIVERGE"))
_RUNS_PER_NOTE = 1000


@command(
    "preflight",
    "preflight --workflow order --sample 500",
    "preflight --file runs.json -o json",
    options=[output_option],
)
def preflight(
    ctx: Context,
    console: Output,
    workflow: Annotated[str | None, Option("-w", "--workflow", help="Check only the runs of this workflow.")],
    sample: Annotated[
        int | None,
        Option(
            "--sample",
            type=click.IntRange(1),
            help="Check only so many runs of each workflow, spread evenly from the oldest to the newest.",
        ),
    ],
    files: ExportedFiles,
) -> None:
    """Check the current code against all open runs.

    Use it before a deploy that changes workflows: in CI on exported runs, or with the new code against the production
    database. It executes the code between the steps, runs no step, and writes nothing. For each workflow it says how
    many runs go on, how many of these although an open step or the order changed, and how many diverge, and where. The
    exit code is 1 if a run diverges. In a pipe: workflow, its name and numbers; then differs or changed, the workflow,
    the number of runs, the sentence, the advice and some ids.
    """
    if files and sample is not None:
        raise click.UsageError("--sample chooses from the database, not from files.")
    internals = open_internals(ctx, files)
    check = Preflight(internals.store, internals.runner)
    results = _check_files(check, files, workflow) if files else _check_store(check, console, workflow, sample)
    reports: dict[str, WorkflowReport] = {}
    with limit_database_time(None):  # it reads all that is open, however much that is (LAW 7)
        for result in results:
            reports.setdefault(result.ref.workflow, WorkflowReport()).add(result)
    if workflow is not None and not reports and not check.is_known(workflow):  # a misspelt name must not pass
        raise CliError(f"The app knows no workflow {workflow!r}.", exit_code=NOT_FOUND)
    _show_reports(console, reports)
    if any(report.diverging for report in reports.values()):
        ctx.exit(REFUSED)


def _check_files(check: Preflight, files: tuple[Path, ...], workflow: str | None) -> Iterator[ReplayResult]:
    for path in files:
        for recorded in read_exported_runs(path):
            if workflow in (None, recorded.ref.workflow) and not recorded.status.is_terminal:
                yield check.check(recorded)


def _check_store(
    check: Preflight, console: Console, workflow: str | None, sample: int | None
) -> Iterator[ReplayResult]:
    counts = check.count_open_runs(workflow)
    total, done = sum(count if sample is None else min(count, sample) for count in counts.values()), 0
    for name in counts:
        for result in check.check_open_runs(name, sample=sample):
            done += 1
            if done % _RUNS_PER_NOTE == 0:
                console.print_note(f"{done:,} of {total:,} open runs checked")
            yield result


def _show_reports(console: Console, reports: dict[str, WorkflowReport]) -> None:
    if console.is_json:
        console.print_json({"workflows": [_report_document(name, report) for name, report in sorted(reports.items())]})
        return
    if not reports:
        console.print_note("There are no open runs.")
        return
    rows = [_row(name, report) for name, report in sorted(reports.items())]
    if console.is_for_people:
        console.print_table(_REPORT_COLUMNS, rows)
    for (name, report), row in zip(sorted(reports.items()), rows, strict=True):
        if not console.is_for_people:
            console.print_record("workflow", *row)
        for word, style, found in (
            ("differs", "red", report.differences),
            ("changed", "yellow", report.open_step_changes),
        ):
            for sentence, each in _most_frequent_first(found):
                _show_occurrences(console, Styled(word, style), name, sentence, each)


def _row(name: str, report: WorkflowReport) -> list[Cell]:
    diverging = Styled(str(report.diverging), "red" if report.diverging else "")
    changed = Styled(str(report.changed), "yellow" if report.changed else "")
    return [name, str(report.continuing), changed, diverging]


def _most_frequent_first(found: dict[str, Occurrences]) -> list[tuple[str, Occurrences]]:
    return sorted(found.items(), key=lambda item: -item[1].count)


def _show_occurrences(console: Console, word: Styled, workflow: str, sentence: str, found: Occurrences) -> None:
    if not console.is_for_people:
        console.print_record(word, workflow, str(found.count), sentence, found.advice, _name_some(found, ""))
        return
    runs = "run" if found.count == 1 else "runs"
    console.print_line(word, f"{found.count} {runs}: {_name_some(found, f'{workflow}/')}")
    console.print_line(sentence, indent=2)
    console.print_line(Styled(found.advice, "dim"), indent=2)


def _name_some(found: Occurrences, prefix: str) -> str:
    more = ", ..." if found.count > len(found.examples) else ""
    return ", ".join(f"{prefix}{each}" for each in found.examples) + more


def _report_document(name: str, report: WorkflowReport) -> documents.Document:
    def describe(found: dict[str, Occurrences]) -> list[documents.Document]:
        return [
            {"sentence": sentence, "advice": each.advice, "count": each.count, "instanceIds": each.examples}
            for sentence, each in _most_frequent_first(found)
        ]

    return {
        "name": name,
        "continuing": report.continuing,
        "changed": report.changed,
        "diverging": report.diverging,
        "differences": describe(report.differences),
        "openStepChanges": describe(report.open_step_changes),
    }
