"""Rows of the store as lines and cells for people: times, lengths of time, statuses, what a step waits for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable.cli.screen import Cell, Column, Styled
from celery_durable.model import (
    ErrorInfo,
    EventRecord,
    History,
    InstanceRow,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Status,
    StepRecord,
    StepStatus,
    StepType,
)

_LOOKS = {
    Status.ACTIVE: "cyan",
    Status.WAITING: "yellow",
    Status.PAUSED: "magenta",
    Status.COMPLETE: "green",
    Status.ERRORED: "red",
    Status.TERMINATED: "dim",
    StepStatus.PENDING: "cyan",
    StepStatus.COMPLETED: "green",
    StepStatus.CANCELLED: "dim",
    LogLevel.DEBUG: "dim",
    LogLevel.WARNING: "yellow",
    LogLevel.ERROR: "red",
}
_TYPES = {StepType.DO: "do", StepType.SLEEP: "sleep", StepType.WAIT: "event"}
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def painted(word: Status | StepStatus | LogLevel, *, width: int = 0) -> Styled:
    """A status in its colour."""
    return Styled(str(word), _LOOKS.get(word, ""), width)


def iso(instant: datetime | None) -> str:
    """ISO 8601 in UTC, to the millisecond; empty for None."""
    return "" if instant is None else instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(instant: datetime, *, exact: bool) -> Styled:
    """When something happened that is told as it happens: the time of day, in UTC, unless ``exact``."""
    return Styled(iso(instant) if exact else iso(instant).partition("T")[2], "dim")


def span(length: timedelta, *, units: int = 2) -> str:
    """A length of time in its largest units: ``12 ms``, ``1.2 s``, ``23 h 20 min``."""
    seconds = length.total_seconds()
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))} ms"
    if seconds < 10 and units > 1:
        return f"{seconds:.1f} s"
    left, parts = round(seconds), list[str]()
    for unit, size in _UNITS:
        count, rest = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
            left = rest
        if len(parts) == units:
            break
    return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Times:
    """How instants are shown: relative to ``now``, or ``exact`` for programs and for --full."""

    now: datetime
    exact: bool

    def at(self, instant: datetime | None) -> str:
        """When that is: ``40 min ago``, ``in 23 h 20 min``."""
        if instant is None or self.exact:
            return iso(instant)
        left = instant - self.now
        if abs(left) < timedelta(seconds=1):
            return "now"
        return f"in {span(left)}" if left > timedelta(0) else f"{span(-left, units=1)} ago"

    def by(self, instant: datetime | None) -> str:
        """The same, to end a sentence: ``times out in 23 h``, ``times out at 2026-...``."""
        return f"at {iso(instant)}" if self.exact else self.at(instant)


def compact(value: Any) -> str:
    """A stored value on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pretty(value: Any) -> list[str]:
    """A stored value as indented lines."""
    return json.dumps(value, ensure_ascii=False, indent=2).splitlines()


def sentence(error: ErrorInfo | None) -> str:
    """An error as name and message; empty for None."""
    if error is None:
        return ""
    return f"{error.name}: {error.message}" if error.message else error.name


# --- lists --------------------------------------------------------------------------------------

INSTANCE_COLUMNS = (
    Column("WORKFLOW"),
    Column("ID"),
    Column("STATUS"),
    Column("RUN"),
    Column("CREATED"),
    Column("CHANGED"),
    Column("NEXT", is_optional=True),
    Column("ERROR", is_whole=False, is_optional=True),
)


def instance_cells(item: InstanceSummary, times: Times) -> list[Cell]:
    """One line of `ls`."""
    return [
        item.workflow,
        item.id,
        painted(item.status),
        str(item.run_number),
        times.at(item.created_at),
        times.at(item.updated_at),
        times.at(item.run_at) if item.status is Status.WAITING else "",
        sentence(item.error),
    ]


STEP_COLUMNS = (
    Column("STEP"),
    Column("TYPE"),
    Column("STATUS"),
    Column("ATTEMPTS"),
    Column("TOOK"),
    Column("WAITS FOR", is_optional=True),
    Column("ERROR", is_whole=False, is_optional=True),
)
STEP_TIMES = (Column("STARTED"), Column("FINISHED"))


def step_cells(step: StepRecord, times: Times) -> list[Cell]:
    """One line of the steps in `show`."""
    return [
        step.name,
        _TYPES[step.type],
        painted(step.status),
        attempts(step),
        took(step, times.now),
        waits_for(step, times),
        sentence(step.error),
    ]


