"""Limits over HTTP: reading them, and changing them in the name of the user."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import Limit, Step, StepConfig, WorkflowEvent
from celery_durable.http import Access, Authorize, Permission, Scope
from tests.http.conftest import Shop
from tests.http.test_routes import refused


@pytest.fixture
def limited(shop: Shop, api: TestClient) -> TestClient:
    """A client, after two instances have used the limits `stripe` and `tenant`."""
    limits = [Limit("stripe", at_once=20), Limit("tenant", at_once=5, by=lambda event: event.payload)]

    @shop.durable.workflow(name="call")
    def call(event: WorkflowEvent[str], step: Step) -> str:
        return step.do("charge", StepConfig(limits=limits), lambda: event.payload)

    for tenant in ("acme", "globex"):
        assert api.post("/workflows/call/instances", json={"params": tenant}).status_code == 201
    shop.work()
    return api


def test_the_list_has_pages_and_can_be_of_one_limit(limited: TestClient) -> None:
    first = limited.get("/limits", params={"pageSize": 2}).json()
    assert [(each["name"], each["key"]) for each in first["limits"]] == [("stripe", ""), ("tenant", "acme")]
    assert first["hasNextPage"] is True
    rest = limited.get("/limits", params={"cursor": first["cursor"]}).json()
    assert [each["key"] for each in rest["limits"]] == ["globex"]
    assert rest["hasNextPage"] is False
    of_one = limited.get("/limits", params={"name": "tenant"}).json()
    assert [each["key"] for each in of_one["limits"]] == ["acme", "globex"]
    refused(limited.get("/limits", params={"name": "tenant", "cursor": first["cursor"]}), 400, "INVALID_CURSOR")


def test_a_limit_is_read_and_changed_for_one_key_or_for_all(limited: TestClient) -> None:
    free = {"count": 0, "isExact": True}
    assert limited.get("/limits/stripe").json() == {
        "limit": {"name": "stripe", "key": "", "atOnce": 20, "held": 0, "waiting": free},
        "holders": [],
        "waiting": [],
    }
    changed = limited.patch("/limits/tenant", json={"key": "acme", "atOnce": 9, "rate": "3 per day", "by": "eve"})
    assert changed.json() == {"ok": True}
    acme = limited.get("/limits/tenant", params={"key": "acme"}).json()["limit"]
    assert (acme["atOnce"], acme["rate"], acme["setBy"]) == (9, "3 per day", "eve")
    assert limited.get("/limits/tenant", params={"key": "globex"}).json()["limit"]["atOnce"] == 5
    limited.patch("/limits/tenant", json={"rate": "4 per day", "by": "eve"})
    acme = limited.get("/limits/tenant", params={"key": "acme"}).json()["limit"]
    assert (acme["atOnce"], acme["rate"]) == (9, "4 per day")
    limited.patch("/limits/tenant", json={"reset": True, "by": "eve"})
    acme = limited.get("/limits/tenant", params={"key": "acme"}).json()["limit"]
    assert acme == {"name": "tenant", "key": "acme", "atOnce": 5, "held": 0, "waiting": free}


def test_mistakes_are_refused_with_their_codes(limited: TestClient) -> None:
    refused(limited.get("/limits/strpe"), 404, "LIMIT_NOT_FOUND")
    refused(limited.get("/limits/tenant"), 404, "LIMIT_NOT_FOUND")
    by = {"by": "eve"}
    refused(limited.patch("/limits/strpe", json={"atOnce": 3, **by}), 404, "LIMIT_NOT_FOUND")
    refused(limited.patch("/limits/stripe", json={"rate": "often", **by}), 400, "VALUE_REFUSED")
    refused(limited.patch("/limits/stripe", json={"reset": True, "atOnce": 3, **by}), 400, "VALUE_REFUSED")
    refused(limited.patch("/limits/stripe", json=by), 400, "VALUE_REFUSED")
    refused(limited.patch("/limits/stripe", json={"atOnce": 3, "by": "\n"}), 400, "NAME_INVALID")
    for body in ({"atOnce": 0, **by}, {"atOnce": True, **by}, {"at_once": 3, **by}, {"atOnce": 3}):
        refused(limited.patch("/limits/stripe", json=body), 400, "INVALID_REQUEST")
    refused(limited.patch("/limits/stripe", content=b"\xff{"), 400, "INVALID_REQUEST")
    assert limited.get("/limits/stripe").json()["limit"]["atOnce"] == 20


def test_the_name_of_the_user_comes_from_the_hook(shop: Shop, limited: TestClient) -> None:
    api = shop.client(authorize=Authorize(lambda _: True, actor=lambda _: "alice"))
    assert api.patch("/limits/stripe", json={"atOnce": 3, "by": "mallory"}).status_code == 200
    assert api.get("/limits/stripe").json()["limit"]["setBy"] == "alice"


def test_each_route_needs_its_permission(shop: Shop, limited: TestClient) -> None:
    asked: list[tuple[Any, ...]] = []

    def hook(access: Access) -> bool:
        asked.append((access.permission, access.operation, access.workflow, access.instance_id))
        return access.permission is Permission.READING

    api = shop.client(authorize=hook)
    assert api.get("/limits").status_code == 200
    assert api.get("/limits/stripe").status_code == 200
    refused(api.patch("/limits/stripe", json={"atOnce": 3, "by": "eve"}), 403, "FORBIDDEN")
    assert asked == [
        (Permission.READING, "list_limits", None, None),
        (Permission.READING, "get_limit", None, None),
        (Permission.MANAGEMENT, "change_limit", None, None),
    ]


def test_a_client_of_one_tenant_neither_sees_nor_changes_limits(shop: Shop, limited: TestClient) -> None:
    api = shop.client(authorize=lambda _: Scope({"tenant": "acme"}))
    said = refused(api.get("/limits"), 403, "FORBIDDEN")
    assert said == "Limits count for all instances: the hook has to return True for them, or refuse them."
    refused(api.get("/limits/stripe"), 403, "FORBIDDEN")
    refused(api.patch("/limits/stripe", json={"atOnce": 3, "by": "eve"}), 403, "FORBIDDEN")
    assert limited.get("/limits/stripe").json()["limit"]["atOnce"] == 20


def test_explain_names_no_limit_to_a_client_of_one_tenant(shop: Shop, api: TestClient) -> None:
    @shop.durable.workflow(name="import", limits=[Limit("import", at_once=1)])
    def run_import(event: WorkflowEvent[None], step: Step) -> None:
        step.sleep("rest", "1 day")

    for id_, tenant in (("a", "globex"), ("b", "acme")):
        body = {"id": id_, "labels": {"tenant": tenant}}
        assert api.post("/workflows/import/instances", json=body).status_code == 201
        shop.work()
    path = "/workflows/import/instances/b/explain"
    assert api.get(path).json()["facts"]["longest_holder"] == "import/a"
    of_acme = shop.client(authorize=lambda _: Scope({"tenant": "acme"})).get(path).json()
    assert (of_acme["code"], of_acme["sentence"]) == ("LIMITED", "The run waits until it gets its limits.")
    assert "import/a" not in str(of_acme)
