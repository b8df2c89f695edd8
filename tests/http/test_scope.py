"""Two tenants on one API: over every route, neither reads, changes or learns of anything of the other."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from celery_durable import Step, WorkflowEvent
from celery_durable.http import Access, Authorize, Permission, Scope
from celery_durable.model import Count
from tests.http.conftest import Shop
from tests.http.test_access import routes
from tests.http.test_routes import refused

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
both = pytest.mark.parametrize("kind", ["label", "prefix"])

SECRET = "globex-secret"
# What LIKE, a case-insensitive comparison, or a range would take for one's own.
IDS = {"acme": "ac_e-1", "globex": "acXe-1"}
PREFIXES = {"acme": "ac_e-", "globex": "acXe-"}
BODIES: dict[str, Any] = {
    "/instances": {"id": "acXe-1", "ifExists": "return"},
    "/batch": {"instances": [{"id": "acXe-1"}]},
    "/fork": {"step": "charge"},
    "/rewind": {"step": "charge"},
    "/set-result": {"step": "charge", "result": 1, "by": "eve"},
    "/skip": {"step": "charge", "by": "eve"},
    "/restart-or-create": {"ifStatus": ["waiting", "active", "errored", "complete", "paused"]},
    "/events": {"type": "approval", "payload": {"by": "eve"}},
    "/emit": {"payload": "from acme", "id": "e-1"},
}


def scope_of(access: Access, kind: str) -> bool | Scope:
    if access.permission in (Permission.HEALTH, Permission.TICK):
        return access.permission is Permission.HEALTH
    tenant = access.request.headers["X-Tenant"]
    return Scope({"tenant": tenant}) if kind == "label" else Scope(id_prefix=PREFIXES[tenant])


@pytest.fixture
def tenants(shop: Shop, kind: str) -> dict[str, TestClient]:
    """A client for each; both have an instance that waits on a topic, one with a child, and one that failed."""

    @shop.durable.workflow(name="listen")
    def listen(event: WorkflowEvent[Any], step: Step) -> Any:
        step.do("charge", lambda: event.payload)
        step.publish("progress", event.payload)
        step.log.info(str(event.payload))
        return step.wait_for_topic("news", "news", timeout="1 day").payload

    found = {}
    for tenant, id_ in IDS.items():
        api = shop.client(authorize=lambda access: scope_of(access, kind), tick=True)
        api.headers["X-Tenant"] = tenant
        params = SECRET if tenant == "globex" else "of acme"
        labels = {"tenant": tenant, "note": params}
        for workflow in ("listen", "bad"):
            body = {"id": id_, "params": None if workflow == "bad" else params, "labels": labels}
            made = api.post(f"/workflows/{workflow}/instances", json=body)
            assert made.status_code == 201, made.text
        found[tenant] = api
    shop.work()
    assert len(shop.durable.internals.operations.topics.waiters("news").items) == 2
    return found


def rows_of_globex(shop: Shop) -> str:
    """All that is stored of the other tenant."""
    store = shop.durable.internals.store
    with store.engine.connect() as conn:
        i = store.tables.instance
        keys = conn.execute(sa.select(i.c.id).where(i.c.instance_id.in_(["acXe-1"]))).scalars().all()
        assert len(keys) == 2
        found: dict[str, Any] = {"instance": conn.execute(sa.select(i).where(i.c.id.in_(keys)).order_by(i.c.id)).all()}
        for table in store.tables.metadata.sorted_tables:
            if "instance_pk" in table.c:
                query = sa.select(table).where(table.c.instance_pk.in_(keys)).order_by(*table.c)
                found[table.name] = conn.execute(query).all()
    return json.dumps(found, default=str)


@everywhere
@both
def test_no_route_reaches_anything_of_another_tenant(shop: Shop, tenants: dict[str, TestClient], kind: str) -> None:
    api, before = tenants["acme"], rows_of_globex(shop)
    table = [(method, path) for method, path in routes(api)]
    assert len(table) > 25
    for method, path in table:
        for workflow in ("listen", "bad"):
            mine = re.sub("/workflows/o-1", f"/workflows/{workflow}", path).replace(
                "/instances/o-1", "/instances/acXe-1"
            )
            mine = mine.replace("/topics/o-1", "/topics/news")
            body = next((body for end, body in BODIES.items() if mine.endswith(end)), {})
            answer = api.request(method, mine, **({"json": body} if method == "POST" else {}))
            if "/instances/acXe-1" in mine:
                assert answer.status_code in (403, 404, 409), (mine, answer.text)
            assert answer.status_code < 500, (mine, answer.text)
            shown = re.sub(r"Instance 'acXe-1'|instance 'acXe-1'", "", answer.text)  # the id that was asked for
            assert SECRET not in shown, (mine, shown)
            assert "acXe" not in shown, (mine, shown)
            assert rows_of_globex(shop) == before, mine
    shop.work()
    assert rows_of_globex(shop) == before


@everywhere
@both
def test_lists_counts_and_topics_hold_ones_own_alone(shop: Shop, tenants: dict[str, TestClient], kind: str) -> None:
    for tenant, api in tenants.items():
        listed = api.get("/workflows/listen/instances", params={"pageSize": 1}).json()
        assert [item["id"] for item in listed["instances"]] == [IDS[tenant]]
        assert listed["hasNextPage"] is False
        everything = api.get("/instances", params={"pageSize": 1}).json()
        assert [(item["workflowName"], item["id"]) for item in everything["instances"]] == [("bad", IDS[tenant])]
        second = api.get("/instances", params={"cursor": everything["cursor"]}).json()
        assert [(item["workflowName"], item["id"]) for item in second["instances"]] == [("listen", IDS[tenant])]
        assert second["hasNextPage"] is False
        assert [each["count"] for each in api.get("/stats").json()["instances"]] == [1, 1]
        assert api.get("/stats").json()["queues"] == []
        waits = api.get("/topics/news/waiters", params={"pageSize": 1}).json()
        assert [wait["instanceId"] for wait in waits["waiters"]] == [IDS[tenant]]
        assert waits["hasNextPage"] is False
        other = next(each for each in tenants if each != tenant)
        assert api.get("/workflows/listen/instances", params={"label": f"tenant={other}"}).json()["instances"] == []
        scope = Scope({"tenant": tenant}) if kind == "label" else Scope(id_prefix=PREFIXES[tenant])
        mine = shop.durable.internals.operations.restrict_to(scope)
        assert [(count.count, count.is_exact) for count in mine.stats.read().instances] == [(1, True), (1, True)]
        assert [wait.instance_id for wait in mine.stats.waits().items] == []
        assert mine.retention.count_ended(older_than="0 seconds") == Count(1)
    for tenant, api in tenants.items():  # the same id, and another payload: each tenant's ids are his own
        emitted = api.post("/topics/news/emit", json={"payload": tenant, "id": "e-1"})
        assert emitted.json() == {"resumed": 1}
    shop.work()
    for tenant, api in tenants.items():
        assert api.get(f"/workflows/listen/instances/{IDS[tenant]}").json()["details"]["output"] == tenant


@everywhere
@both
def test_a_cursor_is_good_for_the_tenant_it_was_given_to(shop: Shop, tenants: dict[str, TestClient], kind: str) -> None:
    for tenant, api in tenants.items():
        for id_ in (f"{PREFIXES[tenant]}more", f"{PREFIXES[tenant]}yet"):
            assert api.post("/workflows/listen/instances", json={"id": id_, "params": "x"}).status_code == 201
    shop.work()
    for path, items in (("/workflows/listen/instances", "instances"), ("/topics/news/waiters", "waiters")):
        first = {tenant: api.get(path, params={"pageSize": 1}).json() for tenant, api in tenants.items()}
        for tenant, api in tenants.items():
            other = next(each for each in tenants if each != tenant)
            said = refused(api.get(path, params={"cursor": first[other]["cursor"]}), 400, "INVALID_CURSOR")
            assert "was not made by this list with this filter, for this caller." in said
            rest = api.get(path, params={"cursor": first[tenant]["cursor"]}).json()
            assert len(rest[items]) == 2
            cursor = first[tenant]["cursor"]
            assert b"news" not in base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))  # nor any key


@everywhere
def test_an_emission_that_a_sweep_finishes_keeps_its_scope(shop: Shop) -> None:
    from celery_durable.operations.topics import continue_abandoned_emission
    from celery_durable.store.events import emissions

    @shop.durable.workflow(name="listen")
    def listen(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.wait_for_topic("news", "news", timeout="1 day").payload

    for tenant, id_ in IDS.items():
        shop.durable.internals.operations.create.instance("listen", id=id_, labels={"tenant": tenant})
    shop.work()
    scope = Scope({"tenant": "acme"}, "ac")
    lease = shop.durable.internals.settings.lease
    options: dict[str, Any] = {"topic": "news", "payload": '"late"', "lease": lease, "scope": scope}
    assert shop.durable.internals.store.transact(lambda tx: emissions.begin(tx, emission_id="e-9", **options))
    table = shop.durable.internals.store.tables.emission
    with shop.durable.internals.store.engine.begin() as conn:
        conn.execute(sa.update(table).values(next_check_at=0))
    assert continue_abandoned_emission(shop.durable.internals.store)
    shop.work()
    found = {item.id: item.status.value for item in shop.durable.internals.operations.queries.list("listen").items}
    assert found == {"ac_e-1": "complete", "acXe-1": "waiting"}


@both
def test_what_is_created_is_in_the_scope(shop: Shop, tenants: dict[str, TestClient], kind: str) -> None:
    api = tenants["acme"]
    path = "/workflows/listen/instances"
    made = api.post(path, json={"labels": {"note": "mine"}}).json()["id"]
    assert made.startswith(PREFIXES["acme"]) == (kind == "prefix")
    expected = {"note": "mine", "tenant": "acme"} if kind == "label" else {"note": "mine"}
    assert api.get(f"{path}/{made}").json()["meta"]["labels"] == expected
    outside = {"labels": {"tenant": "globex"}} if kind == "label" else {"id": "globex-7"}
    refused(api.post(path, json=outside), 403, "OUT_OF_SCOPE")
    refused(api.post(f"{path}/batch", json={"instances": [{"id": "acXe-8", **outside}]}), 403, "OUT_OF_SCOPE")
    fork = f"{path}/ac_e-1/fork"
    if kind == "prefix":
        refused(api.post(fork, json={"step": "charge", "id": "globex-7"}), 403, "OUT_OF_SCOPE")
        assert api.post(fork, json={"step": "charge"}).json()["id"].startswith(PREFIXES["acme"])
    if kind == "label":  # ids are unique per workflow: that one is taken cannot be hidden, but all else is
        for exists in ("error", "return"):
            answer = api.post(path, json={"id": "acXe-1", "ifExists": exists})
            refused(answer, 409, "INSTANCE_ID_ALREADY_EXISTS")
        refused(api.post(path, json={"id": "acXe-1", "ifRunning": "queue"}), 409, "INSTANCE_ID_ALREADY_EXISTS")
        refused(api.post(f"{path}/acXe-1/restart-or-create", json={}), 409, "INSTANCE_ID_ALREADY_EXISTS")
        assert api.post(f"{path}/batch", json={"instances": [{"id": "acXe-1"}]}).json() == {"instances": []}


@both
def test_links_to_instances_of_others_are_left_out(shop: Shop, kind: str) -> None:
    @shop.durable.workflow(name="parent")
    def parent(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.child("child", shop.durable.workflows["echo"], event.payload, id="acXe-child")

    operations = shop.durable.internals.operations
    operations.create.instance("parent", 1, id="ac_e-p", labels={"tenant": "acme"})
    shop.work()
    api = shop.client(authorize=lambda access: scope_of(access, kind))
    api.headers["X-Tenant"] = "acme"
    path = "/workflows/parent/instances/ac_e-p"
    for answer in (api.get(path), api.get(f"{path}/history"), api.get(f"{path}/explain")):
        assert answer.status_code == 200
        assert "acXe" not in answer.text
    assert "acXe-child" in shop.client().get(f"{path}/history").text


def test_scopes_of_several_hooks_narrow_each_other(shop: Shop) -> None:
    for id_, labels in (("a-1", {"team": "x"}), ("a-2", {"team": "y"}), ("b-1", {"team": "x"})):
        shop.durable.internals.operations.create.instance("echo", id=id_, labels=labels)
    scopes: list[Any] = []
    api = shop.client(authorize=Authorize(lambda _: scopes[0], reading=lambda _: scopes[1]))
    for scopes[:], ids in (
        ([Scope(id_prefix="a-"), Scope({"team": "x"})], ["a-1"]),
        ([Scope(id_prefix="a-"), Scope(id_prefix="a")], ["a-2", "a-1"]),
        ([True, Scope({"team": "x"})], ["b-1", "a-1"]),
    ):
        assert [item["id"] for item in api.get("/workflows/echo/instances").json()["instances"]] == ids
    for scopes[:] in ([Scope(id_prefix="a-"), Scope(id_prefix="b-")], [Scope({"team": "x"}), Scope({"team": "y"})]):
        refused(api.get("/workflows/echo/instances"), 403, "FORBIDDEN")


def test_a_scope_that_says_nothing_cannot_be_made() -> None:
    for nothing in ({}, {"labels": {"tenant": ""}}, {"id_prefix": None}, {"labels": {"tenant": None}}):
        with pytest.raises(ValueError, match="A scope names labels with their values, a prefix of ids, or both"):
            Scope(**nothing)


def test_a_tick_has_no_scope(shop: Shop) -> None:
    api = shop.client(authorize=lambda _: Scope(id_prefix="a-"), tick=True)
    refused(api.post("/_runner/tick"), 403, "FORBIDDEN")
