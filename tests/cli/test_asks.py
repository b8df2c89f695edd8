"""answer, and the questions that waits lists: over both connections."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_durable import Step, WorkflowEvent
from tests.cli.conftest import OrderIn, Shop


@pytest.fixture
def payout(shop: Shop) -> Shop:
    """The shop with an instance that asks for an order."""

    @shop.durable.workflow(name="payout")
    def payout(event: WorkflowEvent[None], step: Step) -> Any:
        answer = step.wait_for_event("approve", "order", schema=OrderIn, ask="Which order?", to="finance")
        return [answer.payload.order_id, answer.by]

    payout.create(id="p-1")
    shop.work("payout", "p-1")
    return shop


def test_a_question_is_listed_and_answered(payout: Shop, connection: Any) -> None:
    for words in (("--to", "finance"), ("--asking",)):
        (row,) = connection("waits", *words).rows
        assert (row[:4], row[7:]) == (["order", "payout", "p-1", "approve"], ["finance", "Which order?"])
    assert connection("waits", "--to", "legal").err == "No instance waits for an event and asks 'legal'.\n"
    payout.durable.workflows["payout"].create(id="p-2")
    payout.work("payout", "p-2")
    page = connection("waits", "--asking", "--limit", "1")
    cursor = page.err.removeprefix("There are more: --cursor ").strip()
    rest = connection("waits", "--asking", "--limit", "1", "--cursor", cursor)
    assert [row[2] for row in (*page.rows, *rest.rows)] == ["p-2", "p-1"]
    wrong = connection("answer", "payout", "p-1", "approve", "{}", "--by", "ada")
    assert (wrong.code, "$.order_id: Field required" in wrong.err) == (1, True), wrong
    answered = connection("answer", "payout/p-1#1", "approve", '{"order_id": "42"}', "--by", "ada")
    assert (answered.code, answered.rows) == (0, [["Answered", "payout/p-1", "approve"]])
    assert (
        connection("answer", "payout", "p-1", "approve", '{"order_id": "42"}', "--by", "ada").rows[0][0] == "Repeated"
    )
    late = connection("answer", "payout", "p-1", "approve", '{"order_id": "7"}', "--by", "bob")
    assert (late.code, "was answered by 'ada' at " in late.err) == (1, True)
    payout.work("payout", "p-1")
    shown = json.loads(connection("show", "payout", "p-1", "-o", "json").out)
    assert (shown["run"]["details"]["output"], shown["events"][0]["by"]) == (["42", "ada"], "ada")
    assert (shown["steps"][0]["ask"], shown["steps"][0]["to"]) == ("Which order?", "finance")
