"""The commands that only read lists, history, logs, counts and waits, also of workflows that the app does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import click

from celery_durable import values
from celery_durable.cli.backends.backend import LONG_POLL_SECONDS, Backend, ListQuery
from celery_durable.cli.command import OpenBackend, Output, command, open_backend, output_option
from celery_durable.cli.commands.follow import format_attempt, format_end, format_line, format_step
from celery_durable.cli.inputs import (
    Context,
    Cursor,
    InstanceId,
    OfStatus,
    OfWorkflow,
    Option,
    PageLimit,
    RunNumber,
    Workflow,
    label_option,
)
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Cell, Column, Console, Styled, to_compact_json
from celery_durable.cli.output.render import Times
from celery_durable.insight.explain.summaries import iso
from celery_durable.model import (
    OPEN_STEPS,
    AttemptRecord,
    EventRecord,
    History,
    LogLevel,
    LogRecord,
    RunRef,
    Stats,
    Status,
    StatusCount,
    StepStatus,
    WaitFilter,
)
from celery_durable.values import Parameter
from celery_durable.wire.encoding import export_run, to_data

_WORKFLOW_COLUMNS = (
    Column("WORKFLOW"),
    Column("PARAMETERS", keeps_full_text=False, is_optional=True),
    Column("QUEUE", is_optional=True),
    Column("FUNCTION", keeps_full_text=False, is_optional=True),
)


@command("workflows", options=[output_option])
def workflows(ctx: Context, console: Output) -> None:
    """List the workflows.

    Use it to see what you can start, and with which parameters; those with a question mark have defaults. It lists the
    workflows that this app imports, and needs no database; over HTTP, those of the server. In a pipe: name, parameters,
    queue, function.
    """
    found = open_backend(ctx, needs_database=False).workflows()
    console.print_list(
        _WORKFLOW_COLUMNS,
        [[each.name, _format_parameters(each.parameters), each.queue, each.code] for each in found],
        document=lambda: {
            "workflows": [{"name": each.name, "parameters": list(map(asdict, each.parameters))} for each in found]
        },
        if_empty="No workflows are registered.",
    )


def _format_parameters(parameters: Sequence[Parameter]) -> str:
    return ", ".join(f"{each.name}{'' if each.required else '?'}: {each.type}" for each in parameters)


@command(
    "ls",
    "ls -w order",
    "ls -w order -s errored",
    "ls -w order --label tenant=acme",
    "ls -w order --limit 100 --cursor t0jS2hXqZ3o5nS8q",
    options=[output_option],
)
def ls(
    backend: OpenBackend,
    console: Output,
    workflow: OfWorkflow,
    status: OfStatus,
    labels: Annotated[tuple[str, ...], label_option("Only instances with this label; repeatable, all must match.")],
    limit: PageLimit,
    cursor: Cursor,
) -> None:
    """List instances, newest first.

    Use it to find an id, or failed instances, and to see what each one does or waits for. In a pipe: workflow, id,
    status, run, created, changed, at, labels, error.
    """
    page = backend.list(ListQuery(workflow, limit, status, cursor, values.parse_labels(labels)))
    times = Times(backend.now(), exact=not console.is_for_people)
    described = (f" {status}" if status else "") + " instances" + (f" of workflow {workflow!r}" if workflow else "")
    console.print_list(
        render.INSTANCE_COLUMNS,
        [render.instance_cells(item, times) for item in page.items],
        document=lambda: documents.page("instances", map(documents.convert, page.items), page.cursor),
        if_empty=f"No{described}" + (f" with {' '.join(labels)}." if labels else "."),
    )
    console.print_more(page.cursor)


@command(
    "logs order order-42",
    "logs order order-42 -f",
    "logs order order-42 --level warn --category payments",
    options=[output_option],
)
def logs(
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    follow: Annotated[bool, Option("-f", "--follow", help="Continue until the run ends.")],
    run: RunNumber,
    level: Annotated[LogLevel | None, Option("--level", "--log-level", help="Only lines of this level and above.")],
    category: Annotated[str | None, Option("--category", "--log-category", help="Only lines of this category.")],
    replays: Annotated[bool, Option("--replays", help="Include lines that were logged again in a replay.")],
) -> None:
    """Show the log lines and the failed attempts of a run.

    Use it to read what step.log and the engine have logged, oldest first, and why attempts failed. Times are UTC. In a
    pipe: time, level, category, message with its data. A failed attempt has level warn and category attempt.
    """
    ref = _find_run(backend, workflow, id, run)
    read_new_lines = backend.tail(ref, level=level, category=category)
    with_attempts = level is not LogLevel.ERROR and category in (None, ATTEMPT_CATEGORY)
    read_new_attempts = backend.tail_attempts(ref) if with_attempts else lambda: iter(())
    version: object = None
    is_any, has_ended = False, not follow
    while True:
        if follow:
            seen = backend.wait_for_change(workflow, id, version, wait_seconds=LONG_POLL_SECONDS)
            if seen is None:
                continue
            version, has_ended = seen.version, seen.status.is_terminal or seen.run_number != ref.run_number
        lines = [line for line in read_new_lines() if replays or not line.is_replay]
        attempts = list(read_new_attempts())
        is_any = is_any or bool(lines or attempts)
        _print_logs(console, ref.run_number, lines, attempts, is_stream=follow)
        if has_ended:
            if not is_any and not console.is_json:
                console.print_note("No log lines.")
            return


ATTEMPT_CATEGORY = "attempt"


def _print_logs(
    console: Console, run: int, lines: Sequence[LogRecord], attempts: Sequence[AttemptRecord], *, is_stream: bool
) -> None:
    if console.is_json and not is_stream:
        found = {"logs": list(map(documents.convert, lines))}
        found["attempts"] = list(map(documents.convert, attempts))
        console.print_json({"runNumber": run, **found})
        return
    entries: list[tuple[datetime, LogRecord | AttemptRecord, list[Cell]]] = [
        *((line.created_at, line, render.log_cells(line)) for line in lines),
        *((attempt.ended_at, attempt, _attempt_cells(attempt)) for attempt in attempts),
    ]
    for _, record, cells in sorted(entries, key=lambda entry: entry[0]):
        if console.is_json:
            console.print_json(documents.convert(record), is_line=True)
            continue
        console.print_entry(cells)
        if console.is_for_people and isinstance(record, AttemptRecord) and record.traceback is not None:
            console.print_text(record.traceback)


def _attempt_cells(attempt: AttemptRecord) -> list[Cell]:
    level = render.style_status(LogLevel.WARNING, width=5)
    return [Styled(iso(attempt.ended_at), "dim"), level, ATTEMPT_CATEGORY, render.attempt_line(attempt)]


def _find_run(backend: Backend, workflow: str, instance_id: str, run: int | None) -> RunRef:
    if run is not None:
        return RunRef(workflow, instance_id, backend.history(workflow, instance_id, run=run).run_number)
    return RunRef(workflow, instance_id, backend.read_snapshot(workflow, instance_id).run_number)


@command(
    "history order order-42",
    "history order order-42 --include-logs",
    "history order order-42 --run 1",
    options=[output_option],
)
def history(
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    run: RunNumber,
    include_logs: Annotated[bool, Option("--include-logs", "--logs", "include_logs", help="Include log lines.")],
    level: Annotated[
        LogLevel | None,
        Option("--level", "--log-level", help="Only log lines of this level and above; implies --include-logs."),
    ],
    category: Annotated[
        str | None,
        Option("--category", "--log-category", help="Only log lines of this category; implies --include-logs."),
    ],
) -> None:
    """Show what has happened in a run, in order of time.

    Use it to see how a run got to its current state: its start, its steps, their failed attempts, the events it
    received, and its end. In a pipe: time, kind (run, step, attempt, event, log), status, level or type, then the
    details.
    """
    run_history = backend.history(workflow, id, run=run)
    lines: list[LogRecord] = []
    include_logs = bool(include_logs or level or category)
    if include_logs:
        read_logs = backend.tail(RunRef(workflow, id, run_history.run_number), level=level, category=category)
        lines = [line for line in read_logs() if not line.is_replay]
    if console.is_json:
        with_logs = {"logs": list(map(documents.convert, lines))} if include_logs else {}
        console.print_json(documents.convert(run_history) | with_logs)
        return
    times = Times(backend.now(), exact=not console.is_for_people)
    entries = [*_history_entries(run_history, times), *((line.created_at, _log_cells(line)) for line in lines)]
    for at, cells in sorted(entries, key=lambda item: item[0]):
        console.print_entry([Styled(iso(at), "dim"), *cells])


def _history_entries(run_history: History, times: Times) -> Iterator[tuple[datetime, list[Cell]]]:
    names = {step.step_key: step.name for step in run_history.steps}
    started = format_line(
        "run", Status.ACTIVE, f"run {run_history.run_number} of {run_history.workflow}/{run_history.instance_id}"
    )
    yield (
        run_history.created_at,
        started if run_history.parent is None else [*started, render.describe_parent(run_history.parent)],
    )
    for attempt in run_history.attempts:
        yield attempt.ended_at, format_attempt(attempt)
    for event in run_history.events:
        yield event.created_at, _event_cells(event, names)
    for step in run_history.steps:
        if step.status is StepStatus.LINEAR_PENDING:  # the run has not reached this step
            continue
        is_open = step.status in OPEN_STEPS
        at = step.started_at if is_open else step.finished_at
        yield at or step.created_at or run_history.created_at, format_step(step, times)
    if run_history.completed_at is not None:
        yield run_history.completed_at, format_end(run_history)


def _event_cells(event: EventRecord, names: dict[str, str]) -> list[Cell]:
    key = event.consumed_by_step_key
    consumer = "" if key is None else f"consumed by {names.get(key, key)}"
    return [Styled("event", "dim", 4), Styled(event.type, "", 9), event.event_id, consumer]


def _log_cells(line: LogRecord) -> list[Cell]:
    _, level, category, text, *_ = render.log_cells(line)
    return [Styled("log", "dim", 4), level, category, text]


_WAIT_COLUMNS = tuple(map(Column, ("EVENT", "WORKFLOW", "ID", "STEP", "SINCE", "TIMES OUT", "STATUS", "TO", "ASKS")))


@command("stats", options=[output_option])
def stats(backend: OpenBackend, console: Output) -> None:
    """Count instances by workflow and status.

    Use it for an overview. It also shows how many runs are due and not claimed, since when, and how many messages are
    in the queues. 10000+ means 10,000 or more. In a pipe: count, workflow, status, number; then due, number, since;
    then queue, name, length.
    """
    found = backend.stats()
    oldest = Times(backend.now(), exact=not console.is_for_people).format(found.due.oldest)
    if console.is_json:
        console.print_json(documents.convert(found))
    elif console.is_for_people:
        _print_stats(console, found, oldest)
    else:
        for count in found.instances:
            console.print_record("count", count.workflow, count.status, str(count))
        console.print_record("due", str(found.due), oldest)
        for queue in found.queues:
            console.print_record("queue", queue.name, "" if queue.messages is None else str(queue.messages))


def _print_stats(console: Console, found: Stats, oldest: str) -> None:
    statuses = [status for status in Status if any(each.status is status for each in found.instances)]
    rows: dict[str, dict[Status, StatusCount]] = {}
    for count in found.instances:
        rows.setdefault(count.workflow, {})[count.status] = count
    if rows:
        columns = [Column("WORKFLOW"), *(Column(status.upper()) for status in statuses)]
        console.print_table(
            columns, [[name, *(str(row.get(each, "-")) for each in statuses)] for name, row in rows.items()]
        )
        click.echo()
    console.print_line("due now", Styled(str(found.due), "bold"), oldest and f"the oldest {oldest}")
    for queue in found.queues:
        is_known = queue.messages is not None
        length = f"{queue.messages} messages" if is_known else "unknown: no broker, or the queue does not exist yet"
        console.print_line(f"queue {queue.name}", length)


@command("waits", "waits --type approval -w order", "waits --to finance", options=[output_option])
def waits(
    backend: OpenBackend,
    console: Output,
    event_type: Annotated[str | None, Option("-t", "--type", "event_type", help="Only waits for events of this type.")],
    workflow: OfWorkflow,
    to: Annotated[str | None, Option("--to", help="Only waits that ask this person or team.")],
    is_asking: Annotated[bool, Option("--asking", "is_asking", help="Only waits that ask a person.")],
    limit: PageLimit,
    cursor: Cursor,
) -> None:
    """List the instances that wait for an event.

    Use it to find where to send an event, and what people are asked. Waits of the newest instances come first. In a
    pipe: type, workflow, id, step, since, times out, status of the instance, whom it asks, the question.
    """
    chosen = WaitFilter(workflow=workflow, event_type=event_type, to=to, is_asking=is_asking)
    page = backend.waits(chosen, cursor=cursor, limit=limit)
    cells = Times(backend.now(), exact=not console.is_for_people).cells
    rows = [
        cells(
            each.wait_event_type,
            each.workflow,
            each.instance_id,
            each.step_name,
            each.since,
            each.wake_at,
            each.status,
            each.to or "",
            each.ask if isinstance(each.ask, str) else each.ask and to_compact_json(each.ask),
        )
        for each in page.items
    ]
    nothing = "No instance waits for an event" + (f" of type {event_type!r}" if event_type else "")
    if to is not None or is_asking:
        nothing += " and asks " + ("a person" if to is None else repr(to))
    console.print_list(
        _WAIT_COLUMNS,
        rows,
        document=lambda: documents.page("waits", map(documents.convert, page.items), page.cursor),
        if_empty=f"{nothing}.",
    )
    console.print_more(page.cursor)


@command("export order order-42", "export order order-42 --run 1 --no-logs")
def export(
    backend: OpenBackend,
    workflow: Workflow,
    id: InstanceId,
    run: RunNumber,
    logs: Annotated[bool, click.option("--logs/--no-logs", default=True, help="Include log lines, or leave them out.")],
) -> None:
    """Print the complete record of a run as JSON.

    Use it to archive the history of an instance, to attach it to a bug report, to query it with jq, or to replay it on
    another machine (replay --file). It contains parameters, results and payloads, after the application's redaction.
    """
    from celery_durable.store.engine.time_limits import limit_database_time  # with it comes SQLAlchemy

    with limit_database_time(None):  # a run may be as large as it likes (LAW 7)
        history = backend.history(workflow, id, run=run)
        read_logs = backend.tail(RunRef(workflow, id, history.run_number))() if logs else None
        lines = None if read_logs is None else list(read_logs)
    click.echo(json.dumps(to_data(export_run(history, lines)), ensure_ascii=False, indent=2))
