"""What HTTP asks of every resource: `Allow`, HEAD, and bodies in an encoding that is not read."""

from __future__ import annotations

import gzip

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from celery_durable.http import router
from tests.http.conftest import Shop
from tests.http.test_access import with_key
from tests.http.test_routes import refused


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_allow_names_all_methods_of_a_resource(shop: Shop, prefix: str) -> None:
    app = FastAPI()
    app.include_router(router(shop.durable, allow_anonymous=True), prefix=prefix)
    api = TestClient(app)
    for path, methods in (
        ("/workflows", "GET, HEAD"),
        ("/workflows/order/instances", "GET, HEAD, POST"),
        ("/workflows/order/instances/o-1/pause", "POST"),
        ("/workflows/order/instances/batch", "GET, HEAD, POST"),  # it may also be the id of an instance
        ("/workflows/order/instances/o-1/stream", "GET"),
    ):
        answer = api.delete(prefix + path)
        refused(answer, 405, "METHOD_NOT_ALLOWED")
        assert answer.headers["allow"] == methods


def test_head_is_get_without_its_body(shop: Shop, order: str) -> None:
    api = shop.client(authorize=with_key)
    assert api.head(order).status_code == 401
    api.headers["X-Api-Key"] = "sesame"
    for path in ("/workflows", "/workflows/order/instances", order, f"{order}/history", "/healthz"):
        head, get = api.head(path), api.get(path)
        assert head.status_code == get.status_code == 200
        assert head.headers["content-length"] == get.headers["content-length"]
        assert head.headers.get("etag") == get.headers.get("etag")
    assert api.head(f"{order}/stream").status_code == 405
    assert api.head("/workflows/order/instances/o-9").status_code == 404


def test_a_compressed_body_is_refused(api: TestClient) -> None:
    body = gzip.compress(b'{"id": "e-1"}')
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = api.post("/workflows/echo/instances", content=body, headers=headers)
    assert refused(answer, 415, "UNSUPPORTED_ENCODING").startswith("Request bodies are not decoded")
    assert answer.headers["accept-encoding"] == "identity"
    assert api.post("/workflows/echo/instances", json={}, headers={"Content-Encoding": "identity"}).status_code == 201
