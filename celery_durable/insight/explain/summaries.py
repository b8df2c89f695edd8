"""What an instance or a step is at, in a few words, for lists."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from celery_durable import model
from celery_durable.insight.explain.phrases import describe_running
from celery_durable.model import InstanceSummary, Status, StepRecord, StepType, format_duration

_TYPES_WITH_ATTEMPTS = (StepType.DO, StepType.TASK)


def iso(instant: datetime | None) -> str:
    """ISO 8601 in UTC, to the millisecond; empty for None."""
    return "" if instant is None else model.iso(instant)


@dataclass(frozen=True, slots=True)
class Times:
    """Formats times: relative to ``now``, or ``exact`` for programs and for --full."""

    now: datetime
    exact: bool

    def format(self, instant: datetime | None) -> str:
        """Format a time, such as ``40 min ago`` or ``in 23 h 20 min``."""
        if instant is None or self.exact:
            return iso(instant)
        left = instant - self.now
        if abs(left) < timedelta(seconds=1):
            return "now"
        return f"in {format_duration(left)}" if left > timedelta(0) else f"{format_duration(-left, units=1)} ago"

    def format_in_sentence(self, instant: datetime | None) -> str:
        """Format a time for use in a sentence: ``times out in 23 h``, ``times out at 2026-...``."""
        return f"at {iso(instant)}" if self.exact else self.format(instant)

    def format_span(self, since: datetime) -> str:
        """Format how long something has lasted: ``for 57 s``, ``since 2026-...``."""
        lasted = max(self.now - since, timedelta(0))
        return f"since {iso(since)}" if self.exact else f"for {format_duration(lasted, units=1)}"


def describe_position(item: InstanceSummary, times: Times) -> str:
    """Return what a worker runs, or what the instance waits for."""
    step, running = item.current_step, item.running
    if running is not None:
        name = step.name if step is not None and step.step_key == running.step_key else None
        lasted = times.format_span(running.since)
        return f"{describe_running(running, name, lasted)}, on {item.worker}"
    if item.worker is not None:
        return f"on {item.worker}"
    if step is not None and step.is_waiting:
        return f"{step.name}: {describe_wait(step, times)}"
    if item.status is Status.WAITING and item.run_at is not None:
        return f"starts {times.format_in_sentence(item.run_at)}"
    return ""


def type_word(type_: StepType) -> str:
    """Return the type of a step in tables and in a pipe. In JSON and in signals it is the type's value."""
    return "event" if type_ is StepType.WAIT else type_


def format_attempts(step: StepRecord) -> str:
    """Return ``2/6``, or ``2`` without a limit; "" for steps without attempts, such as sleeps."""
    if step.display_type not in _TYPES_WITH_ATTEMPTS or not step.attempts:
        return ""
    return f"{step.attempts}/{step.max_attempts}" if step.max_attempts else str(step.attempts)


def format_time_taken(step: StepRecord, now: datetime) -> str:
    """Return how long a step has taken, or has been open."""
    started = step.created_at if step.display_type is not StepType.DO else step.started_at or step.created_at
    return "" if started is None else format_duration((step.finished_at or now) - started)


def describe_wait(step: StepRecord, times: Times) -> str:
    """Return what an open step waits for; "" if it does not wait."""
    if not step.is_waiting:
        return ""
    match step.display_type:
        case StepType.SLEEP:
            return f"end of the sleep {times.format_in_sentence(step.wake_at)}"
        case StepType.DO if step.waits_for_limits:
            return step.awaited
        case StepType.DO:
            return f"next attempt {times.format_in_sentence(step.next_retry_at)}"
        case _ if step.items is not None:
            failed = f", {step.items.failed} failed" if step.items.failed else ""
            return f"{step.awaited}, {step.items.done} of {step.items.total} done{failed}"
        case _:
            return f"{step.awaited}, times out {times.format_in_sentence(step.wake_at)}"
