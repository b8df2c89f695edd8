"""`preflight`: checks the current code against all open runs, without running steps or writing anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import click

from celery_durable.cli.command import Output, command, output_option
from celery_durable.cli.commands.replay import open_runner, read_exported_runs
from celery_durable.cli.errors import NOT_FOUND, REFUSED, CliError
from celery_durable.cli.inputs import Context, ExportedFiles, Option
from celery_durable.cli.output import documents
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.runner.preflight import Occurrences, Preflight, WorkflowReport
from celery_durable.runner.replay_check import ReplayResult
from celery_durable.store.engine.time_limits import limit_database_time

_COLUMNS = (Column("WORKFLOW"), Column("GO ON"), Column("CHANGED"), Column("DIVERGE"))
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
    check = open_runner(ctx, files).preflight
    results = _check_files(check, files, workflow) if files else _check_store(check, console, workflow, sample)
    reports: dict[str, WorkflowReport] = {}
    with limit_database_time(None):  # it reads all that is open, however much that is (LAW 7)
        for result in results:
            reports.setdefault(result.ref.workflow, WorkflowReport()).add(result)
    if workflow is not None and not reports and not check.is_known(workflow):  # a misspelt name must not pass
        raise CliError(f"The app knows no workflow {workflow!r}.", exit_code=NOT_FOUND)
    _show(console, reports)
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
    """Check the runs of the database, and print the progress to standard error."""
    counts = check.count_open_runs(workflow)
    total, done = sum(count if sample is None else min(count, sample) for count in counts.values()), 0
    for name in counts:
        for result in check.check_open_runs(name, sample=sample):
            done += 1
            if done % _RUNS_PER_NOTE == 0:
                console.print_note(f"{done:,} of {total:,} open runs checked")
            yield result


def _show(console: Console, reports: dict[str, WorkflowReport]) -> None:
    if console.is_json:
        console.print_json({"workflows": [_document(name, report) for name, report in sorted(reports.items())]})
        return
    if not reports:
        console.print_note("There are no open runs.")
        return
    rows = [_row(name, report) for name, report in sorted(reports.items())]
    if console.is_for_people:
        console.print_table(_COLUMNS, rows)
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


def _document(name: str, report: WorkflowReport) -> documents.Document:
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
