"""Strategies for hypothesis: everything that they make is accepted by the engine, and schedules shrink."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings

from celery_durable import Step, WorkflowEvent
from celery_durable.testing import CrashSchedule, DurableHarness, assert_crash_safe, strategies

few = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def everything(event: WorkflowEvent[Any], step: Step) -> Any:
    name, event_type, topic, duration = event.payload["names"]
    kept = step.do(name, lambda: event.payload["value"])
    step.sleep(f"{name[:200]} sleep", timedelta(seconds=duration))
    events = [step.submit_wait_for_event("event", event_type), step.submit_wait_for_topic("topic", topic)]
    return [kept, *(each.payload for each in step.gather(*events))]


@few
@given(
    value=strategies.json_values(),
    name=strategies.step_names(),
    event_type=strategies.event_types(),
    topic=strategies.topics(),
    duration=strategies.durations(),
    instance_id=strategies.instance_ids(),
)
def test_a_workflow_takes_what_they_make(
    value: Any, name: str, event_type: str, topic: str, duration: timedelta, instance_id: str
) -> None:
    with DurableHarness([everything]) as harness:
        names = [name, event_type, topic, duration.total_seconds()]
        instance = harness.create(everything, {"value": value, "names": names}, id=instance_id)
        harness.advance(duration)
        instance.send_event(event_type, value)
        harness.emit(topic, value)
        harness.run_until_idle()
        assert instance.result() == [value, value, value]


def safe(event: WorkflowEvent[Any], step: Step) -> Any:
    step.do("one", lambda: 1)
    step.sleep("nap", "1 day")
    return step.do("two", lambda: event.payload)


@few
@given(params=strategies.json_values(), schedule=strategies.crash_schedules(checkpoints=20))
def test_a_workflow_that_is_crash_safe_passes_any_schedule(params: Any, schedule: CrashSchedule) -> None:
    assert_crash_safe(safe, params, replay=schedule)


def test_schedules_shrink_to_few_and_early_faults() -> None:
    assert find(strategies.crash_schedules(checkpoints=12), lambda each: each.faults > 0) == CrashSchedule((0,))
    late = find(strategies.crash_schedules(checkpoints=12), lambda each: max(each.crashes, default=0) > 4)
    assert late == CrashSchedule((5,))
    assert find(strategies.crash_schedules(checkpoints=0), lambda each: each.faults == 2) == CrashSchedule((0, 0))


@pytest.mark.parametrize("bounds", [{}, {"minimum": timedelta(hours=1), "maximum": timedelta(hours=2)}])
def test_durations_stay_within_their_bounds(bounds: dict[str, timedelta]) -> None:
    @few
    @given(strategies.durations(**bounds))
    def check(duration: timedelta) -> None:
        assert bounds.get("minimum", timedelta(seconds=1)) <= duration <= bounds.get("maximum", timedelta(days=365))

    check()
