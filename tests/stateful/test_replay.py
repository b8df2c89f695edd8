"""What a workflow gets the first time is what it gets on every replay, whatever the values are."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from celery_durable import Step, WorkflowEvent
from celery_durable.testing import DurableHarness

text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
results = json_values | st.tuples(json_values, json_values) | st.dictionaries(st.integers(), json_values, max_size=3)
"""A body may also return what is not JSON itself, and comes back as JSON has it."""


def told(params: Any, result: Any, payload: Any, crash_at: int | None = None) -> tuple[list[str], list[int]]:
    """What every value looked like at the end, and where a runner stands after a commit."""

    def echo(event: WorkflowEvent, step: Step) -> list[str]:
        first = step.do("first", lambda: result)
        got = step.wait_for_event("got", "e").payload
        both = step.gather(step.submit("left", lambda: result), step.submit("right", lambda: params))
        seen = [event.payload, first, got, *both]
        step.do("last", int)
        return [f"{type(value).__name__} {value!r}" for value in seen]

    with DurableHarness([echo]) as harness:
        runner = harness.runner
        if crash_at is not None:
            harness.faults.crash_at(crash_at)
        handle = harness.create(echo, params)
        handle.send_event("e", payload)
        harness.advance("3 minutes")
        return handle.result(), [n for n, name in enumerate(runner.runtime.passed) if name == "after-commit"]


def check(params: Any, result: Any, payload: Any) -> None:
    first, boundaries = told(params, result, payload)
    assert len(boundaries) > 6
    for number in boundaries:
        assert told(params, result, payload, crash_at=number)[0] == first, number


@pytest.mark.timeout(180)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(json_values, results, json_values)
def test_the_first_run_sees_what_every_replay_sees(params, result, payload) -> None:
    check(params, result, payload)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(json_values, results, json_values)
def test_the_first_run_sees_what_every_replay_sees_at_length(params, result, payload) -> None:
    check(params, result, payload)
