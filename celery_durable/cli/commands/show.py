"""`show`: one instance with its status, steps and events."""

from __future__ import annotations

from typing import Annotated

import click

from celery_durable.cli.backends.backend import InstanceSnapshot
from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.commands.explain import print_diagnosis
from celery_durable.cli.inputs import Context, InstanceId, RunNumber, Workflow, flag
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Cell, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.explain import Diagnosis
from celery_durable.model import History, Published, Status, StepRecord


@command("show order order-42", "show order order-42 --full", "show order order-42 --run 1", options=[output_option])
def show(
    ctx: Context,
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    run: RunNumber,
    full: Annotated[
        bool, flag("--full", help="Include parameters, results, payloads and output, and show exact times.")
    ],
) -> None:
    """Show one instance with its status, steps and events.

    Use it to see what an instance has done, what it waits for, and what it has published. In a pipe: one record per
    line, whose first field is its kind (instance, label, origin, parent, error, reason, step, event, audit, published).
    --full adds params, output, and a last field with the result or payload as JSON.
    """
    seen = backend.read_snapshot(workflow, id)
    assert seen is not None
    history = backend.history(workflow, id, run=run)
    published = backend.published(workflow, id, run=history.run_number)
    if console.is_json:
        console.print_json(
            documents.run(history) | {"published": documents.published(published), "currentRunNumber": seen.run_number}
        )
        return
    times = Times(backend.now(), exact=full or not console.is_for_people)
    if console.is_for_people:
        is_live = not seen.status.is_terminal and history.run_number == seen.run_number
        diagnosis = backend.explain(workflow, id) if is_live else None
        _print_for_terminal(ctx, console, seen, history, times, diagnosis, full=full)
    else:
        _print_records(console, history, times, full=full)
    if published:
        _print_published(console, published, times, full=full)


def _print_for_terminal(
    ctx: click.Context,
    console: Console,
    seen: InstanceSnapshot,
    history: History,
    times: Times,
    diagnosis: Diagnosis | None,
    *,
    full: bool,
) -> None:
    is_current = history.run_number == seen.run_number
    console.print_line(
        Styled(f"{history.workflow}/{history.instance_id}", "bold"),
        render.style_status(history.status.status),
        f"run {history.run_number}" + ("" if is_current else f" (the current one is {seen.run_number})"),
        f"created {times.format_in_sentence(history.created_at)}",
        "" if history.completed_at is None else f"ended {times.format_in_sentence(history.completed_at)}",
    )
    if history.labels:
        console.print_line(Styled("labels", "dim"), *render.label_cells(history.labels), indent=2)
    for text in render.describe_run(history):
        console.print_line(text, indent=2)
    if diagnosis is not None:
        print_diagnosis(ctx, console, diagnosis)
    if full:
        console.print_heading("PARAMS")
        console.print_block("", render.to_indented_json(history.params))
    if history.steps:
        _steps(console, history, times, full=full)
    if history.events:
        _events(console, history, times, full=full)
    if history.audit:
        console.print_blank_line()
        console.print_table(render.AUDIT_COLUMNS, [render.audit_cells(record, times) for record in history.audit])
    if full and history.status.status is Status.COMPLETE:
        console.print_heading("OUTPUT")
        console.print_block("", render.to_indented_json(history.status.output))


def _steps(console: Console, history: History, times: Times, *, full: bool) -> None:
    console.print_blank_line()
    columns = render.STEP_COLUMNS + (render.STEP_TIMES if full else ())
    console.print_table(columns, [_step_row(step, times, full=full) for step in history.steps])
    results = [step for step in history.steps if step.result is not None] if full else []
    if results:
        console.print_heading("RESULTS")
        for step in results:
            console.print_block(step.name, render.to_indented_json(render.get_result(step)))


def _step_row(step: StepRecord, times: Times, *, full: bool) -> list[Cell]:
    cells = render.step_cells(step, times)
    return [*cells, times.format(step.started_at or step.created_at), times.format(step.finished_at)] if full else cells


def _events(console: Console, history: History, times: Times, *, full: bool) -> None:
    console.print_blank_line()
    console.print_table(render.EVENT_COLUMNS, [render.event_cells(event, history, times) for event in history.events])
    if full:
        console.print_heading("PAYLOADS")
        for event in history.events:
            console.print_block(f"{event.type}   {event.event_id}", render.to_indented_json(event.payload))


def _print_records(console: Console, history: History, times: Times, *, full: bool) -> None:
    status = history.status
    created, ended = times.format(history.created_at), times.format(history.completed_at)
    run = str(history.run_number)
    console.print_record("instance", history.workflow, history.instance_id, status.status, run, created, ended)
    for name, value in history.labels.items():
        console.print_record("label", name, value)
    if status.error is not None:
        console.print_record("error", status.error.name, status.error.message)
    if (origin := history.origin) is not None:
        console.print_record("origin", origin.instance_id, str(origin.run_number), origin.step_key or "")
    if (parent := history.parent) is not None:
        console.print_record("parent", parent.workflow, parent.instance_id, str(parent.run_number), parent.step_key)
    if history.reason is not None:
        console.print_record("reason", history.reason)
    if full:
        console.print_record("params", render.to_compact_json(history.params))
    for step in history.steps:
        result = [render.to_compact_json(render.get_result(step))] if full else []
        console.print_record("step", *_step_row(step, times, full=True), *result)
    for event in history.events:
        payload = [render.to_compact_json(event.payload)] if full else []
        console.print_record("event", *render.event_cells(event, history, times), *payload)
    for record in history.audit:
        console.print_record("audit", *render.audit_cells(record, times))
    if full and status.status is Status.COMPLETE:
        console.print_record("output", render.to_compact_json(status.output))


def _print_published(console: Console, published: dict[str, Published], times: Times, *, full: bool) -> None:
    rows = [render.published_cells(key, found, times) for key, found in published.items()]
    if not console.is_for_people:
        for row in rows:
            console.print_record("published", *row)
        return
    console.print_blank_line()
    console.print_table(render.PUBLISHED_COLUMNS, rows)
    if full:
        console.print_heading("VALUES")
        for key, found in published.items():
            console.print_block(key, render.to_indented_json(found.value))
