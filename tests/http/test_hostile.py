"""What comes from people of bad will: never a server error, never more than a refusal, and nothing changes."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import celery_durable.http
from celery_durable import RedactionContext
from tests.http.conftest import Shop
from tests.http.test_routes import refused

IDS = [
    "%00", "a%00b", "%0A", "..", "%2e%2e", "a%2Fb", "'; DROP TABLE workflow_instance; --", "-", "a" * 5000, "%FF",
    "%ED%A0%80", "o-1%0A", "O-1", "{workflowName}", "o-1;x=1",
]  # fmt: skip
everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


@everywhere
def test_hostile_ids_find_nothing(api: TestClient, order: str) -> None:
    before = api.get(order).json()
    for text in IDS:
        for path in (f"/workflows/order/instances/{text}", f"/workflows/{text}/instances/o-1"):
            for suffix in ("", "/history", "/stream"):
                answer = api.get(path + suffix)
                assert answer.status_code in (307, 404), (path + suffix, answer.status_code)
            for command in ("pause", "resume", "terminate", "restart"):
                assert api.post(f"{path}/{command}").status_code == 404, path
            assert api.post(f"{path}/events", json={"type": "approval"}).status_code == 404
        if text != "..":  # the client sends /instances, which lists all workflows
            assert api.get(f"/workflows/{text}/instances").status_code == 404
        else:
            assert api.get("/workflows/../instances").json() == api.get("/instances").json()
        assert api.post(f"/workflows/{text}/instances", json={}).status_code in (404, 405)
    assert api.get(order).json() == before


@everywhere
def test_hostile_ids_in_bodies_are_refused(api: TestClient, order: str) -> None:
    def post(path: str, body: Any) -> Any:
        return api.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    for value in ("\x00", "\ud800", "a\x00b", "e-1\n", "é", "", " ", "-", "a/b", "x" * 101):
        refused(post("/workflows/echo/instances", {"id": value}), 400, "INVALID_INSTANCE_ID")
        batch = {"instances": [{"id": "e-1"}, {"id": value}]}
        refused(post("/workflows/echo/instances/batch", batch), 400, "INVALID_INSTANCE_ID")
        refused(post(f"{order}/events", {"type": value}), 400, "INVALID_EVENT_TYPE")
    assert api.get("/workflows/echo/instances").json()["instances"] == []


def test_hostile_bodies_are_refused(api: TestClient) -> None:
    path = "/workflows/echo/instances"
    for params in (
        "NaN", "Infinity", '"\\u0000"', '"\\ud800"', '{"\\u0000": 1}', "[" * 70 + "]" * 70,
        '{"a":' * 5000 + "1" + "}" * 5000, "9" * 5000,
    ):  # fmt: skip
        _refuse(api, path, f'{{"params": {params}}}')
    for text in (
        "[" * 100_000, "{", "", "null", "[]", '"x"', '{"params": 1} x', "\xff", '{"id": 5}', '{"id": ["a"]}',
        '{"__proto__": {}, "id": "e"}',
    ):  # fmt: skip
        _refuse(api, path, text)
    assert api.get(path).json()["instances"] == []


def _refuse(api: TestClient, path: str, text: str) -> None:
    answer = api.post(path, content=text.encode("latin-1"), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, (text[:100], answer.text)
    assert answer.json()["code"] in ("INVALID_REQUEST", "NOT_SERIALIZABLE"), answer.text


def test_a_body_that_is_not_declared_as_json_is_refused(api: TestClient) -> None:
    """What a form on another site can send."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = api.post("/workflows/echo/instances", content='{"id": "e-1"}', headers={"Content-Type": kind})
        refused(answer, 400, "INVALID_REQUEST")
    assert api.get("/workflows/echo/instances").json()["instances"] == []


