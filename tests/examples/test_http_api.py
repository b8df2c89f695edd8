"""examples/http_api.py: its own application, over a database of the test."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from celery_durable.app import override_durable
from celery_durable.testing import DurableHarness
from examples import http_api, payments
from examples import order_approval as shop

pytestmark = pytest.mark.durable(workflows=[shop.order])


@pytest.fixture
def clerk(durable_harness: DurableHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    durable_harness.create_tables(shop.Base.metadata)
    payments.open_books()
    for part in ("settings", "store", "registry", "operations"):
        monkeypatch.setitem(vars(shop.durable.internals), part, getattr(durable_harness.durable.internals, part))
    with override_durable(durable_harness.durable):
        yield TestClient(http_api.site, headers={"X-Api-Key": "clerk"})


def test_an_order_is_created_approved_and_followed(durable_harness: DurableHarness, clerk: TestClient) -> None:
    orders = clerk.get("/").json()["orders"]
    params = {"order_id": "http-1", "cents": 12500, "card": "4242"}
    assert clerk.post(orders, json={"id": "order-1", "params": params}).status_code == 201
    durable_harness.run_until_idle()
    seen = clerk.get(f"{orders}/order-1", headers={"X-Api-Key": "shop"}).json()
    assert (seen["details"]["status"], seen["meta"]["params"]["card"]) == ("waiting", "****")
    event = {"type": "approval", "payload": {"approved": True, "by": "eve"}}
    assert clerk.post(f"{orders}/order-1/events", json=event).json()["accepted"] is True
    durable_harness.run_until_idle()
    assert '"output":"shipped"' in clerk.get(f"{orders}/order-1/stream").text


def test_each_key_opens_what_its_role_may(clerk: TestClient) -> None:
    orders = "/api/workflows/order/instances"
    statuses = {
        key: [
            clerk.request(method, path, headers={"X-Api-Key": key}, json={}).status_code
            for method, path in [
                ("GET", orders),
                ("POST", f"{orders}/order-9/pause"),
                ("POST", f"{orders}/order-9/events"),
                ("GET", "/api/healthz"),
            ]
        ]
        for key in ("clerk", "shop", "prober", "")
    }
    assert statuses == {
        "clerk": [200, 403, 400, 403],
        "shop": [200, 403, 403, 403],
        "prober": [403, 403, 403, 200],
        "": [401, 401, 401, 401],
    }
    body = {"id": "mine-1", "params": {"order_id": "1", "cents": 1}}
    assert clerk.post(orders, json=body).json()["code"] == "FORBIDDEN"


def test_the_commands_in_its_docstring_are_for_routes_that_exist() -> None:
    doc = http_api.__doc__ or ""
    (orders,) = re.findall(r"orders=http://127\.0\.0\.1:8000(\S+)", doc)
    paths = [orders + rest for rest in re.findall(r"\$orders(\S*)", doc)]
    assert len(paths) == 4
    known = [re.sub(r"\{\w+\}", r"[\\w-]+", path) for path in http_api.site.openapi()["paths"]]
    assert all(any(re.fullmatch(each, path) for each in known) for path in paths)
