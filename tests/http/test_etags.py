"""An ETag stands for one instance in one state: nothing of a deleted namesake passes for the one that follows it."""

from __future__ import annotations

from starlette.testclient import TestClient

from tests.http.conftest import Shop
from tests.http.test_routes import refused


def _made(shop: Shop, api: TestClient) -> str:
    made = api.post("/workflows/order/instances", json={"id": "o-1", "params": {"order_id": "42"}})
    assert made.status_code == 201
    shop.work()
    return "/workflows/order/instances/o-1"


def test_the_etag_of_a_deleted_namesake_matches_nothing(shop: Shop, api: TestClient) -> None:
    order = _made(shop, api)
    api.post(f"{order}/terminate")
    before = api.get(order).headers["etag"]
    shop.clock.advance(3600)
    assert shop.durable.internals.operations.retention.prune(older_than="1 second") == 1
    _made(shop, api)
    api.post(f"{order}/terminate")  # the same run number, the same version, the same steps
    seen = api.get(order, headers={"If-None-Match": before})
    assert seen.status_code == 200
    assert seen.headers["etag"] != before
    refused(api.post(f"{order}/restart", headers={"If-Match": before}), 412, "PRECONDITION_FAILED")
    assert api.post(f"{order}/restart", headers={"If-Match": seen.headers["etag"]}).status_code == 200


def test_an_etag_reveals_no_key_and_no_version(shop: Shop, api: TestClient) -> None:
    tag = api.get(_made(shop, api)).headers["etag"]
    assert len(tag.strip('"')) == 24
    assert not tag.strip('"').isdigit()
    assert "version" not in api.post("/workflows/order/instances/o-1/pause", headers={"If-Match": '"x"'}).json()


def test_every_state_of_an_instance_has_a_tag_of_its_own(shop: Shop, api: TestClient) -> None:
    order = _made(shop, api)
    tags = [api.get(order).headers["etag"]]
    for command, body in (("pause", None), ("resume", None), ("events", {"type": "other"}), ("restart", None)):
        api.post(f"{order}/{command}", json=body)
        tags.append(api.get(order).headers["etag"])
    assert len(set(tags)) == len(tags)
