"""Formats records as cells and lines: times, durations, statuses, and what a step waits for."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery_durable.cli.output.console import Bar, Cell, Column, Styled, to_compact_json
from celery_durable.errors.base import name_error
from celery_durable.insight.explain.summaries import Times as PlainTimes
from celery_durable.insight.explain.summaries import (
    describe_position,
    describe_wait,
    format_attempts,
    format_time_taken,
    iso,
    type_word,
)
from celery_durable.model import (
    AttemptRecord,
    AuditRecord,
    Child,
    ErrorInfo,
    EventRecord,
    History,
    InstanceSummary,
    LogLevel,
    LogRecord,
    ParentStep,
    Published,
    RunRef,
    Status,
    StepRecord,
    StepStatus,
    StepType,
    format_duration,
)

_WORDS_BY_STYLE: dict[str, tuple[Status | StepStatus | LogLevel, ...]] = {
    "cyan": (Status.ACTIVE, StepStatus.PENDING, StepStatus.READY, StepStatus.RUNNING),
    "yellow": (Status.WAITING, StepStatus.LINEAR_WAITING, LogLevel.WARNING),
    "magenta": (Status.PAUSED,),
    "green": (Status.COMPLETE, StepStatus.COMPLETED, StepStatus.DONE),
    "red": (Status.ERRORED, StepStatus.DEAD, LogLevel.ERROR),
    "dim": (Status.TERMINATED, StepStatus.CANCELLED, StepStatus.LINEAR_PENDING, LogLevel.DEBUG),
}
_STYLES = {word: style for style, words in _WORDS_BY_STYLE.items() for word in words}


def style_status(word: Status | StepStatus | LogLevel, *, width: int = 0) -> Styled:
    """Return a status or a level in its colour."""
    return Styled(str(word), _STYLES.get(word, ""), width)


def format_clock_time(instant: datetime, *, exact: bool) -> Styled:
    """Format the time of an update: the time of day in UTC, or with ``exact`` the complete time."""
    return Styled(iso(instant) if exact else iso(instant).partition("T")[2], "dim")


class Times(PlainTimes):
    """Formats times in cells, too."""

    __slots__ = ()

    def cells(self, *values: Cell | datetime | int | None) -> list[Cell]:
        return [self._cell(value) for value in values]

    def _cell(self, value: Cell | datetime | int | None) -> Cell:
        match value:
            case datetime() | None:
                return self.format(value)
            case Status() | StepStatus():
                return style_status(value)
            case int():
                return str(value)
        return value


def format_error(error: ErrorInfo | None) -> str:
    """Return name and message of an error; "" for None."""
    if error is None:
        return ""
    return name_error(error.name, error.message)


# --- lists --------------------------------------------------------------------------------------

_ERROR = Column("ERROR", keeps_full_text=False, is_optional=True)
INSTANCE_COLUMNS = (
    *map(Column, ("WORKFLOW", "ID", "STATUS", "RUN", "CREATED", "CHANGED")),
    *(Column(title, keeps_full_text=False, is_optional=True) for title in ("AT", "LABELS")),
    _ERROR,
)


def instance_cells(item: InstanceSummary, times: Times) -> list[Cell]:
    """Return a row of `ls`."""
    at, labels = describe_position(item, times), " ".join(f"{name}={value}" for name, value in item.labels.items())
    return times.cells(
        item.workflow, item.id, item.status, item.run_number, item.created_at, item.updated_at,
        at, labels, format_error(item.error),
    )  # fmt: skip


STEP_COLUMNS = (
    *map(Column, ("STEP", "TYPE", "STATUS", "ATTEMPTS", "TOOK")),
    Column("WAITS FOR", is_optional=True),
    _ERROR,
)
STEP_TIMES = (Column("STARTED"), Column("FINISHED"))


def step_cells(step: StepRecord, times: Times) -> list[Cell]:
    """Return a row of the steps in `show`."""
    took, wait = format_time_taken(step, times.now), describe_wait(step, times)
    return times.cells(
        step.name, type_word(step.type), step.status, format_attempts(step), took, wait, format_error(step.error)
    )


_CHILD = Column("CHILD", is_optional=True)
ITEM_COLUMNS = (*map(Column, ("MAP", "ITEMS", "DONE", "FAILED", "ITEM", "ATTEMPTS")), _ERROR, _CHILD)


def item_rows(step: StepRecord, times: Times) -> list[list[Cell]]:
    """Return the rows of a map in `show`: of items that have failed, and of open children, or one without an item."""
    assert step.items is not None
    items, first = step.items, (step.name, step.items.total, step.items.done, step.items.failed)
    rows = [
        times.cells(*first, each.position, each.attempts, format_error(each.error), _name_child(each.child))
        for each in items.failures
    ]
    rows += [times.cells(*first, "", "", "", _name_child(child)) for child in items.children]
    return rows or [times.cells(*first, "", "", "", "")]


def _name_child(child: Child | None) -> str:
    return "" if child is None else f"{child.workflow}/{child.instance_id}"


EVENT_COLUMNS = tuple(map(Column, ("EVENT", "ID", "SENT", "CONSUMED BY", "BY")))


def event_cells(event: EventRecord, history: History, times: Times) -> list[Cell]:
    """Return a row of the events in `show`."""
    names = {step.step_key: step.name for step in history.steps}
    key = event.consumed_by_step_key
    consumer: Cell = Styled("-", "dim") if key is None else names.get(key, key)
    return [event.type, event.event_id, times.format(event.created_at), consumer, event.by or ""]


def get_result(step: StepRecord) -> Any:
    """Return the result of a step; for a wait, the payload of the event."""
    is_event = step.type is StepType.WAIT and isinstance(step.result, dict)
    return step.result.get("payload") if is_event else step.result


def log_cells(line: LogRecord) -> list[Cell]:
    """Return a row of `logs`: time, level, category, message with data, and a mark if a replay logged it."""
    data = line.data if isinstance(line.data, dict) else ({} if line.data is None else {"data": line.data})
    sentences = " ".join([line.message, *(f"{key}={_plain(value)}" for key, value in data.items())])
    replay: list[Cell] = [Styled("(replay)", "dim")] if line.is_replay else []
    return [Styled(iso(line.created_at), "dim"), style_status(line.level, width=5), line.category, sentences, *replay]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value and " " not in value else to_compact_json(value)


# --- attempts that did not succeed --------------------------------------------------------------

ATTEMPT_COLUMNS = (
    *map(Column, ("FAILED ATTEMPT", "NO.", "OUTCOME", "ENDED")),
    *(Column(title, is_optional=True) for title in ("TOOK", "AT", "WORKER")),
    _ERROR,
)


def attempt_cells(attempt: AttemptRecord, times: Times) -> list[Cell]:
    """Return a row of the attempts in `show`."""
    took = None if attempt.started_at is None else format_duration(attempt.ended_at - attempt.started_at)
    return times.cells(
        describe_attempt(attempt), attempt.attempt, Styled(str(attempt.outcome), "red"), attempt.ended_at, took,
        attempt.location, _describe_worker(attempt), format_error(attempt.error),
    )  # fmt: skip


def describe_attempt(attempt: AttemptRecord) -> str:
    """Return the step of an attempt, with the position of a map's item; "-" if it belongs to no step."""
    if attempt.step is None:
        return "-"
    return attempt.step if attempt.item is None else f"{attempt.step}, item {attempt.item}"


