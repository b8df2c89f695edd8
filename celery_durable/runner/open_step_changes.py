"""Finds differences between an open step's call in the current code and its recorded row, for the replay check.

Such a difference does not break the replay: the run continues with the recorded values. The developer who changed the
code may not expect that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.model import StepRow, parse_child_event_type, parse_task_event_type, parse_topic_event_type
from celery_durable.runner.remote_steps import find_task_name
from celery_durable.runner.step_execution import StepExecution
from celery_durable.step import BodyCall, ChildCall, MapCall, SleepCall, TaskCall, WaitCall

_TOLERANCE = timedelta(seconds=1)
"""Tolerance for comparing a wait's length, which is computed from two times of its row."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between the code and the recorded run: ``sentence`` names both.

    ``advice``: what to do about it, or what happens in the next pass.
    """

    sentence: str
    advice: str


def find_open_step_changes(execution: StepExecution, row: StepRow, settings: Settings) -> Iterator[Difference]:
    """Yield the differences between an open step's call in the code and its row."""
    for was, now, advice in _compare_call(execution, row, settings):
        yield Difference(
            f"Open step {row.name!r} ({row.type}) was recorded with {was}, and the code has {now}.", advice
        )


def _compare_call(execution: StepExecution, row: StepRow, settings: Settings) -> Iterator[tuple[str, str, str]]:
    call = execution.call
    match call:
        case WaitCall():
            topic = parse_topic_event_type(row.wait_event_type)
            was = f"event {row.wait_event_type!r}" if topic is None else f"topic {topic!r}"
            now = f"{'topic' if call.is_topic else 'event'} {call.event_type!r}"
            if row.wait_event_type is not None and was != now:
                yield was, now, "The wait keeps its deadline. The next pass changes what it waits for."
            yield from _compare_duration(row, "timeout", values.parse_duration(call.timeout))
        case TaskCall() | MapCall():
            name = find_task_name(call.signature if isinstance(call, TaskCall) else call.task)
            if (task := parse_task_event_type(row.wait_event_type)) is not None and task != name:
                yield (
                    f"task {task!r}",
                    f"task {name!r}",
                    "Tasks that were already sent still count. Tasks that are sent from now on are the new task.",
                )
            yield from _compare_timeout(execution, row)
        case ChildCall():
            if (child := parse_child_event_type(row.wait_event_type)) is not None:
                workflow, instance_id = call.definition.name, call.instance_id or child[1]
                if child != (workflow, instance_id):
                    was, now = f"child {child[0]}/{child[1]}", f"child {workflow}/{instance_id}"
                    yield was, now, "The step still waits for the existing child. No second child is created."
            timeout = settings.max_sleep if call.timeout is None else values.parse_duration(call.timeout)
            yield from _compare_duration(row, "timeout", timeout)
        case SleepCall(until=None):
            yield from _compare_duration(row, "length", values.parse_duration(call.duration))
        case SleepCall(until=until):
            if until is not None and row.wake_at is not None and values.to_utc(until, "sleep_until") != row.wake_at:
                yield f"instant {row.wake_at}", f"instant {until}", "The sleep still ends at the recorded time."
        case BodyCall():
            yield from _compare_timeout(execution, row)


def _compare_duration(row: StepRow, what: str, now: timedelta) -> Iterator[tuple[str, str, str]]:
    """Yield the change of a duration that the row records as a deadline."""
    if row.wake_at is None or row.created_at is None:
        return
    was = row.wake_at - row.created_at
    if abs(was - now) > _TOLERANCE:
        was = timedelta(seconds=round(was.total_seconds()))
        yield f"{what} {was}", f"{what} {now}", "The open step keeps its deadline."


def _compare_timeout(execution: StepExecution, row: StepRow) -> Iterator[tuple[str, str, str]]:
    """Yield the change of a timeout that applies to each attempt."""
    if row.timeout != execution.policy.timeout:
        yield f"timeout {row.timeout}", f"timeout {execution.policy.timeout}", "The next attempt has the new timeout."
