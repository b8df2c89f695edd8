"""The routes that do again, creations that may be repeated, and the explanation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import Step, WorkflowEvent
from celery_durable.http import Access, Authorize, Permission
from tests.http.conftest import Shop
from tests.http.test_routes import refused

COUNT = "/workflows/count/instances"
BAD = "/workflows/bad/instances"


def steps(api: TestClient, path: str, run: int) -> list[str]:
    return [step["name"] for step in api.get(f"{path}/history", params={"runNumber": run}).json()["steps"]]


@pytest.fixture
def counted(shop: Shop, api: TestClient) -> str:
    """The path of an instance that has counted to three."""
    api.post(COUNT, json={"id": "c-1", "params": 3})
    shop.work()
    return f"{COUNT}/c-1"


def test_an_instance_is_rewound_to_a_step(shop: Shop, api: TestClient, counted: str) -> None:
    answer = api.post(f"{counted}/rewind", json={"step": "step 2", "reason": "miscounted"})
    assert (answer.status_code, answer.json()) == (200, {"ok": True, "runNumber": 2})
    assert api.get(counted).json()["meta"]["reason"] == "miscounted"
    assert steps(api, counted, 2) == ["step 0", "step 1"]
    shop.work()
    assert shop.ran == ["c-1 0", "c-1 1", "c-1 2", "c-1 2"]
    message = refused(api.post(f"{counted}/rewind", json={"step": "step 5"}), 404, "STEP_NOT_FOUND")
    assert message.startswith("Run 2 of instance 'c-1' of workflow 'count' has no step 'step 5'. Did you mean 'step ")
    refused(api.post(f"{counted}/rewind", json={}), 400, "INVALID_REQUEST")
    refused(
        api.post(f"{counted}/rewind", json={"step": "step 1"}, headers={"If-Match": '"1"'}), 412, "PRECONDITION_FAILED"
    )


def test_what_failed_is_tried_again(shop: Shop, api: TestClient, counted: str) -> None:
    api.post(BAD, json={"id": "b-1"})
    shop.work()
    assert api.post(f"{BAD}/b-1/retry", json={"reason": "there is paper"}).json() == {"ok": True, "runNumber": 2}
    message = refused(api.post(f"{BAD}/b-1/retry"), 409, "INSTANCE_NOT_ERRORED")
    assert message.startswith("Cannot retry instance 'b-1' of workflow 'bad': it is active, not errored.")
    refused(api.post(f"{counted}/retry"), 409, "INSTANCE_NOT_ERRORED")
    refused(api.post(f"{BAD}/b-2/retry"), 404, "INSTANCE_NOT_FOUND")


def test_an_instance_is_forked(shop: Shop, api: TestClient, counted: str) -> None:
    answer = api.post(f"{counted}/fork", json={"step": "step 1", "id": "c-2"})
    assert (answer.status_code, answer.json()) == (201, {"id": "c-2", "details": {"status": "active"}})
    assert steps(api, f"{COUNT}/c-2", 1) == ["step 0"]
    refused(api.post(f"{counted}/fork", json={"step": "step 1", "id": "c-2"}), 409, "INSTANCE_ID_ALREADY_EXISTS")
    refused(api.post(f"{counted}/fork", json={"step": "step 1", "id": "-"}), 400, "INVALID_INSTANCE_ID")
    refused(api.post(f"{counted}/fork", json={"step": "one"}), 404, "STEP_NOT_FOUND")
    assert len(api.post(f"{counted}/fork", json={"step": "step 1"}).json()["id"]) > 10


def test_restart_or_create_tells_which_happened(shop: Shop, api: TestClient) -> None:
    def call(**body: Any) -> Any:
        return api.post("/workflows/echo/instances/e-1/restart-or-create", json={"params": 1, **body}).json()

    made = {"outcome": "created", "id": "e-1", "runNumber": 1, "details": {"status": "active"}}
    assert call() == made
    assert call() == made | {"outcome": "unchanged"}
    shop.work()
    assert call(ifStatus=["errored"]) == made | {"outcome": "unchanged", "details": {"status": "complete"}}
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda _: call()["outcome"], range(4)))
    assert sorted(outcomes) == ["restarted", "unchanged", "unchanged", "unchanged"]
    assert api.get("/workflows/echo/instances/e-1").json()["meta"]["runNumber"] == 2
    path = "/workflows/echo/instances/e-1/restart-or-create"
    refused(api.post(path, json={"ifStatus": []}), 400, "INVALID_REQUEST")
    refused(api.post(path, json={}, headers={"If-Match": '"1"'}), 412, "PRECONDITION_FAILED")


def test_a_creation_may_be_repeated(shop: Shop, api: TestClient) -> None:
    body = {"id": "e-1", "params": 1, "ifExists": "return"}
    made = api.post("/workflows/echo/instances", json=body)
    assert (made.status_code, made.json()) == (201, {"id": "e-1", "details": {"status": "active"}})
    shop.work()
    again = api.post("/workflows/echo/instances", json=body | {"params": 2})
    assert (again.status_code, again.json()) == (200, {"id": "e-1", "details": {"status": "complete"}})
    assert api.get("/workflows/echo/instances/e-1").json()["meta"]["params"] == 1
    refused(api.post("/workflows/echo/instances", json=body | {"ifExists": "maybe"}), 400, "INVALID_REQUEST")


def test_a_start_is_debounced(shop: Shop, api: TestClient) -> None:
    body = {"id": "e-1", "ifExists": "postpone", "delayMs": 30_000, "atLatestMs": 300_000}
    for number in range(3):
        asked = api.post("/workflows/echo/instances", json=body | {"params": number})
        assert (asked.status_code, asked.json()) == (200, {"id": "e-1", "details": {"status": "waiting"}})
        shop.clock.advance(20)
        assert shop.work() == 0
    shop.clock.advance(10)
    assert shop.work() == 1
    assert api.get("/workflows/echo/instances/e-1").json()["details"] == {"status": "complete", "output": 2}


def test_runs_do_not_overlap(shop: Shop, api: TestClient) -> None:
    for policy, params, status in (("skip", 1, "active"), ("queue", 2, "active"), ("skip", 3, "active")):
        asked = api.post("/workflows/echo/instances", json={"id": "e-1", "params": params, "ifRunning": policy})
        assert (asked.status_code, asked.json()["details"]["status"]) == (200, status)
    shop.work()
    assert api.get("/workflows/echo/instances/e-1").json()["details"]["output"] == 2
    api.post("/workflows/echo/instances", json={"id": "e-1", "params": 4, "ifRunning": "skip"})
    shop.work()
    assert api.get("/workflows/echo/instances/e-1").json()["meta"]["runNumber"] == 2


def test_two_times_of_a_start_are_refused(shop: Shop, api: TestClient) -> None:
    body = {"runAt": "2030-01-01T01:00:00Z", "delayMs": 1}
    message = refused(api.post("/workflows/echo/instances", json=body), 400, "VALUE_REFUSED")
    assert message == "runAt and delayMs exclude each other: send one of them."
    refused(api.post("/workflows/echo/instances", json={"ifExists": "postpone"}), 400, "VALUE_REFUSED")
    refused(api.post("/workflows/echo/instances", json={"ifRunning": "again"}), 400, "INVALID_REQUEST")


def test_an_instance_has_a_limit_of_its_own(shop: Shop, api: TestClient) -> None:
    body = {"id": "o-1", "params": {"order_id": "42"}, "maxRunMs": 3_600_000}
    made = api.post("/workflows/order/instances", json=body)
    assert made.status_code == 201, made.text
    shop.work()
    assert api.get("/workflows/order/instances/o-1").json()["meta"]["maxRunMs"] == 3_600_000
    run = api.get("/workflows/order/instances/o-1/history?includeRun=true").json()["run"]
    assert run["maxRunMs"] == 3_600_000
    explained = api.get("/workflows/order/instances/o-1/explain").json()
    assert explained["sentence"].endswith("It is terminated in 1 h unless it ends before: its max_run is 1 h.")
    shop.clock.advance(3600)
    shop.work()
    assert api.get("/workflows/order/instances/o-1").json()["details"]["status"] == "terminated"
    refused(api.post("/workflows/order/instances", json=body | {"maxRunMs": 999}), 400, "INVALID_REQUEST")


def test_a_request_only_shortens_the_limit_of_the_workflow(shop: Shop, api: TestClient) -> None:
    @shop.durable.workflow(name="brief", max_run_duration="1 hour")
    def brief(event: WorkflowEvent[None], step: Step) -> None:
        step.sleep("a while", "30 minutes")

    def create(id_: str, limit: int) -> Any:
        return api.post("/workflows/brief/instances", json={"id": id_, "maxRunMs": limit})

    assert create("b-1", 3_600_000).status_code == 201
    assert refused(create("b-2", 3_600_001), 400, "VALUE_REFUSED") == (
        "maxRunMs is 3600001, longer than the max_run_duration of workflow 'brief', 3600000 ms. A request may only "
        "shorten it."
    )
    brief.create(id="b-3", max_run="2 hours")  # the application may


def test_a_start_is_put_off(shop: Shop, api: TestClient) -> None:
    made = api.post("/workflows/echo/instances", json={"id": "e-1", "runAt": "2030-01-01T01:00:00+00:00"})
    assert made.json() == {"id": "e-1", "details": {"status": "waiting"}}
    assert shop.work() == 0
    shop.clock.advance(3600)
    assert shop.work() == 1
    for wrong in ("2030-01-01T01:00:00", "2030-01-01", 1893459600, 1893459600000, "1893459600", True):
        refused(api.post("/workflows/echo/instances", json={"runAt": wrong}), 400, "INVALID_REQUEST")
    for late, code in (
        ("2031-01-01T01:00:01Z", "VALUE_REFUSED"),  # 365 days ahead, and 1 s
        ("9999-12-31T23:59:59Z", "VALUE_REFUSED"),
        ("9999-12-31T23:59:59-01:00", "INSTANT_INVALID"),
    ):
        refused(api.post("/workflows/echo/instances", json={"runAt": late}), 400, code)
    made = api.post("/workflows/echo/instances", json={"runAt": "2031-01-01T01:00:00Z"})
    assert made.status_code == 201, made.text


def test_steps_are_settled_by_hand_and_the_history_tells_by_whom(shop: Shop, api: TestClient, order: str) -> None:
    body = {"step": "await approval", "result": {"yes": True}, "by": "eve", "reason": "on the phone"}
    answer = api.post(f"{order}/set-result", json=body)
    assert (answer.status_code, answer.json()) == (200, {"ok": True, "runNumber": 1})
    shop.work()
    assert api.get(order).json()["details"] == {"status": "complete", "output": "shipped"}
    told = api.get(f"{order}/history", params={"includeRun": True}).json()
    assert told["events"][0]["payload"] == {"yes": True}
    [record] = told["run"]["audit"]
    assert record.pop("createdAt").startswith("2030-01-01T00:00:00")
    assert record == {
        "runNumber": 1,
        "stepKey": "await approval",
        "action": "set_result",
        "by": "eve",
        "reason": "on the phone",
        "before": {"status": "waiting", "attempts": 0},
    }
    refused(api.post(f"{order}/skip", json={"step": "charge", "by": "eve"}), 409, "INSTANCE_TERMINAL")


def test_a_failed_step_is_skipped_in_a_new_run_which_tells_where_it_comes_from(shop: Shop, api: TestClient) -> None:
    api.post(BAD, json={"id": "b-1"})
    shop.work()
    assert api.post(f"{BAD}/b-1/skip", json={"step": "print", "by": "eve"}).json() == {"ok": True, "runNumber": 2}
    run = api.get(f"{BAD}/b-1/history", params={"includeRun": True}).json()["run"]
    assert run["origin"] == {"instanceId": "b-1", "runNumber": 1, "stepKey": "print"}
    before = {"status": "errored", "attempts": 1, "error": {"name": "NoPaper", "message": "paper jam in tray 7"}}
    assert [record["before"] for record in run["audit"]] == [before]
    first = api.get(f"{BAD}/b-1/history", params={"includeRun": True, "runNumber": 1}).json()["run"]
    assert "origin" not in first
    assert first["audit"] == []


def test_what_cannot_be_settled_is_refused(shop: Shop, api: TestClient, order: str) -> None:
    for command, more in (("set-result", {"result": 1}), ("skip", {})):
        path = f"{order}/{command}"
        refused(api.post(path, json={"step": "charge", "by": "eve", **more}), 409, "STEP_NOT_OPEN")
        refused(api.post(path, json={"step": "none", "by": "eve", **more}), 404, "STEP_NOT_FOUND")
        refused(api.post(path, json={"step": "await approval", "by": "", **more}), 400, "NAME_INVALID")
        body = {"step": "await approval", "by": "eve", **more}
        refused(api.post(path, json=body, headers={"If-Match": '"1"'}), 412, "PRECONDITION_FAILED")
        del body["by"]
        nameless = api.post(path, json=body)
        refused(nameless, 400, "INVALID_REQUEST")
        assert nameless.json()["errors"] == [{"where": "body.by", "message": "Say who does it"}]
    refused(api.post(f"{order}/set-result", json={"step": "await approval", "by": "eve"}), 400, "INVALID_REQUEST")
    assert api.get(order).json()["details"]["status"] == "waiting"


def test_who_it_was_is_what_the_application_knows_whatever_the_client_says(shop: Shop, order: str) -> None:
    names: list[Any] = ["ada", None, 7]

    async def who(access: Access) -> Any:
        assert (access.permission, access.instance_id) == (Permission.MANAGEMENT, "o-1")
        return names.pop(0)

    api = shop.client(authorize=Authorize(lambda access: True, actor=who))
    body = {"step": "await approval", "by": "eve"}
    assert api.post(f"{order}/skip", json=body).status_code == 200
    assert api.post(f"{order}/restart").status_code == 200
    shop.work()
    assert api.post(f"{order}/skip", json=body).status_code == 200
    by = [api.get(f"{order}/history", params={"includeRun": True, "runNumber": run}).json() for run in (1, 2)]
    assert [it["run"]["audit"][0]["by"] for it in by] == ["ada", "eve"]
    assert api.post(f"{order}/skip", json=body).status_code == 500
    assert names == []


def test_who_cancelled_is_in_the_audit_if_anybody_knows(shop: Shop, order: str) -> None:
    names = ["ada", None, None]
    api = shop.client(authorize=Authorize(lambda access: True, actor=lambda access: names.pop(0)))
    api.post(f"{order}/cancel", json={"by": "eve", "reason": "rain"})
    api.post(f"{order}/cancel", json={"by": "eve"})
    api.post(f"{order}/restart")
    api.post(f"{order}/terminate")
    audits = [
        api.get(f"{order}/history", params={"includeRun": True, "runNumber": run}).json()["run"]["audit"]
        for run in (1, 2)
    ]
    for each in audits[0]:
        del each["createdAt"]
    assert audits == [
        [
            {"runNumber": 1, "action": "cancel", "by": "ada", "reason": "rain"},
            {"runNumber": 1, "action": "cancel", "by": "eve"},
        ],
        [],
    ]
    refused(shop.client().post(f"{order}/cancel", json={"by": "\n"}), 400, "NAME_INVALID")


def test_the_audit_shows_no_text_that_may_not_be_shown(shop: Shop) -> None:
    shop.durable.internals.redact, api = (lambda value, shown: f"[{shown.kind}]"), shop.client()
    api.post(BAD, json={"id": "b-1"})
    shop.work()
    api.post(f"{BAD}/b-1/skip", json={"step": "print", "by": "eve", "reason": "secret"})
    told = api.get(f"{BAD}/b-1/history", params={"includeRun": True}).text
    assert "secret" not in told
    assert "paper jam" not in told
    assert '"by":"[by]"' in told
    assert '"eve"' not in told


def test_two_rights_are_needed_where_two_things_are_done(shop: Shop, counted: str) -> None:
    asked: list[tuple[str, str | None]] = []
    denied: set[Permission] = set()

    def hook(access: Access) -> bool:
        asked.append((access.permission.value, access.instance_id))
        return access.permission not in denied

    api = shop.client(authorize=hook)
    fork = {"step": "step 1", "id": "c-2"}
    either = {"id": "e-1", "ifExists": "return"}
    for right, path, body in [
        (Permission.CREATION, f"{counted}/fork", fork),
        (Permission.MANAGEMENT, f"{counted}/fork", fork),
        (Permission.CREATION, f"{counted}/restart-or-create", {}),
        (Permission.MANAGEMENT, f"{counted}/restart-or-create", {}),
        (Permission.READING, "/workflows/echo/instances", either),
        (Permission.MANAGEMENT, "/workflows/echo/instances", {"id": "e-1", "ifRunning": "skip"}),
    ]:
        denied = {right}
        refused(api.post(path, json=body), 403, "FORBIDDEN")
    denied = set()
    asked.clear()
    assert api.post(f"{counted}/fork", json=fork).status_code == 201
    assert asked == [("management", "c-1"), ("creation", "c-2")]
    asked.clear()
    assert api.post(f"{counted}/restart-or-create", json={"params": 3}).json()["outcome"] == "restarted"
    assert asked == [("creation", "c-1"), ("management", "c-1")]


def test_an_explanation_shows_no_text_that_may_not_be_shown(shop: Shop) -> None:
    shop.durable.internals.redact = lambda value, shown: "[secret]" if shown.kind == "error" else value
    api = shop.client()
    api.post(BAD, json={"id": "b-1"})
    shop.work()
    said = api.get(f"{BAD}/b-1/explain")
    assert "[secret]" in said.json()["sentence"]
    assert "paper jam" not in said.text


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("terminate", {"children": 0}),
        ("retry", {"delayMs": False}),
        ("retry", {"delayMs": "600000"}),
        ("retry", {"dryRun": "yes"}),
    ],
)
def test_a_value_of_another_json_type_is_refused(api: TestClient, order: str, operation: str, body: Any) -> None:
    refused(api.post(f"{order}/{operation}", json=body), 400, "INVALID_REQUEST")
