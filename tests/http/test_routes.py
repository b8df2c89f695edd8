"""Every route of the specification: paths, bodies, codes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from starlette.testclient import TestClient

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.http import asgi
from tests.http.conftest import Shop
from tests.support.lost_connections import cut_commit

NOW = "2030-01-01T00:00:00Z"


def refused(answer: Any, status: int, code: str) -> str:
    """The message of a refusal, whose form is checked."""
    body = answer.json()
    assert (answer.status_code, body["code"]) == (status, code), body
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["status"] == status
    assert body["detail"] == body["message"]
    return body["message"]


# --- list ---------------------------------------------------------------------------------------


def test_workflows_are_listed(api: TestClient) -> None:
    answer = api.get("/workflows")
    *others, order, _ = answer.json()["workflows"]
    assert others == [{"name": name, "parameters": []} for name in ("bad", "count", "echo")]
    assert order["name"] == "order"
    assert order["parameters"][0] == {"name": "order_id", "type": "str", "required": True}
    assert answer.headers["cache-control"] == "private, no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_instances_are_listed_newest_first_page_by_page_and_without_payloads(shop: Shop, api: TestClient) -> None:
    for number in range(5):
        api.post("/workflows/echo/instances", json={"id": f"e-{number}", "params": "secret"})
    api.post("/workflows/bad/instances", json={"id": "b-1"})
    shop.work()
    first = api.get("/workflows/echo/instances", params={"pageSize": 3}).json()
    assert [item["id"] for item in first["instances"]] == ["e-4", "e-3", "e-2"]
    assert first["instances"][0] == {
        "id": "e-4", "workflowName": "echo", "details": {"status": "complete"}, "runNumber": 1, "labels": {},
        "createdAt": NOW, "updatedAt": NOW,
    }  # fmt: skip
    assert first["hasNextPage"] is True
    second = api.get("/workflows/echo/instances", params={"pageSize": 3, "cursor": first["cursor"]}).json()
    assert [item["id"] for item in second["instances"]] == ["e-1", "e-0"]
    assert (second["hasNextPage"], "cursor" in second) == (False, False)
    for name, query in (("bad", {}), ("echo", {"status": "complete"}), ("echo", {"label": "a=b"})):
        given = {**query, "cursor": first["cursor"]}
        refused(api.get(f"/workflows/{name}/instances", params=given), 400, "INVALID_CURSOR")
    (bad,) = api.get("/workflows/bad/instances", params={"status": "errored"}).json()["instances"]
    assert bad["details"] == {"status": "errored", "error": {"name": "NoPaper", "message": "paper jam in tray 7"}}
    assert api.get("/workflows/bad/instances", params={"status": "waiting"}).json()["instances"] == []


def test_instances_of_all_workflows_are_listed_page_by_page(shop: Shop, api: TestClient, order: str) -> None:
    api.post("/workflows/echo/instances", json={"id": "e-1", "params": 1})
    page = api.get("/instances", params={"pageSize": 1}).json()
    assert page["hasNextPage"] is True
    assert page["instances"] == api.get("/workflows/echo/instances").json()["instances"]
    rest = api.get("/instances", params={"cursor": page["cursor"]}).json()
    assert [each["workflowName"] for each in rest["instances"]] == ["order"]
    assert rest["hasNextPage"] is False
    assert api.get("/instances", params={"status": "complete"}).json()["instances"] == []
    refused(api.get("/instances", params={"cursor": "x"}), 400, "INVALID_CURSOR")
    refused(api.get("/instances", params={"label": "tenant"}), 400, "INVALID_LABEL")


def test_a_list_of_a_workflow_that_nobody_knows_is_refused(api: TestClient) -> None:
    assert api.get("/workflows/echo/instances").json() == {"instances": [], "hasNextPage": False}
    message = refused(api.get("/workflows/ecco/instances"), 404, "WORKFLOW_NOT_FOUND")
    assert message == "No workflow is registered as 'ecco'."  # and not which ones are


def test_pages_have_a_cap_and_queries_and_bodies_are_checked_without_names_of_the_server(api: TestClient) -> None:
    path = "/workflows/echo/instances"
    for name, value in (("pageSize", 0), ("pageSize", 101), ("pageSize", "x"), ("status", "asleep")):
        answer = api.get(path, params={name: value})
        refused(answer, 400, "INVALID_REQUEST")
        assert [each["where"] for each in answer.json()["errors"]] == [f"query.{name}"]
    for body, where, message in (
        ([], "body", "Input should be an object"),
        ({"labels": []}, "body.labels", "Input should be an object"),
        ({"idd": "e-1"}, "body.idd", "Unknown field"),
    ):
        answer = api.post(path, json=body)
        refused(answer, 400, "INVALID_REQUEST")
        assert answer.json()["errors"] == [{"where": where, "message": message}]


# --- create -------------------------------------------------------------------------------------


def test_errors_about_instances_advise_no_python_calls(shop: Shop, api: TestClient) -> None:
    assert refused(api.get("/workflows/echo/instances/none"), 404, "INSTANCE_NOT_FOUND") == (
        "Workflow 'echo' has no instance 'none'. Check the id, or list the workflow's instances."
    )
    api.post("/workflows/echo/instances", json={"id": "e-1"})
    again = api.post("/workflows/echo/instances", json={"id": "e-1"})
    assert refused(again, 409, "INSTANCE_ID_ALREADY_EXISTS") == (
        "Workflow 'echo' already has an instance 'e-1'. Use another id, or get or restart the existing instance."
    )
    shop.work()
    assert refused(api.post("/workflows/echo/instances/e-1/pause"), 409, "INSTANCE_TERMINAL").endswith(
        " it is complete. To start a new run, restart it."
    )


def test_an_instance_is_created_and_advanced(shop: Shop, api: TestClient) -> None:
    made = api.post("/workflows/echo/instances", json={"id": "e-1", "params": {"größe": [1, None]}})
    assert (made.status_code, made.json()) == (201, {"id": "e-1", "details": {"status": "active"}})
    shop.work()
    seen = api.get("/workflows/echo/instances/e-1").json()
    assert seen["details"] == {"status": "complete", "output": {"größe": [1, None]}}


def test_without_an_id_a_random_one_is_made(api: TestClient) -> None:
    ids = {api.post("/workflows/echo/instances", json={}).json()["id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(api.get(f"/workflows/echo/instances/{each}").status_code == 200 for each in ids)


def test_what_cannot_be_created_is_refused_with_its_code(api: TestClient) -> None:
    def create(workflow: str, **body: Any) -> Any:
        return api.post(f"/workflows/{workflow}/instances", json=body)

    create("echo", id="e-1")
    refused(create("echo", id="e-1"), 409, "INSTANCE_ID_ALREADY_EXISTS")
    refused(create("ecco", id="e-1"), 404, "WORKFLOW_NOT_FOUND")
    refused(create("echo", id="-1"), 400, "INVALID_INSTANCE_ID")
    refused(create("echo", id="e" * 101), 400, "INVALID_INSTANCE_ID")
    refused(create("echo", identity="e-2"), 400, "INVALID_REQUEST")
    message = refused(create("order", id="o-1", params={"order_id": "42", "cents": -1}), 400, "WORKFLOW_PARAMS_INVALID")
    assert message == "Parameters of workflow 'order' are not valid: $.cents: Input should be greater than 0."


def test_a_batch_leaves_out_what_exists_and_repetitions(api: TestClient) -> None:
    api.post("/workflows/echo/instances", json={"id": "e-1"})
    batch = {"instances": [{"id": "e-2"}, {"id": "e-1"}, {"id": "e-3", "params": 3}, {"id": "e-2", "params": 2}]}
    answer = api.post("/workflows/echo/instances/batch", json=batch)
    assert answer.status_code == 200
    assert answer.json() == {
        "instances": [
            {"id": "e-2", "details": {"status": "active"}},
            {"id": "e-3", "details": {"status": "active"}},
        ]
    }
    assert api.post("/workflows/echo/instances/batch", json=batch).json() == {"instances": []}


def test_a_batch_has_a_cap_and_one_invalid_item_refuses_all(api: TestClient) -> None:
    def batch(*ids: str) -> Any:
        return api.post("/workflows/echo/instances/batch", json={"instances": [{"id": each} for each in ids]})

    refused(batch(*(f"e-{number}" for number in range(1001))), 400, "BATCH_TOO_LARGE")
    refused(batch("e-1", "no spaces"), 400, "INVALID_INSTANCE_ID")
    assert api.get("/workflows/echo/instances").json()["instances"] == []
    assert len(batch(*(f"e-{number}" for number in range(100))).json()["instances"]) == 100


# --- get ----------------------------------------------------------------------------------------


def test_an_instance_shows_where_it_stands(api: TestClient, order: str) -> None:
    answer = api.get(order)
    assert answer.json() == {
        "id": "o-1",
        "details": {"status": "waiting"},
        "meta": {
            "workflowName": "order",
            "runNumber": 1,
            "params": {"order_id": "42", "cents": 1999},
            "labels": {},
            "createdAt": NOW,
            "updatedAt": NOW,
            "startedAt": NOW,
            "pauseRequested": False,
            "currentStep": {
                "stepKey": "await approval",
                "name": "await approval",
                "type": "waitForEvent",
                "status": "waiting",
                "attempts": 0,
                "wakeAt": "2030-01-02T00:00:00Z",
                "waitEventType": "approval",
                "createdAt": NOW,
            },
        },
    }


def test_a_failed_instance_shows_its_error_and_the_step_that_failed(shop: Shop, api: TestClient) -> None:
    api.post("/workflows/bad/instances", json={"id": "b-1"})
    shop.work()
    body = api.get("/workflows/bad/instances/b-1").json()
    error = {"name": "NoPaper", "message": "paper jam in tray 7"}
    assert body["details"] == {"status": "errored", "error": error}
    step = body["meta"]["currentStep"]
    assert (step["name"], step["status"], step["error"]) == ("print", "errored", error)
    assert (step["attempts"], step["maxAttempts"], step["timeoutMs"]) == (1, 6, 600_000)


def test_what_does_not_exist_is_not_found(api: TestClient) -> None:
    for path in ("", "/history", "/stream"):
        refused(api.get(f"/workflows/order/instances/o-9{path}"), 404, "INSTANCE_NOT_FOUND")
    for command in ("pause", "resume", "wake", "terminate", "restart"):
        refused(api.post(f"/workflows/order/instances/o-9/{command}"), 404, "INSTANCE_NOT_FOUND")
    refused(api.post("/workflows/order/instances/o-9/events", json={"type": "a"}), 404, "INSTANCE_NOT_FOUND")
    refused(api.get("/nowhere"), 404, "NOT_FOUND")
    refused(api.delete("/workflows"), 405, "METHOD_NOT_ALLOWED")


def test_an_etag_is_answered_with_304_until_something_changes(shop: Shop, api: TestClient, order: str) -> None:
    tag = api.get(order).headers["etag"]
    for header in (tag, f'"0", W/{tag}', "*"):
        again = api.get(order, headers={"If-None-Match": header})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    api.post(f"{order}/pause")
    changed = api.get(order, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.json()["details"]) == (200, {"status": "paused"})
    assert changed.headers["etag"] != tag


# --- change -------------------------------------------------------------------------------------


def test_pause_resume_terminate_and_restart(shop: Shop, api: TestClient, order: str) -> None:
    def status() -> str:
        return api.get(order).json()["details"]["status"]

    assert api.post(f"{order}/pause").json() == {"ok": True}
    assert status() == "paused"
    assert api.post(f"{order}/pause").json() == {"ok": True}
    assert api.post(f"{order}/resume").json() == {"ok": True, "wasPaused": True}
    shop.work()
    assert status() == "waiting"
    assert api.post(f"{order}/resume").json() == {"ok": True, "wasPaused": False}
    assert api.post(f"{order}/terminate", json={"reason": "sold twice"}).json() == {"ok": True}
    assert status() == "terminated"
    assert api.get(order).json()["meta"]["reason"] == "sold twice"
    refused(api.post(f"{order}/pause"), 409, "INSTANCE_TERMINAL")
    refused(api.post(f"{order}/terminate"), 409, "INSTANCE_TERMINAL")
    refused(api.post(f"{order}/events", json={"type": "approval"}), 409, "INSTANCE_TERMINAL")
    assert api.post(f"{order}/restart").json() == {"ok": True, "runNumber": 2}
    assert api.get(order).json()["meta"]["runNumber"] == 2


def test_a_cancel_is_shown_until_the_cleanup_has_ended(shop: Shop, api: TestClient) -> None:
    tour, seen = "/workflows/tour/instances/t-1", []

    @shop.durable.workflow(name="tour")
    def tour_of(event: WorkflowEvent[None], step: Step) -> None:
        def book() -> None:
            assert api.post(f"{tour}/cancel", json={"reason": "rain"}).json() == {"ok": True}
            seen.append(api.get(tour).json()["meta"] | api.post(f"{tour}/resume").json())
            seen.append(api.get(f"{tour}/explain").json())

        step.do("book", book)
        try:
            step.do("go", lambda: None)
        finally:
            step.wait_for_event("await the refund", "refund")

    shop.durable.internals.operations.create.instance("tour", id="t-1")
    shop.work()
    meta, explained = seen
    assert (meta["pauseRequested"], meta["wasPaused"], meta["reason"]) == (False, False, "rain")
    assert "(rain); its workflow gets Cancelled at its next step call. It runs " in explained["sentence"]
    shop.work()
    body = api.get(tour).json()
    assert (body["details"], body["meta"]["cancelRequestedAt"]) == ({"status": "waiting"}, meta["cancelRequestedAt"])
    sentence = api.get(f"{tour}/explain").json()["sentence"]
    assert '(rain); its workflow cleans up. Waits for event "refund" at step "await the refund"; ' in sentence
    refused(api.post(f"{tour}/pause"), 409, "INSTANCE_TERMINAL")
    api.post(f"{tour}/events", json={"type": "refund"})
    shop.work()
    run = api.get(f"{tour}/history", params={"includeRun": True}).json()["run"]
    assert (run["details"]["status"], run["reason"]) == ("terminated", "cancelled: rain")
    assert run["cancelRequestedAt"] == meta["cancelRequestedAt"]
    refused(api.post(f"{tour}/cancel"), 409, "INSTANCE_TERMINAL")


def test_wake_sends_a_worker_unless_the_instance_is_paused_or_held(shop: Shop, api: TestClient, order: str) -> None:
    held: list[Any] = []

    @shop.durable.workflow(name="busy")
    def busy(event: WorkflowEvent[None], step: Step) -> None:
        step.do("look", lambda: held.append(api.post("/workflows/busy/instances/b-1/wake").json()))

    shop.durable.internals.operations.create.instance("busy", id="b-1")
    shop.work()
    assert held == [{"ok": True, "woken": False}]
    assert shop.work() == 0
    assert api.post(f"{order}/wake").json() == {"ok": True, "woken": True}
    assert shop.work() == 1
    assert api.get(order).json()["details"]["status"] == "waiting"
    api.post(f"{order}/pause")
    assert api.post(f"{order}/wake").json() == {"ok": True, "woken": False}
    assert api.get(order).json()["details"]["status"] == "paused"
    api.post(f"{order}/terminate")
    refused(api.post(f"{order}/wake"), 409, "INSTANCE_TERMINAL")


def test_a_change_is_made_only_to_the_version_it_is_meant_for(api: TestClient, order: str) -> None:
    for command in ("events", "wake", "pause", "resume", "cancel", "restart", "terminate"):
        tag = api.get(order).headers["etag"]
        body = {"json": {"type": "approval"}} if command == "events" else {}
        for header in ('"1"', f"W/{tag}", "nonsense", '""', f'"{"9" * 40}"'):
            refused(api.post(f"{order}/{command}", headers={"If-Match": header}, **body), 412, "PRECONDITION_FAILED")
        assert api.get(order).headers["etag"] == tag
        assert api.post(f"{order}/{command}", headers={"If-Match": f'"1", {tag}'}, **body).status_code == 200
    assert api.post(f"{order}/restart", headers={"If-Match": "*"}).status_code == 200


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_of_changes_to_one_version_at_the_same_time_one_is_made(api: TestClient, order: str) -> None:
    tag = api.get(order).headers["etag"]
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda _: api.post(f"{order}/restart", headers={"If-Match": tag}).status_code, range(4))
        )
    assert sorted(answers) == [200, 412, 412, 412]
    assert api.get(order).json()["meta"]["runNumber"] == 2


# --- events -------------------------------------------------------------------------------------


def test_an_event_moves_an_instance_on(shop: Shop, api: TestClient, order: str) -> None:
    event = {"type": "approval", "payload": {"by": "eve"}, "id": "click-7"}
    sent = api.post(f"{order}/events", json=event)
    assert sent.json() == {"status": {"status": "active"}, "accepted": True}
    assert api.post(f"{order}/events", json=event).json()["accepted"] is False
    shop.work()
    assert api.get(order).json()["details"] == {"status": "complete", "output": "shipped"}
    assert shop.ran == ["o-1"]
    late = api.post(f"{order}/events", json=event)
    assert (late.status_code, late.json()["accepted"]) == (200, False)
    refused(api.post(f"{order}/events", json=event | {"id": "click-8"}), 409, "INSTANCE_TERMINAL")


def test_an_event_whose_payload_does_not_fit_the_wait_is_refused_with_the_field(shop: Shop, api: TestClient) -> None:
    assert api.post("/workflows/refund/instances", json={"id": "r-1"}).status_code == 201
    shop.work()
    events = "/workflows/refund/instances/r-1/events"
    answer = api.post(events, json={"type": "amount", "payload": {"cents": -1}})
    refused(answer, 422, "EVENT_REFUSED")
    assert answer.json()["errors"] == [{"where": "$.cents", "message": "Input should be greater than 0"}]
    assert api.post(events, json={"type": "amount", "payload": {"cents": 5}}).status_code == 200
    shop.work()
    assert api.get("/workflows/refund/instances/r-1").json()["details"]["output"] == 5


def test_an_event_that_is_not_allowed_is_refused(api: TestClient, order: str) -> None:
    refused(api.post(f"{order}/events", json={"type": "no spaces"}), 400, "INVALID_EVENT_TYPE")
    refused(api.post(f"{order}/events", json={"type": "approval", "id": "\x00"}), 400, "NAME_INVALID")
    refused(api.post(f"{order}/events", json={}), 400, "INVALID_REQUEST")


# --- the process --------------------------------------------------------------------------------


def test_health_and_readiness(shop: Shop, api: TestClient) -> None:
    assert api.get("/healthz").json() == api.get("/readyz").json() == {"status": "ok"}
    with shop.durable.internals.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE workflow_schema_version")
    assert api.get("/healthz").status_code == 200
    message = refused(api.get("/readyz"), 503, "NOT_READY")
    assert message == "The database does not answer, or its tables are missing or outdated. See the server's log."


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_client_is_told_that_a_change_may_have_been_applied(
    shop: Shop, api: TestClient, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.durable.internals.store

    def refuse() -> None:
        raise sa.exc.OperationalError("connect", {}, OSError("refused"), connection_invalidated=True)

    def refuse_from_now_on() -> None:
        monkeypatch.setattr(store._connections, "_checkout", refuse)

    with cut_commit(store, when="after", then=refuse_from_now_on):
        answer = api.post(f"{order}/pause")
    sentence = "The database does not answer. The change may have been applied."
    assert refused(answer, 503, "STORE_UNAVAILABLE") == sentence


def test_while_the_database_is_away_clients_are_told_to_come_again() -> None:
    app = Celery("away", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/nowhere"
    durable = Durable(app)
    api = TestClient(asgi(durable, allow_anonymous=True))
    answer = api.get("/workflows/order/instances/o-1")
    assert refused(answer, 503, "STORE_UNAVAILABLE") == "The database does not answer."
    assert answer.headers["retry-after"] == "2"
    refused(api.get("/readyz"), 503, "NOT_READY")
    assert api.get("/healthz").status_code == 200
    durable.close()


def test_a_pause_that_has_not_happened_yet_is_shown(shop: Shop, api: TestClient) -> None:
    seen: list[tuple[str, bool]] = []

    @shop.durable.workflow(name="busy")
    def busy(event: WorkflowEvent[None], step: Step) -> None:
        def look() -> None:
            api.post("/workflows/busy/instances/b-1/pause")
            body = api.get("/workflows/busy/instances/b-1").json()
            seen.append((body["details"]["status"], body["meta"]["pauseRequested"]))

        step.do("look", look)
        step.do("go on", lambda: None)

    shop.durable.internals.operations.create.instance("busy", id="b-1")
    shop.work()
    body = api.get("/workflows/busy/instances/b-1").json()
    assert seen == [("active", True)]
    assert (body["details"]["status"], body["meta"]["pauseRequested"]) == ("paused", False)
