"""The routes of topics."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from celery_durable import Step, WorkflowEvent
from tests.http.conftest import Shop
from tests.http.test_routes import refused


@pytest.fixture
def watchers(shop: Shop) -> Shop:
    """The shop with three instances that wait on a topic."""

    @shop.durable.workflow(name="watch")
    def watch(event: WorkflowEvent[None], step: Step) -> object:
        return step.wait_for_topic("next price", "prices/eur.usd", timeout="1 hour").payload

    for number in range(3):
        watch.create(id=f"w-{number}")
    shop.work()
    return shop


def test_an_emission_reaches_all_who_wait(watchers: Shop, api: TestClient) -> None:
    said = api.post("/topics/prices/eur.usd/emit", json={"payload": {"cents": 108}, "id": "tick-1"})
    assert (said.status_code, said.json()) == (200, {"resumed": 3})
    assert api.post("/topics/prices/eur.usd/emit", json={"payload": 1}).json() == {"resumed": 0}
    watchers.work()
    assert api.get("/workflows/watch/instances/w-1").json()["details"] == {
        "status": "complete",
        "output": {"cents": 108},
    }
    history = api.get("/workflows/watch/instances/w-1/history").json()
    assert history["steps"][0]["waitTopic"] == "prices/eur.usd"
    assert "waitEventType" not in history["steps"][0]
    assert history["events"][0]["type"] == "prices/eur.usd"


def test_waiters_are_listed_page_by_page(watchers: Shop, api: TestClient) -> None:
    first = api.get("/topics/prices/eur.usd/waiters", params={"pageSize": 2}).json()
    assert first["waiters"][0] == {
        "workflowName": "watch",
        "instanceId": "w-0",
        "runNumber": 1,
        "stepName": "next price",
        "topic": "prices/eur.usd",
        "openedAt": "2030-01-01T00:00:00Z",
        "deadline": "2030-01-01T01:00:00Z",
    }
    assert first["hasNextPage"] is True
    rest = api.get("/topics/prices/eur.usd/waiters", params={"pageSize": 2, "cursor": first["cursor"]}).json()
    assert [each["instanceId"] for each in rest["waiters"]] == ["w-2"]
    assert rest["hasNextPage"] is False
    assert "cursor" not in rest
    refused(api.get("/topics/prices/usd.eur/waiters", params={"cursor": first["cursor"]}), 400, "INVALID_CURSOR")


def test_what_is_no_topic_is_refused(api: TestClient) -> None:
    assert refused(api.post("/topics/no spaces/emit", json={}), 400, "INVALID_TOPIC").startswith("Topic 'no spaces'")
    refused(api.get("/topics/.a/waiters"), 400, "INVALID_TOPIC")