def _describe_worker(attempt: AttemptRecord) -> str:
    if attempt.worker is None:
        return ""
    return attempt.worker if attempt.pid is None else f"{attempt.worker}, pid {attempt.pid}"


def attempt_line(attempt: AttemptRecord) -> str:
    """Return a sentence about an attempt, for a line of a log."""
    number = "" if attempt.attempt is None else f", attempt {attempt.attempt}"
    step = "" if attempt.step is None else f"step {describe_attempt(attempt)}{number}, "
    at = "" if attempt.location is None else f", at {attempt.location}"
    worker = "" if attempt.worker is None else f", on {_describe_worker(attempt)}"
    error = format_error(attempt.error)
    return f"{step}{attempt.outcome}: {error.rstrip('.') if at or worker else error}{at}{worker}"


# --- how a run ended ----------------------------------------------------------------------------


def describe_run(history: History) -> list[str]:
    """Return sentences about a run: its error, parent and limit, the run that it continues, and the given reason."""
    sentences = [] if history.status.error is None else [format_error(history.status.error)]
    if history.max_run is not None:
        sentences.append(f"Each run may take {format_duration(history.max_run)}")
    if (parent := history.parent) is not None:
        sentences.append(describe_parent(parent))
    if (origin := history.origin) is not None:
        from_step = "" if origin.step_key is None else f", from step {origin.step_key}"
        sentences.append(f"Continues {RunRef(history.workflow, origin.instance_id, origin.run_number)}{from_step}")
    return sentences if history.reason is None else [*sentences, f"Reason: {history.reason}"]


def describe_parent(parent: ParentStep) -> str:
    """Return a sentence about the step that created an instance."""
    item = "" if parent.item is None else f", item {parent.item}"
    return f"Child of {RunRef(parent.workflow, parent.instance_id, parent.run_number)}, step {parent.step_key}{item}"


AUDIT_COLUMNS = tuple(map(Column, ("BY HAND", "STEP", "WAS", "BY", "WHEN", "REASON")))


def audit_cells(record: AuditRecord, times: Times) -> list[Cell]:
    """Return a row about a step that was completed or skipped by hand, or about a run that a person ended."""
    action, before = record.action.replace("_", "-"), record.before
    was = None if before is None else before.status.state
    return times.cells(action, record.step_key, was, record.by, record.created_at, record.reason)


# --- what a run publishes -----------------------------------------------------------------------

PUBLISHED_COLUMNS = (Column("PUBLISHED"), Column("VALUE", keeps_full_text=False), Column("SINCE"))


def published_cells(key: str, found: Published, times: Times) -> list[Cell]:
    """Return a row of a published value: key, value, and time of the last change."""
    return [key, format_progress(found.value), times.format(found.updated_at)]


def format_progress(value: Any) -> Cell:
    """Return a published value; a progress bar for ``{"done": 3, "total": 10}`` or a number from 0 to 1."""
    match value:
        case {"done": int() | float() as done, "total": int() | float() as total} if total > 0 and done >= 0:
            return Bar(to_compact_json(value), min(1.0, done / total), f"{done}/{total}")
        case int() | float() if not isinstance(value, bool) and 0 <= value <= 1:
            return Bar(to_compact_json(value), value, f"{value:.0%}")
    return to_compact_json(value)
