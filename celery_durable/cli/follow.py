"""Following an instance while it runs: what is new since the last look, in order of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from celery_durable.app import Durable
from celery_durable.cli import render
from celery_durable.cli.render import Times
from celery_durable.cli.screen import Cell, Styled
from celery_durable.cli.verb import database_now
from celery_durable.errors import ResultTimeout
from celery_durable.model import History, InstanceRow, LogLevel, LogRecord, Status, StepRecord, StepStatus, StepType

LOOK_SECONDS = 0.1
"""Between two looks at an instance that is followed; a look is two small reads."""
LOGS_PER_PAGE = 1000
_TRIES = 5

News = tuple[datetime, list[Cell]]


class Follower:
    """One run of an instance, told line by line: when, kind (step, log, run), status or level, what.

    ``since``: what ended before it is not told.
    """

    def __init__(
        self, durable: Durable, workflow: str, instance_id: str, run: int, *, since: datetime | None = None
    ) -> None:
        self._durable, self.workflow, self.instance_id, self.run = durable, workflow, instance_id, run
        self._since = since
        self._version: int | None = None
        self._told: dict[str, tuple[StepStatus, int]] = {}
        self._last_log = 0
        self._is_end_told = False
        self.is_over = False

    def news(self) -> list[News]:
        """The lines since the last call: steps that ended, failed or began to wait, log lines, the run's end."""
        row = self._row()
        if row.version == self._version:
            return []
        seen, history, lines = self._read_together(row)
        self._version = seen.version
        self.is_over = seen.status.is_terminal or seen.run_number != self.run
        found = [*self._logs(lines), *self._steps(history), *self._end(history)]  # what a step says is before its end
        found.sort(key=lambda item: item[0])
        return [(at, cells) for at, cells in found if self._since is None or at >= self._since]

    def _read_together(self, row: InstanceRow) -> tuple[InstanceRow, History, list[LogRecord]]:
        """The instance, its steps and its new log lines as of one moment: each commit counts the version."""
        for tries in itertools.count(1):
            history = self._durable.operations.history(self.workflow, self.instance_id, run=self.run)
            lines = list(lines_after(self._last_log, self._read_logs))
            seen, row = row, self._row()
            if row.version == seen.version or tries == _TRIES:
                return seen, history, lines
        raise AssertionError("unreachable")

    def _row(self) -> InstanceRow:
        return self._durable.operations.get(self.workflow, self.instance_id).instance

    def _read_logs(self, *, after_id: int) -> list[LogRecord]:
        read = self._durable.operations.logs
        return read(self.workflow, self.instance_id, run=self.run, after_id=after_id, limit=LOGS_PER_PAGE)

    def _steps(self, history: History) -> Iterator[News]:
        times = Times(database_now(self._durable), exact=False)
        for step in history.steps:
            now = step.status, step.attempts
            if step.status is StepStatus.PENDING or self._told.get(step.step_key) == now:
                continue
            self._told[step.step_key] = now
            at = step.finished_at or step.started_at or step.created_at or history.created_at
            yield at, _step_line(step, times)

    def _logs(self, lines: Sequence[LogRecord]) -> Iterator[News]:
        for line in lines:
            self._last_log = line.id
            if not line.is_replay:
                _, _, _, said = render.log_cells(line)
                yield line.created_at, _line("log", line.level, said)

    def _end(self, history: History) -> Iterator[News]:
        """Once: on a busy database it may have come between two reads."""
        status, at = history.status, history.completed_at
        if status.status.is_terminal and at is not None and not self._is_end_told:
            self._is_end_told = True
            why = Styled(render.sentence(status.error), "red") if status.error else history.reason or ""
            yield at, _line("run", status.status, why)


def lines_after(seen: int, read: Callable[..., Sequence[LogRecord]]) -> Iterator[LogRecord]:
    """All log lines after the line ``seen``; ``read`` is `Operations.logs` for one run, in pages of LOGS_PER_PAGE."""
    while True:
        page = read(after_id=seen)
        yield from page
        if len(page) < LOGS_PER_PAGE:
            return
        seen = page[-1].id


def follow_to_end(follower: Follower, durable: Durable, *, timeout_seconds: float | None) -> Iterator[News]:
    """The news of a run until it ends; raises ResultTimeout."""
    begun = durable.runtime.monotonic()
    while True:
        yield from follower.news()
        if follower.is_over:
            return
        if timeout_seconds is not None and durable.runtime.monotonic() - begun >= timeout_seconds:
            status = durable.operations.get(follower.workflow, follower.instance_id).status.status
            raise ResultTimeout(follower.workflow, follower.instance_id, status, timeout_seconds)
        durable.runtime.sleep(LOOK_SECONDS)


def _step_line(step: StepRecord, times: Times) -> list[Cell]:
    what: list[Cell] = [step.name]
    if step.status is StepStatus.WAITING:
        what.append(render.waits_for(step, times))
    elif step.type is StepType.DO:
        tries = f"{step.attempts} attempts" if step.attempts > 1 else ""
        what += [render.took(step, times.now), tries]
    return _line("step", step.status, *what, Styled(render.sentence(step.error), "red"))


def _line(kind: str, word: Status | StepStatus | LogLevel, *what: Cell) -> list[Cell]:
    return [Styled(kind, "dim", 4), render.painted(word, width=9), *what]
