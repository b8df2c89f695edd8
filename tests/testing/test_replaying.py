"""assert_replays: what is recorded, against the code of today."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable import Cancelled, Step, WorkflowEvent
from celery_durable.errors import ValueRefused, WorkflowNotFound
from celery_durable.testing import DurableHarness, NotReplayed, assert_replays
from celery_durable.wire.encoding import export_run, to_data


def trip(event: WorkflowEvent[str], step: Step) -> str:
    hotel = step.do("hotel", lambda: "H1")
    step.sleep("think about it", "2 days")
    return hotel


@pytest.fixture
def history() -> Any:
    with DurableHarness([trip]) as harness:
        handle = harness.create(trip, "ada", id="t-1")
        harness.run_until_idle()
        return handle.history()


def test_code_that_follows_what_is_recorded_passes(history: Any) -> None:
    assert_replays(trip, history)


def test_code_that_does_something_else_is_told_where(history: Any) -> None:
    def today(event: WorkflowEvent[str], step: Step) -> Any:
        return step.do("flight", pytest.fail, "a body was run")

    today.__name__ = today.__qualname__ = "trip"
    with pytest.raises(NotReplayed) as caught:
        assert_replays(today, history)
    assert str(caught.value) == (
        "Workflow 'trip' does not follow what is recorded of run 1 of instance 't-1':\n"
        "  The code calls step 'flight', which is not recorded, where the record has step 'hotel' (do), and 1 more. "
        "Keep the recorded steps and their names until no run with them is left, or give the changed workflow a new "
        "name."
    )


def test_what_is_no_run_of_the_workflow_is_refused(history: Any) -> None:
    def flight(event: WorkflowEvent[str], step: Step) -> None:
        pass

    with pytest.raises(WorkflowNotFound):
        assert_replays(flight, history)
    with pytest.raises(ValueRefused, match="This is no run that `export` printed"):
        assert_replays(trip, {"steps": []})


def with_refund(event: WorkflowEvent[str], step: Step) -> str:
    try:
        return trip(event, step)
    except Cancelled:
        step.do("refund", lambda: None)
        raise


def as_trip(fn: Any) -> Any:
    fn.__name__ = fn.__qualname__ = "trip"
    return fn


def test_a_cancelled_run_is_replayed_with_its_cleanup() -> None:
    def without_cleanup(event: WorkflowEvent[str], step: Step) -> str:
        return trip(event, step)

    def swallowing(event: WorkflowEvent[str], step: Step) -> str:
        try:
            return with_refund(event, step)
        except Cancelled:
            return "stayed at home"

    with DurableHarness([as_trip(with_refund)]) as harness:
        handle = harness.create("trip", "ada", id="t-1")
        harness.run_until_idle()
        handle.cancel("rain")
        assert_replays(with_refund, handle.history())
        harness.run_until_idle()
        cancelled = handle.history()
    assert_replays(with_refund, to_data(export_run(cancelled)))
    with pytest.raises(NotReplayed, match="The code ends as cancelled, where the record has step 'refund'"):
        assert_replays(as_trip(without_cleanup), cancelled)
    with pytest.raises(NotReplayed, match="The code ends errored with CancellationSwallowed"):
        assert_replays(as_trip(swallowing), cancelled)
