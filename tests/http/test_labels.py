"""Labels over HTTP: given to a creation, shown, asked for in lists, and led past the redaction hook."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import RedactionContext
from tests.http.conftest import Shop
from tests.http.test_routes import refused

ECHO = "/workflows/echo/instances"
everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


def listed(api: TestClient, *labels: str, **query: Any) -> list[str]:
    answer = api.get(ECHO, params={"label": list(labels), **query})
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["instances"]]


@everywhere
def test_instances_are_created_with_labels_shown_with_them_and_listed_by_them(shop: Shop, api: TestClient) -> None:
    api.post(ECHO, json={"id": "e-1", "labels": {"tenant": "acme", "stage": "new"}})
    batch = [{"id": "e-2", "labels": {"tenant": "acme"}}, {"id": "e-3"}, {"id": "e-4", "labels": {"tenant": "ACME"}}]
    api.post(f"{ECHO}/batch", json={"instances": batch})
    assert listed(api, "tenant=acme") == ["e-2", "e-1"]
    assert listed(api, "tenant=acme", "stage=new") == ["e-1"]
    assert listed(api, "stage=old") == []
    assert listed(api) == ["e-4", "e-3", "e-2", "e-1"]
    items = api.get(ECHO).json()["instances"]
    assert [item["labels"] for item in items] == [
        {"tenant": "ACME"}, {}, {"tenant": "acme"}, {"stage": "new", "tenant": "acme"},
    ]  # fmt: skip
    one = api.get(f"{ECHO}/e-1").json()
    assert one["meta"]["labels"] == {"stage": "new", "tenant": "acme"}
    run = api.get(f"{ECHO}/e-1/history", params={"includeRun": True}).json()["run"]
    assert run["labels"] == one["meta"]["labels"]


def test_a_value_may_hold_what_queries_are_made_of(api: TestClient) -> None:
    api.post(ECHO, json={"id": "e-1", "labels": {"query": "a=b&c d+ü"}})
    assert listed(api, "query=a=b&c d+ü") == ["e-1"]


def test_labels_that_cannot_be_are_refused(api: TestClient) -> None:
    many = {f"n{number}": "x" for number in range(17)}
    for labels, code in (({"a b": "x"}, "INVALID_LABEL"), ({"a": ""}, "INVALID_LABEL"), (many, "TOO_MANY_LABELS")):
        refused(api.post(ECHO, json={"id": "e-1", "labels": labels}), 400, code)
        items = [{"id": "e-0"}, {"id": "e-1", "labels": labels}]
        refused(api.post(f"{ECHO}/batch", json={"instances": items}), 400, code)
        refused(api.post(f"{ECHO}/e-1/restart-or-create", json={"labels": labels}), 400, code)
    refused(api.post(ECHO, json={"id": "e-1", "labels": {"a": 1}}), 400, "INVALID_REQUEST")
    assert listed(api) == []
    asked = ["tenant", "ten ant=a", "tenant=", "=acme"]
    for label in asked:
        refused(api.get(ECHO, params={"label": label}), 400, "INVALID_LABEL")
    message = refused(api.get(ECHO, params={"label": ["tenant=a", "tenant=b"]}), 400, "INVALID_LABEL")
    assert message == "Label 'tenant=b' is not allowed: write it as name=value, each name once."


def test_values_of_labels_pass_the_redaction_hook(shop: Shop, api: TestClient) -> None:
    api.post(ECHO, json={"id": "e-1", "params": 7, "labels": {"tenant": "acme", "stage": "new"}})
    seen: list[tuple[str, str | None]] = []

    def redact(value: Any, shown: RedactionContext) -> Any:
        seen.append((shown.kind, shown.name))
        return None if shown.name == "tenant" else value

    shop.durable.internals.redact, guarded = redact, shop.client()
    wanted = {"stage": "new", "tenant": "[redacted]"}
    assert guarded.get(f"{ECHO}/e-1").json()["meta"]["labels"] == wanted
    assert guarded.get(ECHO).json()["instances"][0]["labels"] == wanted
    assert guarded.get(f"{ECHO}/e-1/history?includeRun=1").json()["run"]["labels"] == wanted
    assert {each for each in seen if each[0] == "label"} == {("label", "stage"), ("label", "tenant")}
