"""examples/agent.py: an approved refund is made once, wherever the worker dies."""

from __future__ import annotations

import pytest

from celery_durable import Status
from celery_durable.errors import EventRefused
from celery_durable.testing import DurableHarness, assert_crash_safe
from examples import agent

pytestmark = pytest.mark.durable(workflows=[agent.support])

TOOL = "support__function_toolset__<agent>.call_tool"
BEFORE = [
    "support__model.request", f"{TOOL}:price c1", f"{TOOL}:customer c2", "support__model.request\x1f2", "approval c3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def witness() -> None:
    agent.requests.clear()
    agent.refunds.clear()


def ask(harness: DurableHarness):
    handle = agent.support.create("refund order 42", id="s-1")
    harness.run_until_idle()
    return harness.instance(agent.support, handle.id)


def test_an_approved_refund_is_made_and_nothing_is_paid_twice(durable_harness: DurableHarness) -> None:
    handle = ask(durable_harness)
    (question,) = agent.support.waits(to="finance").items
    assert (question.step_key, question.ask, agent.refunds) == ("approval c3", {"refund c3": {"order": "42"}}, [])
    assert list(handle.statuses()) == BEFORE
    handle.answer("approval c3", {"c3": True}, by="ada")
    durable_harness.run_until_idle()
    assert (handle.result(), agent.refunds) == ("Our answer: refunded order 42", ["42"])
    assert agent.requests == ["request 0", "request 2", "request 3"]


def test_a_denied_refund_is_not_made(durable_harness: DurableHarness) -> None:
    handle = ask(durable_harness)
    handle.answer("approval c3", {"c3": False}, by="ada")
    durable_harness.run_until_idle()
    assert (handle.status().status, agent.refunds) == (Status.COMPLETE, [])


def test_an_answer_about_another_call_is_refused(durable_harness: DurableHarness) -> None:
    handle = ask(durable_harness)
    with pytest.raises(EventRefused, match="c9"):
        handle.answer("approval c3", {"c9": True}, by="ada")


def test_no_answer_denies_the_refund(durable_harness: DurableHarness) -> None:
    handle = ask(durable_harness)
    durable_harness.advance("1 day")
    assert (handle.status().status, agent.refunds) == (Status.COMPLETE, [])


def test_a_refund_whose_end_is_unknown_is_not_made_again(durable_harness: DurableHarness) -> None:
    durable_harness.faults.crash_in_step(f"{TOOL}:refund c3", when="after")
    handle = ask(durable_harness)
    handle.answer("approval c3", {"c3": True}, by="ada")
    durable_harness.advance("1 hour")
    status = handle.status()
    assert (status.status, status.error.name, agent.refunds) == (Status.ERRORED, "OutcomeUnknown", ["42"])


def test_the_usage_of_each_request_is_in_the_log(durable_harness: DurableHarness) -> None:
    handle = ask(durable_harness)
    handle.answer("approval c3", {"c3": True}, by="ada")
    durable_harness.run_until_idle()
    lines = [line for line in handle.logs() if line.category == "agent"]
    assert [line.data["output_tokens"] > 0 for line in lines] == [True, True, True]


def test_an_agent_whose_refund_is_denied_is_crash_safe() -> None:
    # An approved refund that a crash interrupts ends errored, so that it is not made twice: see above.
    answer = ("approval", {"c3": False})
    assert_crash_safe(
        agent.support, "refund order 42", events=[answer], side_effects=lambda _: set(agent.refunds), schedules=30
    )
