"""The description of the API: it is complete, and the API does what it says."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.core.parameters import ParameterLocation
from starlette.testclient import TestClient

from celery_durable.http import router
from celery_durable.http.__main__ import text
from tests.http.conftest import Shop

OURS = {"workflowName": "order", "instanceId": "o-1"}
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
        assert "422" not in about["responses"], name
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


@functools.cache
def described() -> Any:
    about = {name: value for name, value in DESCRIPTION.items() if name != "security"}  # it lets anybody in
    # What is well formed and cannot be done: gone, in another state, of another version.
    statuses = ["2xx", "304", "404", "409", "412", "503"]
    config = SchemathesisConfig.from_dict({"checks": {"positive_data_acceptance": {"expected-statuses": statuses}}})
    return schemathesis.openapi.from_dict(about, config=config)


def make_possible(case: Any) -> None:
    """What no schema can say: a cursor is one that a list gave, params are the workflow's, a start is within a year.

    Of several labels with one name, the first is kept.
    """
    for name in [name for name in case.query if name.lower().endswith("cursor")]:
        del case.query[name]
    if isinstance(labels := case.query.get("label"), list) and all(isinstance(each, str) for each in labels):
        by_name = {each.partition("=")[0]: each for each in reversed(labels)}
        case.query["label"] = list(reversed(by_name.values()))
    case.headers.pop("Last-Event-ID", None)
    if not isinstance(case.body, dict):
        return
    for body in case.body.get("instances", [case.body]):
        if case.operation.path.endswith(("/instances", "/batch", "/restart-or-create")):
            body["params"] = {"order_id": "42", "cents": 1999}
    if case.operation.path.endswith(("/set-result", "/skip")):
        case.body["by"] = case.body.get("by") or "eve"  # no hook tells it here
    case.body.pop("runAt", None)


def has_wrong_path(case: Any) -> bool:
    """Whether what is wrong in the request is, or is also, in its path: a path of this API would make it right."""
    path = case.meta.components.get(ParameterLocation.PATH)
    return path is not None and path.mode.is_negative


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "mode",
    [
        GenerationMode.POSITIVE,
        pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.gate),  # test_hostile.py has the worst of them
    ],
    ids=lambda mode: mode.value,
)
@pytest.mark.parametrize("name", [name for name, _ in operations()])
@pytest.mark.parametrize("examples", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_the_api_answers_as_its_description_says_and_never_with_a_fault(
    shop: Shop, order: str, name: str, mode: GenerationMode, examples: int
) -> None:
    """Schemathesis: statuses, content types and bodies are those described, and none is a 5xx."""
    method, _, path = name.partition(" ")
    api = shop.client()
    if method == "GET":
        api.post(f"{order}/terminate")  # a stream of it ends, and nobody waits for it
    cases = described()[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, is_ours=st.booleans())
    def ask(case: Any, is_ours: bool) -> None:
        if is_ours and not has_wrong_path(case):  # else hardly anything would ever be found
            case.path_parameters.update({key: OURS[key] for key in case.path_parameters if key in OURS})
        if mode is GenerationMode.POSITIVE:
            make_possible(case)
        case.validate_response(case.call(app=api.app, base_url="http://testserver"))

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # there is nothing that could be wrong


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
