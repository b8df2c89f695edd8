"""`show`: one instance with its status, steps and events."""

from __future__ import annotations

from typing import Annotated

import click

from celery_durable.cli.backends.backend import InstanceSnapshot
from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.commands.explain import print_diagnosis
from celery_durable.cli.inputs import Context, InstanceId, RunNumber, Workflow, flag
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.explain import Diagnosis
from celery_durable.model import History, Status


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
        _print_head(ctx, console, seen, history, times, diagnosis)
    else:
        _print_head_records(console, history, times)
    if full:
        console.print_value("params", history.params)
    _print_steps(console, history, times, full=full)
    events = [render.event_cells(event, history, times) for event in history.events]
    payloads = [(f"{event.type}   {event.event_id}", event.payload) for event in history.events] if full else []
    console.print_section("event", render.EVENT_COLUMNS, events, payloads, heading="PAYLOADS")
    console.print_section(
        "audit", render.AUDIT_COLUMNS, [render.audit_cells(record, times) for record in history.audit]
    )
    if full and history.status.status is Status.COMPLETE:
        console.print_value("output", history.status.output)
    rows = [render.published_cells(key, found, times) for key, found in published.items()]
    # A record has the value itself in a field.
    values = [(key, found.value) for key, found in published.items()] if full and console.is_for_people else []
    console.print_section("published", render.PUBLISHED_COLUMNS, rows, values, heading="VALUES")


def _print_head(
    ctx: click.Context,
    console: Console,
    seen: InstanceSnapshot,
    history: History,
    times: Times,
    diagnosis: Diagnosis | None,
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


def _print_head_records(console: Console, history: History, times: Times) -> None:
    status = history.status
    cells = times.cells(status.status, history.run_number, history.created_at, history.completed_at)
    console.print_record("instance", history.workflow, history.instance_id, *cells)
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


def _print_steps(console: Console, history: History, times: Times, *, full: bool) -> None:
    columns, rows = render.STEP_COLUMNS, [render.step_cells(step, times) for step in history.steps]
    if full or not console.is_for_people:
        columns += render.STEP_TIMES
        for cells, step in zip(rows, history.steps, strict=True):
            cells.extend(times.cells(step.started_at or step.created_at, step.finished_at))
    results = [(step.name if step.result is not None else None, render.get_result(step)) for step in history.steps]
    console.print_section("step", columns, rows, results if full else [], heading="RESULTS")