def attempts(step: StepRecord) -> str:
    """``2/6``; ``2`` where there is no limit; nothing for what is not attempted."""
    if step.type is not StepType.DO or not step.attempts:
        return ""
    return f"{step.attempts}/{step.max_attempts}" if step.max_attempts else str(step.attempts)


def took(step: StepRecord, now: datetime) -> str:
    """How long a step has taken, or has been open."""
    begun = step.created_at if step.type is not StepType.DO else step.started_at or step.created_at
    return "" if begun is None else span((step.finished_at or now) - begun)


def waits_for(step: StepRecord, times: Times) -> str:
    """What has to come before an open step can go on; empty where nothing has to."""
    if step.status is not StepStatus.WAITING:
        return ""
    match step.type:
        case StepType.WAIT:
            return f'event "{step.wait_event_type}", times out {times.by(step.wake_at)}'
        case StepType.SLEEP:
            return f"its time {times.by(step.wake_at)}"
        case StepType.DO:
            return f"next attempt {times.by(step.next_retry_at)}"


EVENT_COLUMNS = (
    Column("EVENT"),
    Column("ID"),
    Column("SENT"),
    Column("CONSUMED BY"),
)


def event_cells(event: EventRecord, history: History, times: Times) -> list[Cell]:
    """One line of the events in `show`."""
    names = {step.step_key: step.name for step in history.steps}
    key = event.consumed_by_step_key
    consumer: Cell = Styled("-", "dim") if key is None else names.get(key, key)
    return [event.type, event.event_id, times.at(event.created_at), consumer]


def result_of(step: StepRecord) -> Any:
    """What a step gave to its workflow; of an event its payload."""
    is_event = step.type is StepType.WAIT and isinstance(step.result, dict)
    return step.result.get("payload") if is_event else step.result


def log_cells(line: LogRecord) -> list[Cell]:
    """One line of `logs`: time, level, category, message and its data, whether it was said again in a replay."""
    data = line.data if isinstance(line.data, dict) else ({} if line.data is None else {"data": line.data})
    said = " ".join([line.message, *(f"{key}={_plain(value)}" for key, value in data.items())])
    replay: list[Cell] = [Styled("(replay)", "dim")] if line.is_replay else []
    return [Styled(iso(line.created_at), "dim"), painted(line.level, width=5), line.category, said, *replay]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value and " " not in value else compact(value)


# --- why an instance stands where it stands -----------------------------------------------------


def standing(row: InstanceRow | None, history: History, times: Times) -> list[str]:
    """What a run is doing, waits for or ended with, as sentences. ``row``: None for a run before the current one."""
    said: list[str] = []
    if history.status.error is not None:
        said.append(sentence(history.status.error))
    if history.reason is not None:
        said.append(f"Reason: {history.reason}")
    if row is None:
        return said
    if row.pause_requested:
        said.append("A pause is requested; it takes effect when the running step ends.")
    if row.status is Status.ACTIVE:
        said.append(_activity(row, times))
    elif row.status in (Status.WAITING, Status.PAUSED):
        said += [_open_step(step, times) for step in history.steps if step.status is StepStatus.WAITING]
    return said


def _activity(row: InstanceRow, times: Times) -> str:
    if row.claim_token is None:
        return f"Due {times.by(row.run_at)}, and no worker has taken it yet."
    node = (row.claimed_by or "").rpartition(" ")[2] or "a worker"
    if row.lease_until is not None and row.lease_until < times.now:
        return f"The worker {node} fell silent; the next sweep hands the run on."
    return f"A worker is on it: {node}."


def _open_step(step: StepRecord, times: Times) -> str:
    match step.type:
        case StepType.WAIT:
            at = times.by(step.wake_at)
            return f'Waits for event "{step.wait_event_type}" at step "{step.name}"; times out {at}.'
        case StepType.SLEEP:
            return f'Sleeps at step "{step.name}"; wakes {times.by(step.wake_at)}.'
        case StepType.DO:
            failed = f"attempt {attempts(step)} failed: {sentence(step.error)}"
            return f'Tries step "{step.name}" again {times.by(step.next_retry_at)}; {failed}'


def awaited_events(history: History) -> list[str]:
    """The types of events that open steps of a living run wait for, each once."""
    if history.status.status.is_terminal:
        return []
    open_ = (step.wait_event_type for step in history.steps if step.status is StepStatus.WAITING)
    return list(dict.fromkeys(type_ for type_ in open_ if type_ is not None))
