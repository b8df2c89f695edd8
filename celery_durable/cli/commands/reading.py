"""The commands that only read: workflows, ls, logs and history. They also show instances of unknown workflows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated

from celery_durable import values
from celery_durable.cli.backends.backend import LONG_POLL_SECONDS, Backend, ListQuery
from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.commands.follow import format_line, format_step
from celery_durable.cli.inputs import (
    Cursor,
    InstanceId,
    OfStatus,
    OfWorkflow,
    PageLimit,
    RunNumber,
    WordInput,
    Workflow,
    flag,
    option,
)
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Cell, Column, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.model import OPEN_STEPS, EventRecord, History, LogLevel, LogRecord, Status, StepStatus

_WORKFLOW_COLUMNS = (
    Column("WORKFLOW"),
    Column("QUEUE", is_optional=True),
    Column("FUNCTION", keeps_full_text=False, is_optional=True),
)


@command("workflows", options=[output_option])
def workflows(backend: OpenBackend, console: Output) -> None:
    """List the workflows.

    Use it to see what you can start. It lists the workflows that this app imports; over HTTP, those of the server. In a
    pipe: name, queue, function.
    """
    found = backend.workflows()
    console.print_list(
        _WORKFLOW_COLUMNS,
        [[each.name, each.queue, each.code] for each in found],
        document={"workflows": [{"name": each.name} for each in found]},
        if_empty="No workflows are registered.",
    )


@command(
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
    labels: Annotated[
        tuple[str, ...],
        option(
            "--label",
            "labels",
            multiple=True,
            metavar="NAME=VALUE",
            help="Only instances with this label; repeatable, all must match.",
        ),
    ],
    limit: PageLimit,
    cursor: Cursor,
) -> None:
    """List instances, newest first.

    Use it to find an id, or failed instances. In a pipe: workflow, id, status, run, created, changed, next time due,
    error.
    """
    page = backend.list(ListQuery(workflow, limit, status, cursor, values.parse_labels(labels)))
    times = Times(backend.now(), exact=not console.is_for_people)
    described = (f" {status}" if status else "") + " instances" + (f" of workflow {workflow!r}" if workflow else "")
    console.print_list(
        render.INSTANCE_COLUMNS,
        [render.instance_cells(item, times) for item in page.items],
        document=documents.page("instances", map(documents.instance, page.items), page.cursor),
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
    follow: Annotated[bool, flag("-f", "--follow", help="Continue until the run ends.")],
    run: RunNumber,
    level: Annotated[
        LogLevel | None,
        option("--level", "--log-level", type=WordInput(LogLevel), help="Only lines of this level and above."),
    ],
    category: Annotated[str | None, option("--category", "--log-category", help="Only lines of this category.")],
    replays: Annotated[bool, flag("--replays", help="Include lines that were logged again in a replay.")],
) -> None:
    """Show the log lines of a run.

    Use it to read what step.log and the engine have logged, oldest first. Times are UTC. In a pipe: time, level,
    category, message with its data.
    """
    number = _run_number(backend, workflow, id, run)
    tail = backend.tail(workflow, id, run=number, level=level, category=category)
    version: object = None
    is_any, has_ended = False, not follow
    while True:
        if follow:
            seen = backend.read_snapshot(workflow, id, known_version=version, wait_seconds=LONG_POLL_SECONDS)
            if seen is None:
                continue
            version, has_ended = seen.version, seen.status.is_terminal or seen.run_number != number
        lines = [line for line in tail.read_new_lines() if replays or not line.is_replay]
        is_any = is_any or bool(lines)
        _print_logs(console, number, lines, is_stream=follow)
        if has_ended:
            if not is_any and not console.is_json:
                console.print_note("No log lines.")
            return


def _print_logs(console: Console, run: int, lines: Sequence[LogRecord], *, is_stream: bool) -> None:
    if console.is_json and not is_stream:
        console.print_json({"runNumber": run, "logs": list(map(documents.log, lines))})
        return
    for line in lines:
        if console.is_json:
            console.print_json(documents.log(line), is_line=True)
        else:
            console.print_entry(render.log_cells(line))


def _run_number(backend: Backend, workflow: str, instance_id: str, run: int | None) -> int:
    """Return the number of the run that the user selected; raises RunNotFound."""
    if run is not None:
        return backend.history(workflow, instance_id, run=run).run_number
    seen = backend.read_snapshot(workflow, instance_id)
    assert seen is not None
    return seen.run_number


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
    include_logs: Annotated[bool, flag("--include-logs", "--logs", "include_logs", help="Include log lines.")],
    level: Annotated[
        LogLevel | None,
        option(
            "--level",
            "--log-level",
            type=WordInput(LogLevel),
            help="Only log lines of this level and above; implies --include-logs.",
        ),
    ],
    category: Annotated[
        str | None,
        option("--category", "--log-category", help="Only log lines of this category; implies --include-logs."),
    ],
) -> None:
    """Show what has happened in a run, in order of time.

    Use it to see how a run got to its current state: its start, its steps, the events it received, and its end. In a
    pipe: time, kind (run, step, event, log), status, level or type, then the details.
    """
    run_history = backend.history(workflow, id, run=run)
    lines: list[LogRecord] = []
    include_logs = bool(include_logs or level or category)
    if include_logs:
        tail = backend.tail(workflow, id, run=run_history.run_number, level=level, category=category)
        lines = [line for line in tail.read_new_lines() if not line.is_replay]
    if console.is_json:
        with_logs = {"logs": list(map(documents.log, lines))} if include_logs else {}
        console.print_json(documents.run(run_history) | with_logs)
        return
    times = Times(backend.now(), exact=not console.is_for_people)
    entries = [*_history_entries(run_history, times), *((line.created_at, _log_cells(line)) for line in lines)]
    for at, cells in sorted(entries, key=lambda item: item[0]):
        console.print_entry([Styled(render.iso(at), "dim"), *cells])


def _history_entries(run_history: History, times: Times) -> Iterator[tuple[datetime, list[Cell]]]:
    status, names = run_history.status, {step.step_key: step.name for step in run_history.steps}
    started = format_line(
        "run", Status.ACTIVE, f"run {run_history.run_number} of {run_history.workflow}/{run_history.instance_id}"
    )
    yield (
        run_history.created_at,
        started if run_history.parent is None else [*started, render.describe_parent(run_history.parent)],
    )
    for event in run_history.events:
        yield event.created_at, _event_cells(event, names)
    for step in run_history.steps:
        if step.status is StepStatus.LINEAR_PENDING:  # the run has not reached this step
            continue
        is_open = step.status in OPEN_STEPS
        at = step.started_at if is_open else step.finished_at
        yield at or step.created_at or run_history.created_at, format_step(step, times)
    if run_history.completed_at is not None:
        why = Styled(render.format_error(status.error), "red") if status.error else run_history.reason or ""
        yield run_history.completed_at, format_line("run", status.status, why)


def _event_cells(event: EventRecord, names: dict[str, str]) -> list[Cell]:
    key = event.consumed_by_step_key
    consumer = "" if key is None else f"consumed by {names.get(key, key)}"
    return [Styled("event", "dim", 4), Styled(event.type, "", 9), event.event_id, consumer]


def _log_cells(line: LogRecord) -> list[Cell]:
    _, level, category, text, *_ = render.log_cells(line)
    return [Styled("log", "dim", 4), level, category, text]
