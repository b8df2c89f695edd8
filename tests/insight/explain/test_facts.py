"""Whatever the facts are, they have one diagnosis."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.insight.explain import Code, Facts, explain
from celery_durable.model import Child, ErrorInfo, Heartbeat, InstanceHead, InstanceRow, RunRow, Status, StepRecord
from tests.insight.explain.builders import NOW

names = st.sampled_from(["order", "ordre", "approval", "aproval", "", "it's", "\0\x1b[31m"]) | st.text(max_size=8)
maybe_names = st.none() | names
instants = st.datetimes(
    min_value=datetime(1971, 1, 1), max_value=datetime(2500, 1, 1), timezones=st.just(UTC)
) | st.integers(-100, 100).map(lambda seconds: NOW + timedelta(seconds=seconds))
maybe = st.none() | instants
counts = st.integers(0, 5)
errors = st.none() | st.builds(ErrorInfo, names, names)
rows = st.builds(
    InstanceRow,
    claim_token=maybe_names,
    claim_task_id=maybe_names,
    claimed_by=maybe_names,
    workflow=names,
    instance_id=names,
    queue=names,
    lease_until=maybe,
    run_at=maybe,
    next_check_at=maybe,
    dispatch_count=counts,
    crash_count=counts,
    created_at=instants,
    updated_at=instants,
)
runs = st.builds(
    RunRow,
    error_name=maybe_names | st.sampled_from(["StepLimitExceeded", "StepTypeMismatch", "StepNameReused"]),
    error_message=maybe_names,
    reason=maybe_names,
    created_at=instants,
    started_at=maybe,
    completed_at=maybe,
)
children = st.builds(Child, names, names)
steps = st.builds(
    StepRecord,
    name=names,
    attempts=counts,
    max_attempts=st.none() | counts,
    next_retry_at=maybe,
    wake_at=maybe,
    wait_event_type=maybe_names,
    result=st.none(),
    error=errors,
    timeout=st.none() | st.timedeltas(timedelta(0), timedelta(days=365)),
    created_at=maybe,
    started_at=maybe,
    finished_at=maybe,
    task=maybe_names,
    task_id=maybe_names,
    child=st.none() | children,
)
beats = st.builds(
    Heartbeat,
    node=names,
    queues=st.lists(names, max_size=3).map(tuple),
    workflows=st.lists(names, max_size=3).map(tuple),
    started_at=instants,
    seen_at=instants,
    swept_at=maybe,
    next_sweep_at=maybe,
)
facts = st.builds(
    Facts,
    head=st.builds(InstanceHead, now=instants, instance=rows, run=runs),
    open_steps=st.lists(steps, max_size=4).map(tuple),
    last_step=st.none() | steps,
    buffered=st.lists(names, max_size=4).map(tuple),
    heartbeats=st.lists(beats, max_size=3).map(tuple),
    answered=counts,
    unsent=st.frozensets(names, max_size=3),
    children=st.dictionaries(children, st.sampled_from(Status), max_size=3),
)


@settings(max_examples=30)
@given(facts)
def test_all_facts_have_one_diagnosis(given_facts: Facts) -> None:
    found = explain(given_facts)
    assert found.code in Code
    assert found.sentence[-1] in ".?"
    assert found == explain(given_facts)
    json.dumps(found.facts)
    assert all(action.startswith("celery -A <your app> ") for action in found.actions)
    is_over = given_facts.instance.status.is_terminal
    ends = {Code.DONE, Code.FAILED, Code.TERMINATED, Code.STEP_LIMIT, Code.NONDETERMINISTIC}
    assert (found.code in ends) is is_over
