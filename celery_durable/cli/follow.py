"""Following an instance while it runs: what is new since the last look, in order of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime

from celery_durable.cli import render
from celery_durable.cli.backend import PATIENCE_SECONDS, Backend, Seen
from celery_durable.cli.console import Cell, Styled
from celery_durable.cli.render import Times
from celery_durable.errors import ResultTimeout, WorkflowFailed
from celery_durable.model import (
    History,
    InstanceStatus,
    LogLevel,
    LogRecord,
    Published,
    Status,
    StepRecord,
    StepStatus,
    StepType,
)

_TRIES = 5

News = tuple[datetime, list[Cell]]


class Follower:
    """One run of an instance, told line by line: when, kind (step, log, run), status or level, what.

    A published value: when, "published", its key, the value.

    ``since``: what ended before it is not told.
    """

    def __init__(
        self, backend: Backend, workflow: str, instance_id: str, run: int, *, since: datetime | None = None
    ) -> None:
        self._backend, self.workflow, self.instance_id, self.run = backend, workflow, instance_id, run
        self._since = since
        self._version: object = None
        self._told: dict[str, tuple[StepStatus, int]] = {}
        self._published: dict[str, Published] = {}
        self._tail = backend.tail(workflow, instance_id, run=run)
        self._is_end_told = False
        self.is_over = False

    def news(self, *, patience: float = 0.0) -> list[News]:
        """The lines since the last call: steps that ended, failed or began to wait, logs, published values, the end.

        Where there are none, waits for up to ``patience`` seconds.
        """
        seen = self._backend.look(self.workflow, self.instance_id, known=self._version, patience=patience)
        if seen is None:
            return []
        seen, history, lines, published = self._read_together(seen)
        self._version = seen.version
        self.is_over = seen.status.is_terminal or seen.run_number != self.run
        # What a step says is before its end.
        found = [*self._logs(lines), *self._values(published), *self._steps(history), *self._end(history)]
        found.sort(key=lambda item: item[0])
        return [(at, cells) for at, cells in found if self._since is None or at >= self._since]

    def _read_together(self, seen: Seen) -> tuple[Seen, History, list[LogRecord], dict[str, Published]]:
        """The instance, its steps, new log lines and values as of one moment: each commit counts the version."""
        lines: list[LogRecord] = []
        for tries in itertools.count(1):
            history = self._backend.history(self.workflow, self.instance_id, run=self.run)
            lines += self._tail.news()
            published = self._backend.published(self.workflow, self.instance_id, run=self.run)
            newer = self._backend.look(self.workflow, self.instance_id, known=seen.version)
            if newer is None or tries == _TRIES:
                return seen, history, lines, published
            seen = newer
        raise AssertionError("unreachable")

    def _steps(self, history: History) -> Iterator[News]:
        times = Times(self._backend.now(), exact=False)
        for step in history.steps:
            now = step.status, step.attempts
            if step.status in _UNTOLD or self._told.get(step.step_key) == now:
                continue
            self._told[step.step_key] = now
            at = step.finished_at or step.started_at or step.created_at or history.created_at
            yield at, step_line(step, times)

    def _logs(self, lines: Sequence[LogRecord]) -> Iterator[News]:
        for line in lines:
            if not line.is_replay:
                _, _, _, said = render.log_cells(line)
                yield line.created_at, line_of("log", line.level, said)

    def _values(self, published: dict[str, Published]) -> Iterator[News]:
        before, self._published = self._published, published
        for key, found in published.items():
            if before.get(key) != found:
                yield found.updated_at, [Styled("published", "dim", 16), key, render.progress(found.value)]

    def _end(self, history: History) -> Iterator[News]:
        """Once: on a busy database it may have come between two reads."""
        status, at = history.status, history.completed_at
        if status.status.is_terminal and at is not None and not self._is_end_told:
            self._is_end_told = True
            why = Styled(render.sentence(status.error), "red") if status.error else history.reason or ""
            yield at, line_of("run", status.status, why)


_UNTOLD = frozenset({StepStatus.PENDING, StepStatus.LINEAR_PENDING, StepStatus.RUNNING})
"""Neither news of what is over nor of what is to come."""


def follow_to_end(follower: Follower, backend: Backend, *, timeout_seconds: float | None) -> Iterator[News]:
    """The news of a run until it ends; raises ResultTimeout."""
    started = backend.monotonic()
    left = PATIENCE_SECONDS
    while True:
        if timeout_seconds is not None:
            left = timeout_seconds - (backend.monotonic() - started)
        yield from follower.news(patience=max(0.0, min(left, PATIENCE_SECONDS)))
        if follower.is_over:
            return
        if timeout_seconds is not None and left <= 0:
            seen = backend.look(follower.workflow, follower.instance_id)
            assert seen is not None
            raise ResultTimeout(follower.workflow, follower.instance_id, seen.status, timeout_seconds)


def how_it_ended(follower: Follower, backend: Backend) -> InstanceStatus:
    """The outcome of a run that is over; raises WorkflowFailed where it did not complete."""
    status = backend.history(follower.workflow, follower.instance_id, run=follower.run).status
    if status.status is not Status.COMPLETE:
        name, message = (None, None) if status.error is None else (status.error.name, status.error.message)
        raise WorkflowFailed(follower.workflow, follower.instance_id, status.status, name, message)
    return status


def step_line(step: StepRecord, times: Times) -> list[Cell]:
    """A step as it is told: its status, its name, how long it took or what it waits for."""
    what: list[Cell] = [step.name]
    if step.is_waiting:
        what.append(render.waits_for(step, times))
    elif step.display_type in (StepType.DO, StepType.TASK):
        tries = f"{step.attempts} attempts" if step.attempts > 1 else ""
        what += [render.took(step, times.now), tries]
    return line_of("step", step.status, *what, Styled(render.sentence(step.error), "red"))


def line_of(kind: str, word: Status | StepStatus | LogLevel, *what: Cell) -> list[Cell]:
    """Kind, status or level, and what there is to say."""
    return [Styled(kind, "dim", 4), render.painted(word, width=9), *what]
