"""`show`: one instance, where it stands, its steps and its events."""

from __future__ import annotations

import click

from celery_durable.cli import render
from celery_durable.cli.backend import Seen
from celery_durable.cli.command import Command, open_backend
from celery_durable.cli.console import Cell, Console, Styled
from celery_durable.cli.explain import show_diagnosis
from celery_durable.cli.render import Times
from celery_durable.explain import Diagnosis
from celery_durable.model import History, Published, Status, StepRecord


@click.command(
    cls=Command, examples=["show order order-42", "show order order-42 --full", "show order order-42 --run 1"]
)
@click.argument("workflow")
@click.argument("id")
@click.option("--run", type=click.IntRange(1), help="A run before the current one.")
@click.option("--full", is_flag=True, help="Parameters, results, payloads and output too, and exact times.")
@click.pass_context
def show(ctx: click.Context, workflow: str, id: str, run: int | None, full: bool) -> None:
    """Show one instance: where it stands, its steps, its events.

    Use it to see what an instance has done, what it waits for, and what it publishes of itself. Piped: one record a
    line, named by its first field (instance, label, origin, parent, error, reason, step, event, audit, published; with
    --full also params and output, and a last field with the result or payload as JSON).
    """
    backend, console = open_backend(ctx), Console.of(ctx)
    seen = backend.look(workflow, id)
    assert seen is not None
    history = backend.history(workflow, id, run=run)
    times = Times(backend.now(), exact=full or not console.is_terminal)
    if console.is_terminal:
        is_live = not seen.status.is_terminal and history.run_number == seen.run_number
        diagnosis = backend.explain(workflow, id) if is_live else None
        _show_people(ctx, console, seen, history, times, diagnosis, full=full)
    else:
        _show_programs(console, history, times, full=full)
    if published := backend.published(workflow, id, run=history.run_number):
        _show_published(console, published, times, full=full)


def _show_people(
    ctx: click.Context,
    console: Console,
    seen: Seen,
    history: History,
    times: Times,
    diagnosis: Diagnosis | None,
    *,
    full: bool,
) -> None:
    is_current = history.run_number == seen.run_number
    console.line(
        Styled(f"{history.workflow}/{history.instance_id}", "bold"),
        render.painted(history.status.status),
        f"run {history.run_number}" + ("" if is_current else f" (the current one is {seen.run_number})"),
        f"created {times.by(history.created_at)}",
        "" if history.completed_at is None else f"ended {times.by(history.completed_at)}",
    )
    if history.labels:
        console.line(Styled("labels", "dim"), *render.label_cells(history.labels), indent=2)
    for said in render.standing(history):
        console.line(said, indent=2)
    if diagnosis is not None:
        show_diagnosis(ctx, console, diagnosis)
    if full:
        console.head("PARAMS")
        console.block("", render.pretty(history.params))
    if history.steps:
        _steps(console, history, times, full=full)
    if history.events:
        _events(console, history, times, full=full)
    if history.audit:
        console.gap()
        console.table(render.AUDIT_COLUMNS, [render.audit_cells(record, times) for record in history.audit])
    if full and history.status.status is Status.COMPLETE:
        console.head("OUTPUT")
        console.block("", render.pretty(history.status.output))


def _steps(console: Console, history: History, times: Times, *, full: bool) -> None:
    console.gap()
    columns = render.STEP_COLUMNS + (render.STEP_TIMES if full else ())
    console.table(columns, [_step_row(step, times, full=full) for step in history.steps])
    results = [step for step in history.steps if step.result is not None] if full else []
    if results:
        console.head("RESULTS")
        for step in results:
            console.block(step.name, render.pretty(render.result_of(step)))


def _step_row(step: StepRecord, times: Times, *, full: bool) -> list[Cell]:
    cells = render.step_cells(step, times)
    return [*cells, times.at(step.started_at or step.created_at), times.at(step.finished_at)] if full else cells


def _events(console: Console, history: History, times: Times, *, full: bool) -> None:
    console.gap()
    console.table(render.EVENT_COLUMNS, [render.event_cells(event, history, times) for event in history.events])
    if full:
        console.head("PAYLOADS")
        for event in history.events:
            console.block(f"{event.type}   {event.event_id}", render.pretty(event.payload))


def _show_programs(console: Console, history: History, times: Times, *, full: bool) -> None:
    status = history.status
    created, ended = times.at(history.created_at), times.at(history.completed_at)
    run = str(history.run_number)
    console.record("instance", history.workflow, history.instance_id, status.status, run, created, ended)
    for name, value in history.labels.items():
        console.record("label", name, value)
    if status.error is not None:
        console.record("error", status.error.name, status.error.message)
    if (origin := history.origin) is not None:
        console.record("origin", origin.instance_id, str(origin.run_number), origin.step_key or "")
    if (parent := history.parent) is not None:
        console.record("parent", parent.workflow, parent.instance_id, str(parent.run_number), parent.step_key)
    if history.reason is not None:
        console.record("reason", history.reason)
    if full:
        console.record("params", render.compact(history.params))
    for step in history.steps:
        result = [render.compact(render.result_of(step))] if full else []
        console.record("step", *_step_row(step, times, full=True), *result)
    for event in history.events:
        payload = [render.compact(event.payload)] if full else []
        console.record("event", *render.event_cells(event, history, times), *payload)
    for record in history.audit:
        console.record("audit", *render.audit_cells(record, times))
    if full and status.status is Status.COMPLETE:
        console.record("output", render.compact(status.output))


def _show_published(console: Console, published: dict[str, Published], times: Times, *, full: bool) -> None:
    rows = [render.published_cells(key, found, times) for key, found in published.items()]
    if not console.is_terminal:
        for row in rows:
            console.record("published", *row)
        return
    console.gap()
    console.table(render.PUBLISHED_COLUMNS, rows)
    if full:
        console.head("VALUES")
        for key, found in published.items():
            console.block(key, render.pretty(found.value))
