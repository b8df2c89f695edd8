"""The times of a run's steps as bars: in the queue, waiting for a limit, running, between two attempts, and waiting.

A long time in which nothing runs is drawn shorter, because otherwise a wait of a day hides all work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise

from celery_durable.model import AttemptRecord, RunningStep, RunRecord, StepRecord, StepType, format_duration

WIDTH = 1000.0
_LEAST_WIDTH = 3.0
_IDLE_SHARE = 0.1
"""How long a time in which nothing runs is drawn at most, compared with all the work."""


class Phase(StrEnum):
    """What a step does for a while."""

    QUEUED = "queued"
    LIMITED = "waits for a limit"
    RUNS = "runs"
    FAILED = "failed attempt"
    BACKOFF = "backoff"
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Span:
    """A step's phase, and from when to when it lasts."""

    phase: Phase
    start: datetime
    end: datetime
    name: str = ""
    """How its bar names it, if not as its phase."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span as drawn: ``x`` and ``width`` are parts of `WIDTH`."""

    css: str
    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bars of each step, by step key. ``start``: how long the run waited before it began."""

    bars: Mapping[str, Sequence[Bar]]
    start: Sequence[Bar]
    is_shortened: bool


def draw(
    run: RunRecord,
    steps: Sequence[StepRecord],
    attempts: Iterable[AttemptRecord],
    running: RunningStep | None,
    now: datetime,
    *,
    is_first_page: bool,
    limits: Mapping[str, str],
) -> Timeline:
    """Return the bars of some steps of a run. ``limits``: the name of the limit for which a step waits, by step key."""
    failed = defaultdict[str | None, list[AttemptRecord]](list)
    for each in attempts:
        if each.item is None:
            failed[each.step_key].append(each)
    end = run.completed_at or now
    spans = {step.step_key: _find_spans(step, failed[step.step_key], running, end, limits) for step in steps}
    first = min((span.start for each in spans.values() for span in each), default=end)
    started = min(run.started_at or end, first)
    start = [Span(Phase.QUEUED, run.created_at, started)] if is_first_page and run.created_at < started else []
    axis = Axis([*start, *(span for each in spans.values() for span in each)])
    return Timeline(
        {key: [axis.draw(span) for span in each] for key, each in spans.items()},
        [axis.draw(span) for span in start],
        axis.is_shortened,
    )


def _find_spans(
    step: StepRecord,
    failed: Sequence[AttemptRecord],
    running: RunningStep | None,
    now: datetime,
    limits: Mapping[str, str],
) -> list[Span]:
    """Return the phases of a step in their order, without those that took no time."""
    is_running = running is not None and running.step_key == step.step_key
    known = [step.created_at, step.started_at, running.since if running and is_running else None]
    begin = min((at for at in known if at is not None), default=None)
    if begin is None:  # a step that a list of steps plans
        return []
    found, gap = list[Span](), Phase.QUEUED
    for each in failed:
        started = each.started_at or each.ended_at
        begin = min(begin, started)
        found += [Span(gap, begin, started), Span(Phase.FAILED, started, each.ended_at)]
        begin, gap = each.ended_at, Phase.BACKOFF
    end, is_body = step.finished_at or now, step.display_type is StepType.DO
    if is_body:
        started = running.since if running and is_running else step.started_at or begin
        if step.waits_for_limits:
            limit = limits.get(step.step_key)
            found.append(Span(Phase.LIMITED, begin, end, "" if limit is None else f"waits for limit {limit}"))
        elif step.is_waiting:  # for its next attempt
            due = step.next_retry_at or end
            found += [Span(gap, begin, min(due, end)), Span(Phase.QUEUED, min(due, end), end)]
        else:
            phase = Phase.FAILED if step.error and step.finished_at else Phase.RUNS
            # The last attempt of a failed step is one of the failed ones, too.
            found += [Span(gap, begin, started), Span(phase, max(begin, started), end)]
    else:
        due = min(step.wake_at or end, end) if step.type is StepType.SLEEP else end
        found += [Span(Phase.WAITS, begin, due), Span(Phase.QUEUED, due, end)]
    is_instant = [Span(Phase.RUNS if is_body else Phase.WAITS, begin, begin)]
    return [span for span in found if span.start < span.end] or is_instant


class Axis:
    """Where times are drawn."""

    def __init__(self, spans: Sequence[Span]) -> None:
        deltas = Counter[datetime]()
        for span in spans:
            if span.phase in (Phase.RUNS, Phase.FAILED):
                deltas[span.start] += 1
                deltas[span.end] -= 1
        points = sorted({at for span in spans for at in (span.start, span.end)})
        pieces, running = list[tuple[timedelta, bool]](), 0
        for start, end in pairwise(points):
            running += deltas[start]
            pieces.append((end - start, running > 0))
        work = sum((length for length, is_work in pieces if is_work), timedelta(0))
        most = work * _IDLE_SHARE if work else timedelta.max
        drawn = [length if is_work else min(length, most) for length, is_work in pieces]
        self.is_shortened = any(length > shown for (length, _), shown in zip(pieces, drawn, strict=True))
        total, at = sum(drawn, timedelta(0)) or timedelta(1), timedelta(0)
        self._places: dict[datetime, float] = {}
        for point, length in zip(points, [*drawn, timedelta(0)], strict=False):
            self._places[point] = WIDTH * (at / total)
            at += length

    def draw(self, span: Span) -> Bar:
        """Return the bar of one of the spans."""
        x = min(self._places[span.start], WIDTH - _LEAST_WIDTH)
        width = max(self._places[span.end] - self._places[span.start], _LEAST_WIDTH)
        title = f"{span.name or span.phase} {format_duration(span.end - span.start)}"
        return Bar(span.phase.replace(" ", "-"), round(x, 1), round(width, 1), title)
