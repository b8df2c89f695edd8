"""What operators read across all workflows: instances, counts, queues, and waits for events."""

from __future__ import annotations

from starlette.testclient import TestClient

from tests.http.conftest import Shop
from tests.http.test_routes import refused


def test_instances_of_all_workflows_are_listed_page_by_page(shop: Shop, api: TestClient, order: str) -> None:
    api.post("/workflows/echo/instances", json={"id": "e-1", "params": 1})
    page = api.get("/instances", params={"pageSize": 1}).json()
    assert page["hasNextPage"] is True
    [newest] = page["instances"]
    alone = api.get("/workflows/echo/instances").json()["instances"][0]
    assert newest == alone
    rest = api.get("/instances", params={"cursor": page["cursor"]}).json()
    assert [each["workflowName"] for each in rest["instances"]] == ["order"]
    assert rest["hasNextPage"] is False
    assert api.get("/instances", params={"status": "complete"}).json()["instances"] == []
    refused(api.get("/instances", params={"cursor": "x"}), 400, "INVALID_CURSOR")
    refused(api.get("/instances", params={"label": "tenant"}), 400, "INVALID_LABEL")


def test_stats_count_instances_due_runs_and_messages(shop: Shop, api: TestClient, order: str) -> None:
    shop.work()
    api.post("/workflows/echo/instances", json={"id": "e-1", "params": 1})
    before = shop.durable.internals.publisher.queue_length("durable")
    shop.clock.advance(seconds=5)
    found = api.get("/stats").json()
    assert found["instances"] == [
        {"workflowName": "echo", "status": "active", "count": 1, "isExact": True},
        {"workflowName": "order", "status": "waiting", "count": 1, "isExact": True},
    ]
    assert found["due"]["count"] == 1
    assert found["due"]["oldest"].startswith("2030-01-01T00:00:0")
    assert found["queues"] == [{"name": "durable", "messages": before}]


def test_waits_are_filtered_by_type_and_workflow(shop: Shop, api: TestClient, order: str) -> None:
    shop.work()
    [wait] = api.get("/waits").json()["waits"]
    assert (wait["workflowName"], wait["instanceId"], wait["runNumber"], wait["stepName"], wait["status"]) == (
        "order", "o-1", 1, "await approval", "waiting",
    )  # fmt: skip
    assert wait["waitEventType"] == "approval"
    assert api.get("/waits", params={"type": "approval", "workflowName": "order"}).json()["waits"] == [wait]
    for filters in ({"type": "other"}, {"workflowName": "echo"}):
        assert api.get("/waits", params=filters).json() == {"waits": []}
