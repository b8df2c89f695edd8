"""The description of the API: it is the one in the repository, it is complete, and the API does what it says."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from celery_durable.http.__main__ import text
from tests.docs.blocks import ROOT
from tests.http.conftest import Shop

OURS = {"workflowName": "order", "instanceId": "o-1"}
BEYOND_SCHEMAS = [positive_data_acceptance]
"""What an id may look like is a setting, and a cursor is no text of one's own."""
FILE = ROOT / "docs" / "openapi.json"


def operations() -> list[tuple[str, dict[str, Any]]]:
    paths = json.loads(FILE.read_text())["paths"]
    return [(f"{method.upper()} {path}", about) for path, item in paths.items() for method, about in item.items()]


def test_the_description_in_the_repository_is_that_of_the_code() -> None:
    assert FILE.read_text() == text(), "the API has changed: make openapi"


@pytest.mark.parametrize(("name", "about"), operations(), ids=lambda it: it if isinstance(it, str) else "")
def test_every_operation_is_described(name: str, about: dict[str, Any]) -> None:
    assert about["summary"]
    assert about["operationId"].startswith("durable")
    assert {"400", "401", "403", "503", "default"} <= about["responses"].keys()
    assert "422" not in about["responses"]
    for status, response in about["responses"].items():
        assert response["description"]
        if status.startswith(("4", "5")):
            assert list(response["content"]) == ["application/problem+json"]
    schemas = json.loads(FILE.read_text())["components"]["schemas"]
    bodies = [about["requestBody"]] if "requestBody" in about else []
    bodies += [about["responses"][status] for status in ("200", "201") if status in about["responses"]]
    for body in bodies:
        for kind, content in body["content"].items():
            if kind == "application/json":
                assert "examples" in json.dumps(_resolved(content["schema"], schemas)), (name, content)
            else:
                assert content["example"]


def _resolved(schema: Any, schemas: Any) -> Any:
    found = [schema, *schema.get("anyOf", [])]
    return [schemas[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in found]


@functools.cache
def described() -> Any:
    return schemathesis.openapi.from_dict(json.loads(FILE.read_text()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", [name for name, _ in operations()])
def test_the_api_answers_as_its_description_says_and_never_with_a_fault(
    shop: Shop, order: str, name: str, mode: GenerationMode
) -> None:
    """Schemathesis: statuses, content types and bodies are those described, and none is a 5xx."""
    method, _, path = name.partition(" ")
    api = shop.client()
    if method == "GET":
        api.post(f"{order}/terminate")  # a stream of it ends, and nobody waits for it
    cases = described()[path][method].as_strategy(generation_mode=mode)

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases, is_ours=st.booleans())
    def ask(case: Any, is_ours: bool) -> None:
        if is_ours:  # else hardly anything would ever be found
            case.path_parameters.update({key: OURS[key] for key in case.path_parameters if key in OURS})
        case.validate_response(case.call(app=api.app, base_url="http://testserver"), excluded_checks=BEYOND_SCHEMAS)

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # there is nothing that could be wrong
