"""Follows a run while it executes: `watch`, and the updates that `start --follow` and `dev` print."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

import click

from celery_durable.cli.backends.backend import LONG_POLL_SECONDS, Backend, InstanceSnapshot, ListQuery
from celery_durable.cli.command import OpenBackend, Output, command, output_option
from celery_durable.cli.inputs import Option, OptionalId, OptionalWorkflow
from celery_durable.cli.output import documents, render
from celery_durable.cli.output.console import Cell, Console, Styled
from celery_durable.cli.output.render import Times
from celery_durable.errors import ResultTimeout, WorkflowFailed
from celery_durable.insight.explain.summaries import describe_wait, format_time_taken
from celery_durable.model import (
    AttemptRecord,
    History,
    InstanceStatus,
    LogLevel,
    LogRecord,
    Published,
    RunRef,
    Status,
    StepRecord,
    StepStatus,
    StepType,
)

_MAX_READS = 5


@dataclass(frozen=True, slots=True)
class Update:
    at: datetime
    cells: list[Cell]
    record: documents.Change


class Follower:
    """Follows one run. The cells of an update are kind (step, attempt, log, run), status, outcome or level, text.

    Of a published value: "published", its key and the value. ``since``: updates before it are left out.
    """

    def __init__(self, backend: Backend, ref: RunRef, *, since: datetime | None = None) -> None:
        self._backend, self._ref, self._since = backend, ref, since
        self._version: object = None
        self._shown: dict[str, tuple[StepStatus, int]] = {}
        self._published: dict[str, Published] = {}
        self._read_new_lines = backend.tail(ref)
        self._read_new_attempts = backend.tail_attempts(ref)
        self._is_end_shown = False
        self.has_ended = False

    def read_updates(self, *, wait_seconds: float = 0.0) -> list[Update]:
        """The updates since the last call; if there are none, wait for up to ``wait_seconds``."""
        seen = self._wait_for_change(self._version, wait_seconds=wait_seconds)
        if seen is None:
            return []
        seen, history, lines, attempts, published = self._read_together(seen)
        self._version = seen.version
        self.has_ended = seen.status.is_terminal or seen.run_number != self._ref.run_number
        # Sorting is stable: with equal times, log lines and failed attempts of a step come before its end.
        updates = [*self._logs(lines), *self._values(published), *map(_attempt_update, attempts)]
        updates += [*self._steps(history), *self._end(history)]
        updates.sort(key=lambda update: update.at)
        return [update for update in updates if self._since is None or update.at >= self._since]

    def read_to_end(self, timeout: timedelta | None) -> Iterator[Update]:
        """Yield the updates of the run until it ends; raises ResultTimeout."""
        limit_seconds = math.inf if timeout is None else timeout.total_seconds()
        monotonic = self._backend.runtime.monotonic
        started = monotonic()
        while True:
            left = limit_seconds - (monotonic() - started)
            yield from self.read_updates(wait_seconds=max(0.0, min(left, LONG_POLL_SECONDS)))
            if self.has_ended:
                return
            if left <= 0:
                seen = self._backend.read_snapshot(self._ref.workflow, self._ref.instance_id)
                raise ResultTimeout(self._ref.workflow, self._ref.instance_id, seen.status, limit_seconds)

    def read_outcome(self) -> InstanceStatus:
        """Return the final status of a run that has ended; raises WorkflowFailed if it did not complete."""
        status = self._read_history().status
        if status.status is not Status.COMPLETE:
            name, message = (None, None) if status.error is None else (status.error.name, status.error.message)
            raise WorkflowFailed(self._ref.workflow, self._ref.instance_id, status.status, name, message)
        return status

    def _wait_for_change(self, version: object | None, *, wait_seconds: float = 0.0) -> InstanceSnapshot | None:
        workflow, instance_id = self._ref.workflow, self._ref.instance_id
        return self._backend.wait_for_change(workflow, instance_id, version, wait_seconds=wait_seconds)

    def _read_history(self) -> History:
        return self._backend.history(self._ref.workflow, self._ref.instance_id, run=self._ref.run_number)

    def _read_together(
        self, seen: InstanceSnapshot
    ) -> tuple[InstanceSnapshot, History, list[LogRecord], list[AttemptRecord], dict[str, Published]]:
        """Read instance, steps, new lines, attempts and values again until no commit changed the version meanwhile."""
        lines: list[LogRecord] = []
        attempts: list[AttemptRecord] = []
        for attempt in itertools.count(1):
            history = self._read_history()
            lines += self._read_new_lines()
            attempts += self._read_new_attempts()
            published = self._backend.published(self._ref)
            newer = self._wait_for_change(seen.version)
            if newer is None or attempt == _MAX_READS:
                return seen, history, lines, attempts, published
            seen = newer
        raise AssertionError("unreachable")

    def _steps(self, history: History) -> Iterator[Update]:
        times = Times(self._backend.now(), exact=False)
        for step in history.steps:
            now = step.status, step.attempts
            if step.status in _HIDDEN_STATUSES or self._shown.get(step.step_key) == now:
                continue
            self._shown[step.step_key] = now
            at = step.finished_at or step.started_at or step.created_at or history.created_at
            yield Update(at, format_step(step, times), step)

    def _logs(self, lines: Sequence[LogRecord]) -> Iterator[Update]:
        for line in lines:
            if not line.is_replay:
                _, _, _, text = render.log_cells(line)
                cells = format_line("log", line.level, text)
                yield Update(line.created_at, cells, line)

    def _values(self, published: dict[str, Published]) -> Iterator[Update]:
        before, self._published = self._published, published
        for key, found in published.items():
            if before.get(key) != found:
                cells: list[Cell] = [Styled("published", "dim", 16), key, render.format_progress(found.value)]
                yield Update(found.updated_at, cells, {key: found})

    def _end(self, history: History) -> Iterator[Update]:
        """Yield the end of the run, only once."""
        status, at = history.status, history.completed_at
        if status.status.is_terminal and at is not None and not self._is_end_shown:
            self._is_end_shown = True
            yield Update(at, format_end(history), status)


_HIDDEN_STATUSES = frozenset({StepStatus.PENDING, StepStatus.LINEAR_PENDING, StepStatus.RUNNING})
"""Steps with these statuses have not finished and wait for nothing, so there is nothing to show yet."""


def _attempt_update(attempt: AttemptRecord) -> Update:
    return Update(attempt.ended_at, format_attempt(attempt), attempt)


def print_update(console: Console, update: Update) -> None:
    """Print an update of a followed instance."""
    if console.is_json:
        console.print_json(documents.change(update.record), is_line=True)
    else:
        console.print_event(render.format_clock_time(update.at, exact=not console.is_for_people), update.cells)


def format_step(step: StepRecord, times: Times) -> list[Cell]:
    """Format a step: status, name, and how long it took or what it waits for."""
    cells: list[Cell] = [step.name]
    if step.is_waiting:
        cells.append(describe_wait(step, times))
    elif step.display_type in (StepType.DO, StepType.TASK):
        attempt = f"{step.attempts} attempts" if step.attempts > 1 else ""
        cells += [format_time_taken(step, times.now), attempt]
    return format_line("step", step.status, *cells, Styled(render.format_error(step.error), "red"))


def format_end(history: History) -> list[Cell]:
    """Format the end of a run: its status, and why it ended."""
    status = history.status
    why = Styled(render.format_error(status.error), "red") if status.error else history.reason or ""
    return format_line("run", status.status, why)


def format_attempt(attempt: AttemptRecord) -> list[Cell]:
    """Format an attempt that did not succeed."""
    return [Styled("attempt", "dim", 4), Styled(str(attempt.outcome), "red", 9), render.attempt_line(attempt)]


def format_line(kind: str, word: Status | StepStatus | LogLevel, *cells: Cell) -> list[Cell]:
    """Format an update: kind, status or level, and further cells."""
    return [Styled(kind, "dim", 4), render.style_status(word, width=9), *cells]


@command("watch order order-42", "watch order -s waiting --every 10s", options=[output_option])
def watch(
    backend: OpenBackend,
    console: Output,
    workflow: OptionalWorkflow,
    id: OptionalId,
    status: Annotated[Status | None, Option("-s", "--status", help="List: only instances with this status.")],
    limit: Annotated[
        int, Option("--limit", type=click.IntRange(1, 100), default=25, help="List: maximum number of rows.")
    ],
    every: Annotated[timedelta, Option("--every", default="2s", help="List: time between refreshes.")],
    timeout: Annotated[timedelta | None, Option("--timeout", help="Instance: how long to watch at most.")],
) -> None:
    """Watch an instance until it ends, or a list as it changes.

    Use it to follow progress. For an instance, it prints a line for each step, failed attempt, log line, published
    value and the end, and fails if the instance fails. A terminal shows a published progress value as a bar. For a
    list, it runs until you interrupt it: a terminal refreshes the table, a pipe gets a record for each new or changed
    instance.
    """
    if id is None:
        _watch_list(backend, console, ListQuery(workflow, limit, status), every)
        return
    if status is not None or workflow is None:
        raise click.UsageError("--status is for lists.")
    seen = backend.read_snapshot(workflow, id)
    follower = Follower(backend, RunRef(workflow, id, seen.run_number))
    for update in follower.read_to_end(timeout or None):  # 0 means without limit
        print_update(console, update)
    follower.read_outcome()


def _watch_list(backend: Backend, console: Console, query: ListQuery, every: timedelta) -> None:
    shown_states: dict[tuple[str, str], object] = {}
    while True:
        items = backend.list(query).items
        times = Times(backend.now(), exact=not console.is_for_people)
        if console.is_for_people:
            click.clear()
            about = " ".join(filter(None, [query.workflow, query.status and f"({query.status})"])) or "all workflows"
            console.print_line(
                Styled(about, "bold"), Styled(f"every {every.total_seconds():g} s; Ctrl-C ends it", "dim")
            )
            console.print_table(render.INSTANCE_COLUMNS, [render.instance_cells(item, times) for item in items])
        else:
            for item in reversed(items):
                state = item.status, item.run_number, item.updated_at
                if shown_states.get((item.workflow, item.id)) != state:
                    shown_states[item.workflow, item.id] = state
                    if console.is_json:
                        console.print_json(documents.convert(item), is_line=True)
                    else:
                        console.print_record(*render.instance_cells(item, times))
        backend.runtime.sleep(every.total_seconds())