def test_no_answer_repeats_a_value_that_was_refused(api: TestClient, order: str) -> None:
    secret = "4242424242424242"
    answers = [
        api.post("/workflows/order/instances", json={"params": {"order_id": {"card": secret}, "cents": secret + "x"}}),
        api.post("/workflows/order/instances", json={"params": 1, "card": secret, "id": 5}),
        api.post(f"{order}/events", json={"type": 5, "payload": secret}),
        api.post(f"{order}/terminate", json={"reason": [secret]}),
        api.get(f"{order}/history", params={"pageSize": secret}),
        api.get(f"{order}/history", params={"order": secret}),
        api.post("/_runner/tick", json={"maxInstances": secret}),
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert secret not in answer.text


@everywhere
def test_hostile_cursors_are_refused(api: TestClient, order: str) -> None:
    def forge(content: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    contents = [  # in the clear, as nobody writes them
        ["i", 2**64],
        ["i", -1],
        ["i", "1 OR 1=1"],
        ["i", None],
        ["i", [1]],
        ["i", 1e308],
        ["i", True],
        ["i"],
        ["steps", 1, "a", 1, "\x00"],
        ["steps", 2**40, "a", 1, "k"],
        ["steps", 1, "a", 2**63, "k"],
        ["steps", 1, "a", 2**31, "k"],
        ["events", 1, "x", 1],
        ["logs", 1, "a", "1"],
        {},
        None,
        "i",
    ]
    cursors = [forge(content) for content in contents]
    cursors += ["", "=", "\x00", "a" * 10_000, "W10", "é", base64.b64encode(b"[" * 2000).decode()]
    for cursor in cursors:
        refused(api.get("/workflows/order/instances", params={"cursor": cursor}), 400, "INVALID_CURSOR")
        for kind in ("steps", "events", "logs"):
            answer = api.get(f"{order}/history", params={f"{kind}Cursor": cursor, "includeLogs": True})
            refused(answer, 400, "INVALID_CURSOR")
    for last in (
        "x",
        forge(["stream", 2**40, 0, 0, "", 0]),
        forge(["stream", 1, 0, 0, "\x00", 0]),
        forge(["stream", 1]),
    ):
        refused(api.get(f"{order}/stream", headers={"Last-Event-ID": last}), 400, "INVALID_CURSOR")


def test_no_module_of_the_api_can_load_objects_from_bytes_or_code_from_text() -> None:
    folder = Path(celery_durable.http.__file__).parent
    code = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    assert not re.search(r"\b(pickle|marshal|shelve|yaml|eval|exec|import_module|__import__)\b", code)


# --- redaction ----------------------------------------------------------------------------------


def test_every_value_that_is_shown_passes_the_redaction_hook(shop: Shop, api: TestClient, order: str) -> None:
    api.post(f"{order}/events", json={"type": "approval", "payload": {"by": "mallory"}})
    api.post("/workflows/bad/instances", json={"id": "b-1"})
    shop.work()
    seen: list[tuple[str, str, str, str | None]] = []

    def redact(value: Any, shown: RedactionContext) -> Any:
        seen.append((shown.kind, shown.workflow, shown.instance_id, shown.name))
        return "***"

    shop.durable.internals.redact, guarded = redact, shop.client()
    texts = [
        guarded.get(order).text,
        guarded.get(f"{order}/history", params={"includeLogs": True}).text,
        guarded.get(f"{order}/stream").text,
        guarded.get("/workflows/bad/instances").text,
        guarded.get("/workflows/bad/instances/b-1").text,
        guarded.get("/workflows/bad/instances/b-1/history").text,
        guarded.get("/workflows/bad/instances/b-1/stream").text,
    ]
    for text in texts:
        for secret in ("4242", "1999", "mallory", "shipped", "paper jam", "order received"):
            assert secret not in text
    assert set(seen) == {
        ("params", "order", "o-1", None), ("output", "order", "o-1", None), ("result", "order", "o-1", "charge"),
        ("result", "order", "o-1", "await approval"), ("payload", "order", "o-1", "approval"),
        ("message", "order", "o-1", "payments"), ("message", "order", "o-1", "workflow"),
        ("data", "order", "o-1", "payments"), ("data", "order", "o-1", "workflow"),
        ("error", "bad", "b-1", None), ("error", "bad", "b-1", "print"),
    }  # fmt: skip
    shop.durable.internals.redact = None
    assert api.get(order).json()["details"]["output"] == "shipped"  # what is stored stays as it is


def test_where_the_redaction_hook_fails_nothing_is_shown(shop: Shop, api: TestClient, order: str) -> None:
    def redact(value: Any, shown: RedactionContext) -> Any:
        return value["card"] if shown.kind == "params" else 5 if shown.kind == "message" else value

    shop.durable.internals.redact = redact
    body = api.get(order).json()
    assert body["meta"]["params"] == "[redacted]"
    lines = api.get(f"{order}/history?includeLogs=1").json()["logs"]
    assert {line["message"] for line in lines} == {"[redacted]"}
