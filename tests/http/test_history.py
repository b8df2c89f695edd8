"""The history of a run over HTTP: steps, events, log lines, their pages, and the run itself."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import Step, WorkflowEvent
from tests.http.conftest import Shop
from tests.http.test_routes import NOW, refused


def test_a_history_shows_steps_events_and_logs_if_asked_for(shop: Shop, api: TestClient, order: str) -> None:
    api.post(f"{order}/events", json={"type": "approval", "payload": {"by": "eve"}, "id": "click-7"})
    shop.work()
    body = api.get(f"{order}/history").json()
    assert "logs" not in body
    assert [step["name"] for step in body["steps"]] == ["charge", "await approval", "ship"]
    assert body["steps"][0].pop("startedAt") is not None
    assert body["steps"][0] == {
        "stepKey": "charge", "name": "charge", "type": "do", "status": "completed", "attempts": 1, "maxAttempts": 6,
        "timeoutMs": 600_000, "result": {"cents": 1999, "card": "4242"}, "createdAt": NOW, "finishedAt": NOW,
    }  # fmt: skip
    assert "result" not in body["steps"][2]
    assert body["events"] == [
        {
            "seq": body["events"][0]["seq"], "id": "click-7", "type": "approval", "payload": {"by": "eve"},
            "createdAt": NOW, "deliveredAt": NOW, "consumedByStepKey": "await approval",
        }
    ]  # fmt: skip
    assert (body["stepsHasNextPage"], body["eventsHasNextPage"], body["runNumber"]) == (False, False, 1)

    logs = api.get(f"{order}/history", params={"includeLogs": True}).json()["logs"]
    assert {"message": "order received", "level": "info", "category": "payments", "data": {"cents": 1999}}.items() <= (
        logs[0].items()
    )
    assert isinstance(logs[0]["id"], str)
    assert [line["isReplay"] for line in logs] == [False, True, False]
    loud = api.get(f"{order}/history", params={"includeLogs": True, "logLevel": "warn"}).json()["logs"]
    assert [line["message"] for line in loud] == ["decided"]
    some = api.get(f"{order}/history", params={"includeLogs": True, "logCategory": "payments"}).json()["logs"]
    assert {line["category"] for line in some} == {"payments"}


def test_the_values_of_users_stay_as_they_are(shop: Shop, api: TestClient) -> None:
    value = {"step_key": None, "list_of": [None, {"max_run": None, "": []}], "workflow": 1.5}

    @shop.durable.workflow(name="values")
    def values(event: WorkflowEvent[Any], step: Step) -> Any:
        step.log.info("a line", **value)
        step.publish("value", value)
        step.do("nothing", lambda: None)
        return step.do("work", lambda: event.payload)

    path = "/workflows/values/instances/v-1"
    api.post("/workflows/values/instances", json={"id": "v-1", "params": value})
    api.post(f"{path}/events", json={"type": "news", "payload": value})
    shop.work()
    history = api.get(f"{path}/history", params={"includeRun": True, "includeLogs": True}).json()
    assert [step.get("result") for step in history["steps"]] == [None, value]
    assert [history["run"]["params"], history["run"]["details"]["output"]] == [value, value]
    assert [history["events"][0]["payload"], history["logs"][0]["data"]] == [value, value]
    assert api.get(f"{path}/published").json()["published"]["value"]["value"] == value


@pytest.mark.parametrize("order_", ["asc", "desc"])
def test_each_list_of_a_history_is_paged_by_its_own_cursor(shop: Shop, api: TestClient, order_: str) -> None:
    api.post("/workflows/count/instances", json={"id": "c-1", "params": 5})
    for number in range(4):
        api.post("/workflows/count/instances/c-1/events", json={"type": "e", "id": f"e-{number}"})
    shop.work()
    path = "/workflows/count/instances/c-1/history"
    found: dict[str, list[str]] = {"steps": [], "events": [], "logs": []}
    for kind, key in (("steps", "name"), ("events", "id"), ("logs", "message")):
        query: dict[str, Any] = {"pageSize": 2, "order": order_, "includeLogs": True}
        while True:
            body = api.get(path, params=query).json()
            found[kind] += [item[key] for item in body[kind]]
            if not body[f"{kind}HasNextPage"]:
                assert f"{kind}Cursor" not in body
                break
            query[f"{kind}Cursor"] = body[f"{kind}Cursor"]
    step = 1 if order_ == "asc" else -1
    assert found == {
        "steps": [f"step {number}" for number in range(5)][::step],
        "events": [f"e-{number}" for number in range(4)][::step],
        "logs": [f"line {number}" for number in range(5)][::step],
    }


def test_a_cursor_belongs_to_its_list_its_order_and_its_run(shop: Shop, api: TestClient) -> None:
    api.post("/workflows/count/instances", json={"id": "c-1", "params": 3})
    shop.work()
    path = "/workflows/count/instances/c-1/history"
    cursor = api.get(path, params={"pageSize": 1}).json()["stepsCursor"]
    assert "count" not in cursor
    api.post("/workflows/count/instances/c-1/restart")

    def ask(**query: Any) -> Any:
        return api.get(path, params={"pageSize": 1, **query})

    api.post("/workflows/count/instances", json={"id": "c-2", "params": 3})
    shop.work()
    other = path.replace("c-1", "c-2")
    refused(api.get(other, params={"stepsCursor": cursor}), 400, "INVALID_CURSOR")
    logs = ask(includeLogs=True, logLevel="debug").json()["logsCursor"]
    refused(ask(includeLogs=True, logLevel="info", logsCursor=logs), 400, "INVALID_CURSOR")
    assert ask(includeLogs=True, logLevel="debug", logsCursor=logs).status_code == 200
    refused(ask(stepsCursor=cursor, order="desc"), 400, "INVALID_CURSOR")
    refused(ask(eventsCursor=cursor), 400, "INVALID_CURSOR")
    refused(ask(stepsCursor=cursor, runNumber=2), 400, "INVALID_CURSOR")
    refused(api.get("/workflows/count/instances", params={"cursor": cursor}), 400, "INVALID_CURSOR")
    goes_on = ask(stepsCursor=cursor).json()  # in its own run, although another has started
    assert (goes_on["runNumber"], goes_on["steps"][0]["name"]) == (1, "step 1")
    assert ask().json()["runNumber"] == 2
    assert ask(runNumber=1).json()["runNumber"] == 1
    refused(ask(runNumber=3), 404, "RUN_NOT_FOUND")


def test_the_history_of_a_run_tells_what_it_was_given_and_how_it_ended(shop: Shop, api: TestClient, order: str) -> None:
    api.post(f"{order}/terminate", json={"reason": "sold twice"})
    api.post(f"{order}/restart")
    first = api.get(f"{order}/history", params={"runNumber": 1, "includeRun": True}).json()
    assert first["run"] == {
        "details": {"status": "terminated"},
        "params": {"order_id": "42", "cents": 1999},
        "labels": {},
        "instanceCreatedAt": "2030-01-01T00:00:00Z",
        "createdAt": "2030-01-01T00:00:00Z",
        "startedAt": "2030-01-01T00:00:00Z",
        "completedAt": "2030-01-01T00:00:00Z",
        "reason": "sold twice",
        "audit": [],
    }
    assert api.get(f"{order}/history", params={"includeRun": True}).json()["run"]["details"] == {"status": "active"}
    assert "run" not in api.get(f"{order}/history").json()
    shop.durable.internals.redact = lambda *_: "[redacted]"
    shown = api.get(f"{order}/history?includeRun=1").json()
    assert shown["run"]["params"] == "[redacted]"
