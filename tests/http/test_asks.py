"""Questions to people over HTTP: the list, the answer, and who is told what."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import Step, WorkflowEvent
from celery_durable.http import Access, Authorize
from celery_durable.redaction import RedactionContext
from tests.http.conftest import Amount, Shop
from tests.http.test_routes import refused

EVENTS = "/workflows/payout/instances/p-1/events"
ANSWER = {"answers": "approve", "payload": {"cents": 7}, "by": "ada"}


@pytest.fixture
def payout(shop: Shop) -> Shop:
    """The shop with an instance that asks how much to pay."""

    @shop.durable.workflow(name="payout")
    def payout(event: WorkflowEvent[None], step: Step) -> Any:
        answer = step.wait_for_event("approve", "amount", schema=Amount, ask={"customer": "Ada"}, to="finance")
        return [answer.payload.cents, answer.by]

    payout.create(id="p-1")
    shop.work()
    return shop


def test_a_list_of_questions_has_what_a_form_needs(payout: Shop, api: TestClient) -> None:
    (found,) = api.get("/waits?to=finance").json()["waits"]
    assert {name: found[name] for name in ("workflowName", "instanceId", "runNumber", "stepKey", "ask", "to")} == {
        "workflowName": "payout", "instanceId": "p-1", "runNumber": 1, "stepKey": "approve", "to": "finance",
        "ask": {"customer": "Ada"},
    }  # fmt: skip
    assert found["schema"] == Amount.model_json_schema()
    assert api.get("/waits?to=legal").json()["waits"] == []
    assert len(api.get("/waits?isAsking=true").json()["waits"]) == 1


def test_pages_of_waits_continue(payout: Shop, api: TestClient) -> None:
    payout.durable.workflows["payout"].create(id="p-2")
    payout.work()
    first = api.get("/waits?isAsking=true&pageSize=1").json()
    second = api.get(f"/waits?isAsking=true&pageSize=1&cursor={first['cursor']}").json()
    assert [each["waits"][0]["instanceId"] for each in (first, second)] == ["p-2", "p-1"]
    assert (first["hasNextPage"], second["hasNextPage"], "cursor" in second) == (True, False, False)
    refused(api.get(f"/waits?to=finance&cursor={first['cursor']}"), 400, "INVALID_CURSOR")


def test_the_first_answer_counts_and_the_second_is_told_whose(payout: Shop, api: TestClient) -> None:
    wrong = api.post(EVENTS, json=ANSWER | {"payload": {"cents": -1}})
    refused(wrong, 422, "EVENT_REFUSED")
    assert wrong.json()["errors"] == [{"where": "$.cents", "message": "Input should be greater than 0"}]
    assert api.post(EVENTS, json=ANSWER | {"runNumber": 1}).json() == {"status": {"status": "active"}, "accepted": True}
    assert api.post(EVENTS, json=ANSWER).json()["accepted"] is False
    late = api.post(EVENTS, json=ANSWER | {"by": "bob"})
    refused(late, 409, "ANSWER_TOO_LATE")
    assert "was answered by 'ada' at " in late.json()["detail"]
    payout.work()
    found = api.get("/workflows/payout/instances/p-1/history").json()
    assert [event["by"] for event in found["events"]] == ["ada"]
    assert found["steps"][0]["ask"] == {"customer": "Ada"}
    assert api.get("/workflows/payout/instances/p-1").json()["details"]["output"] == [7, "ada"]


def test_an_answer_that_says_too_little_or_too_much_is_refused(payout: Shop, api: TestClient) -> None:
    nobody = {name: value for name, value in ANSWER.items() if name != "by"}
    assert api.post(EVENTS, json=nobody).json()["errors"] == [{"where": "body.by", "message": "Say who answers"}]
    refused(api.post(EVENTS, json=ANSWER | {"type": "amount"}), 400, "VALUE_REFUSED")
    refused(api.post(EVENTS, json=ANSWER | {"answers": "approved"}), 404, "STEP_NOT_FOUND")
    refused(api.post(EVENTS, json=ANSWER | {"runNumber": 2}), 409, "ANSWER_TOO_LATE")
    refused(api.post(EVENTS, json=ANSWER, headers={"If-Match": '"other"'}), 412, "PRECONDITION_FAILED")
    assert api.get(EVENTS).status_code == 405


def test_the_user_of_the_actor_hook_answers(payout: Shop) -> None:
    def name(access: Access) -> str:
        return f"{access.permission}: {access.operation}"

    api = payout.client(authorize=Authorize(lambda _: True, actor=name))
    assert api.post(EVENTS, json=ANSWER).json()["accepted"] is True
    payout.work()
    assert api.get("/workflows/payout/instances/p-1").json()["details"]["output"] == [7, "events: send_event"]


@pytest.mark.parametrize("kind", ["ask", "by"])
def test_the_redaction_hook_hides_the_question_and_the_person(payout: Shop, api: TestClient, kind: str) -> None:
    def redact(value: Any, shown: RedactionContext) -> Any:
        return "***" if shown.kind == kind else value

    payout.durable.internals.redact = redact
    (wait,) = api.get("/waits").json()["waits"]
    api.post(EVENTS, json=ANSWER)
    late = api.post(EVENTS, json=ANSWER | {"by": "bob"}).json()["detail"]
    found = api.get("/workflows/payout/instances/p-1/history?includeRun=true").json()
    shown = (wait["ask"], found["steps"][0]["ask"], found["events"][0]["by"], "'***'" in late)
    hidden, person = ("***", "ada") if kind == "ask" else ({"customer": "Ada"}, "***")
    assert shown == (hidden, hidden, person, kind == "by")
