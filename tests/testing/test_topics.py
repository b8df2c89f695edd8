"""Topics in a harness."""

from __future__ import annotations

from celery_durable import Step, WorkflowEvent
from celery_durable.testing import DurableHarness


def watch(event: WorkflowEvent, step: Step):
    return [step.wait_for_topic(f"price {n}", "prices").payload for n in range(2)]


def test_an_emission_is_answered_with_how_many_waited() -> None:
    with DurableHarness([watch]) as harness:
        handle = harness.create(watch)
        harness.run_until_idle()
        assert harness.emit("prices", 1) == 1
        assert harness.emit("prices", 2) == 0
        harness.run_until_idle()
        assert handle.is_waiting
        assert handle.step("price 1").wait_topic == "prices"


def test_a_mocked_topic_serves_each_waiting_instance() -> None:
    with DurableHarness([watch]) as harness:
        mock = harness.mocks.mock_topic("prices", 7, times=3)
        one, two = harness.create(watch, id="one"), harness.create(watch, id="two")
        harness.run_until_idle()
        assert (one.result(), two.result()) == ([7, 7], [7, 7])
        assert mock.calls in (2, 3)
