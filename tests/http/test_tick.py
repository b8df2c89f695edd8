"""The tick: workflows without any worker, driven by requests."""

from __future__ import annotations

from starlette.testclient import TestClient

from celery_durable.http import Authorize
from tests.http.conftest import Shop
from tests.http.test_routes import refused


def test_the_tick_is_off_unless_asked_for(shop: Shop) -> None:
    refused(shop.client(allow_anonymous=True).post("/_runner/tick"), 404, "NOT_FOUND")
    refused(shop.client(authorize=Authorize(reading=lambda access: True), tick=True).post("/_runner/tick"), 403,
            "FORBIDDEN")  # fmt: skip


def test_ticks_run_workflows_in_the_serving_process(shop: Shop, api: TestClient) -> None:
    api.post("/workflows/count/instances", json={"id": "c-1", "params": 5})
    api.post("/workflows/echo/instances", json={"id": "e-1"})
    assert api.post("/_runner/tick", json={"maxInstances": 1, "maxSteps": 2}).json() == {"processed": 1}
    assert shop.ran == ["c-1 0", "c-1 1"]
    assert [api.post("/_runner/tick").json()["processed"] for _ in range(2)] == [2, 0]
    for path in ("/workflows/count/instances/c-1", "/workflows/echo/instances/e-1"):
        assert api.get(path).json()["details"]["status"] == "complete"


def test_a_tick_is_bounded(api: TestClient) -> None:
    for body in (
        {"maxInstances": 0},
        {"maxInstances": 101},
        {"maxSteps": 0},
        {"maxSteps": 1025},
        {"maxSteps": "2"},
        [],
    ):
        refused(api.post("/_runner/tick", json=body), 400, "INVALID_REQUEST")
