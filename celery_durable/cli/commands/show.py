"""`show` and `explain`: one instance, and why it does not move."""

from __future__ import annotations

from typing import Annotated

import click

from celery_durable.cli.backends.backend import InstanceSnapshot
from celery_durable.cli.command import OpenBackend, Output, command, json_option, open_backend, output_option
from celery_durable.cli.errors import adapt_commands
from celery_durable.cli.inputs import Context, InstanceId, Option, RunNumber, Workflow
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Console, Styled, to_compact_json
from celery_durable.cli.output.render import Times
from celery_durable.insight.explain import Code, Diagnosis
from celery_durable.model import History, RunRef, Status

_MAX_OUTPUT = 200


@command("show order order-42", "show order order-42 --full", "show order order-42 --run 1", options=[output_option])
def show(
    ctx: Context,
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    run: RunNumber,
    full: Annotated[
        bool, Option("--full", help="Include parameters, results, payloads and output, and show exact times.")
    ],
) -> None:
    """Show one instance with its status, steps and events.

    Use it to see what an instance has done, why attempts failed, what it waits for, and what it has published. In a
    pipe: one record per line, whose first field is its kind (instance, label, limit, error, origin, parent, cancel,
    reason, step, item, attempt, event, audit, output, published, explain). --full adds params, and a last field with
    the result, payload or traceback as JSON.
    """
    seen = backend.read_snapshot(workflow, id)
    history = backend.history(workflow, id, run=run)
    published = backend.published(RunRef(workflow, id, history.run_number))
    if console.is_json:
        console.print_json(
            documents.convert(history)
            | {"published": documents.convert(published), "currentRunNumber": seen.run_number}
        )
        return
    times = Times(backend.now(), exact=full or not console.is_for_people)
    is_live = not seen.status.is_terminal and history.run_number == seen.run_number
    diagnosis = backend.explain(workflow, id) if is_live else None
    if console.is_for_people:
        _print_head(console, seen, history, times)
        if diagnosis is not None:
            print_diagnosis(ctx, console, diagnosis)
    else:
        _print_head_records(console, history, times)
    if full:
        console.print_value("params", history.params)
    _print_steps(console, history, times, full=full)
    _print_attempts(console, history, times, full=full)
    events = [render.event_cells(event, history, times) for event in history.events]
    payloads = [(f"{event.type}   {event.event_id}", event.payload) for event in history.events] if full else []
    console.print_section("event", render.EVENT_COLUMNS, events, payloads, heading="PAYLOADS")
    console.print_section(
        "audit", render.AUDIT_COLUMNS, [render.audit_cells(record, times) for record in history.audit]
    )
    if history.status.status is Status.COMPLETE:
        if full or not console.is_for_people:
            console.print_value("output", history.status.output)
        else:
            text = to_compact_json(history.status.output)
            cut = text if len(text) <= _MAX_OUTPUT else f"{text[:_MAX_OUTPUT]}... (complete with --full)"
            console.print_line(Styled("output", "dim"), cut, indent=2)
    rows = [render.published_cells(key, found, times) for key, found in published.items()]
    # A record has the value itself in a field.
    values = [(key, found.value) for key, found in published.items()] if full and console.is_for_people else []
    console.print_section("published", render.PUBLISHED_COLUMNS, rows, values, heading="VALUES")
    if diagnosis is not None and not console.is_for_people:
        console.print_record("explain", diagnosis.code, diagnosis.sentence)


def _print_head(console: Console, seen: InstanceSnapshot, history: History, times: Times) -> None:
    is_current = history.run_number == seen.run_number
    moments = {
        "created": history.created_at,
        "cancelled": history.cancel_requested_at,
        "ended": history.completed_at,
    }
    console.print_line(
        Styled(f"{history.workflow}/{history.instance_id}", "bold"),
        render.style_status(history.status.status),
        f"run {history.run_number}" + ("" if is_current else f" (the current one is {seen.run_number})"),
        *("" if at is None else f"{what} {times.format_in_sentence(at)}" for what, at in moments.items()),
    )
    if history.labels:
        labels = (f"{name}={value}" for name, value in history.labels.items())
        console.print_line(Styled("labels", "dim"), *labels, indent=2)
    for text in render.describe_run(history):
        console.print_line(text, indent=2)


def _print_attempts(console: Console, history: History, times: Times, *, full: bool) -> None:
    rows = [render.attempt_cells(attempt, times) for attempt in history.attempts]
    is_for_programs = full and not console.is_for_people
    tracebacks = [(None, attempt.traceback) for attempt in history.attempts] if is_for_programs else []
    console.print_section("attempt", render.ATTEMPT_COLUMNS, rows, tracebacks)
    for attempt in history.attempts if full and console.is_for_people else ():
        if attempt.traceback is not None:
            number = "" if attempt.attempt is None else f", attempt {attempt.attempt}"
            console.print_heading(f"TRACEBACK   {render.describe_attempt(attempt)}{number}")
            console.print_text(attempt.traceback)


def _print_head_records(console: Console, history: History, times: Times) -> None:
    status = history.status
    cells = times.cells(status.status, history.run_number, history.created_at, history.completed_at)
    console.print_record("instance", history.workflow, history.instance_id, *cells)
    for name, value in history.labels.items():
        console.print_record("label", name, value)
    if history.max_run is not None:
        console.print_record("limit", f"{history.max_run.total_seconds():g}")
    if status.error is not None:
        console.print_record("error", status.error.name, status.error.message)
    if (origin := history.origin) is not None:
        console.print_record("origin", origin.instance_id, str(origin.run_number), origin.step_key or "")
    if (parent := history.parent) is not None:
        item = "" if parent.item is None else str(parent.item)
        names = parent.workflow, parent.instance_id, str(parent.run_number), parent.step_key
        console.print_record("parent", *names, item)
    if history.cancel_requested_at is not None:
        console.print_record("cancel", times.format(history.cancel_requested_at))
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
    maps = [step for step in history.steps if step.items is not None]
    console.print_section("item", render.ITEM_COLUMNS, [row for step in maps for row in render.item_rows(step, times)])


_STYLES = {
    **dict.fromkeys((Code.DONE, Code.RUNNING), "green"),
    **dict.fromkeys((Code.SLEEPING, Code.SCHEDULED, Code.DUE), "cyan"),
    **dict.fromkeys(
        (
            Code.WAITING_EVENT,
            Code.WAITING_TASKS,
            Code.WAITING_CHILD,
            Code.WAITING_STEP,
            Code.RETRY_SCHEDULED,
            Code.CRASHING,
        ),
        "yellow",
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
