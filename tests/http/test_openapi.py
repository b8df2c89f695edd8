"""The description of the API: it is complete, and the API does what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from schemathesis.engine.run import PhaseName
from starlette.testclient import TestClient

from celery_durable.http import asgi, router
from celery_durable.http.__main__ import text
from tests.http.conftest import Shop
from tests.http.test_access import with_key

DESCRIPTION = json.loads(text())


def operations() -> list[tuple[str, dict[str, Any]]]:
    paths = DESCRIPTION["paths"]
    return [(f"{method.upper()} {path}", about) for path, item in paths.items() for method, about in item.items()]


def test_the_bounds_of_numbers_are_described_in_the_words_of_json_schema() -> None:
    """Pydantic writes its own words where a bound is on a union, and clients ignore them."""
    assert not re.findall(r'"(ge|gt|le|lt)":', text())


def test_every_operation_is_described() -> None:
    schemas = DESCRIPTION["components"]["schemas"]
    for name, about in operations():
        assert about["summary"], name
        assert about["operationId"].startswith("durable"), name
        assert {"400", "401", "403", "503", "default"} <= about["responses"].keys(), name
        assert ("422" in about["responses"]) == name.endswith("/events"), name  # not that of FastAPI
        for status, response in about["responses"].items():
            assert response["description"], name
            if status.startswith(("4", "5")):
                assert list(response["content"]) == ["application/problem+json"], name
        if "requestBody" in about:
            schema = about["requestBody"]["content"]["application/json"]["schema"]
            assert "examples" in json.dumps(_resolved(schema, schemas)), name
        success = about["responses"]["201" if "201" in about["responses"] else "200"]
        assert all(content["example"] for content in success["content"].values()), name


def _resolved(schema: Any, schemas: Any) -> Any:
    found = [schema, *schema.get("anyOf", [])]
    return [schemas[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in found]


# What is well formed and cannot be done: gone, in another state, of another version, a database too slow.
POSSIBLE = ["2xx", "304", "404", "409", "412", "503"]
OPERATIONS = [
    # The name of a step is looked for, not checked: a stale If-Match is found first.
    {
        "include-path-regex": "/(rewind|skip|set-result)$",
        "checks": {"negative_data_rejection": {"expected-statuses": ["400", "401", "404", "409", "412", "415"]}},
    },
    # `batch` may be the id of an instance, so Allow also names the methods that are described for an instance.
    {"include-path-regex": "/instances/batch$", "checks": {"allow_header_conformance": {"enabled": False}}},
]


def make_possible(_: Any, case: Any, __: Any) -> None:
    """Mend what no schema can say: a cursor is one that a list gave, params are the workflow's, a start is in a year.

    Of several labels with one name, the first is kept, and of fields that exclude each other, one.
    """
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for name in [name for name in case.query if name.lower().endswith("cursor")]:
        del case.query[name]
    if isinstance(labels := case.query.get("label"), list):
        by_name = {each.partition("=")[0]: each for each in reversed(labels)}
        case.query["label"] = list(reversed(by_name.values()))
    case.headers.pop("Last-Event-ID", None)
    if not isinstance(case.body, dict):
        return
    if case.operation.path.endswith(("/instances", "/batch", "/restart-or-create")):
        for body in case.body.get("instances", [case.body]):
            body["params"] = {"order_id": "42", "cents": 1999}
    if case.operation.path.endswith(("/set-result", "/skip", "/limits/{limitName}")):
        case.body["by"] = case.body.get("by") or "eve"  # no hook tells it here
    if case.operation.path.endswith("/limits/{limitName}"):  # a change has new numbers, or takes them back
        case.body["atOnce"], case.body["rate"] = (None, None) if case.body.get("reset") else (5, "9 per minute")
    if case.operation.path.endswith("/events"):  # an answer, or an event
        if case.body.get("answers") is not None:
            case.body = {"answers": case.body["answers"], "by": "eve", "payload": case.body.get("payload")}
        else:
            case.body["type"] = case.body.get("type") or "approval"
    for name in ("runAt", "delayMs", "atLatestMs", "ifRunning"):  # some of them exclude others
        case.body.pop(name, None)
    if case.body.get("ifExists") == "postpone":
        case.body["ifExists"] = "return"


@pytest.fixture
def possible_requests() -> Iterator[None]:
    schemathesis.hook("before_call")(make_possible)
    yield
    schemathesis.hooks.unregister(make_possible)


@pytest.mark.usefixtures("possible_requests")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "examples", [pytest.param(2, marks=[pytest.mark.slow, pytest.mark.gate]), pytest.param(50, marks=pytest.mark.slow)]
)
def test_the_api_does_what_its_description_says(store_url: str, examples: int) -> None:
    """Schemathesis, with all its checks and phases, valid and invalid requests, with and without credentials."""
    shop = Shop(store_url, durable_max_instance_id=255, durable_max_event_type=255)  # the description's limits
    key = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    api = asgi(shop.durable, authorize=with_key, tick=True, security_schemes={"key": key})
    config = {
        "auth": {"openapi": {"key": {"api_key": "sesame"}}},
        "checks": {"positive_data_acceptance": {"expected-statuses": POSSIBLE}},
        "generation": {"mode": "all", "max-examples": examples, "deterministic": True, "database": "none"},
        "operations": OPERATIONS,
    }
    described = schemathesis.openapi.from_dict(api.openapi(), config=SchemathesisConfig.from_dict(config))
    described.app = api
    shop.durable.workflows["order"].create({"order_id": "42"}, id="o-1").terminate()  # its stream ends at once
    phases, found = set(), []
    for event in from_schema(described).execute():
        match event:
            case events.PhaseFinished(status=Status.SUCCESS):
                phases.add(event.phase.name)
            case events.ScenarioFinished():
                failed = [check for checks in event.recorder.checks.values() for check in checks if check.failure_info]
                found += [f"{event.recorder.label} {check.name}: {check.failure_info}" for check in failed]
            case events.NonFatalError():
                found.append(f"{event.label}: {event.value!r}")
            case events.FatalError():
                raise event.exception
    shop.close()
    assert not found, "\n".join(found)
    assert phases >= {PhaseName.EXAMPLES, PhaseName.COVERAGE, PhaseName.FUZZING, PhaseName.STATEFUL_TESTING}


def test_the_description_of_an_application_names_the_schemes_of_its_router(shop: Shop) -> None:
    site, key = FastAPI(), {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    schemes = {"key": key, "token": {"type": "http", "scheme": "bearer"}}
    site.include_router(router(shop.durable, allow_anonymous=True, security_schemes=schemes), prefix="/api")

    @site.get("/open")
    def open_() -> str:
        return "to all"

    about = site.openapi()
    assert about["components"]["securitySchemes"] == schemes
    ours = {path: item for path, item in about["paths"].items() if path.startswith("/api/")}
    assert len(ours) > 15
    for item in ours.values():
        for operation in item.values():
            assert operation["security"] == [{"key": []}, {"token": []}]
    assert "security" not in about["paths"]["/open"]["get"]
    assert TestClient(site).get("/api/workflows").status_code == 200  # hooks decide, not the description
