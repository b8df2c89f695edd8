"""Clients that generators make of the description talk to a live server."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from celery_durable.http.__main__ import text
from tests.http.conftest import Shop
from tests.http.test_stream import site  # noqa: F401  # a fixture

pytestmark = pytest.mark.slow


def generate(*words: str) -> None:
    program = Path(sys.executable).parent / words[0]
    made = subprocess.run([program, *words[1:]], check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.fixture
def description(tmp_path: Path) -> str:
    path = tmp_path / "openapi.json"
    path.write_text(text())
    return str(path)


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("durable_client", "durable_models")]:
        del sys.modules[name]


def test_the_client_of_openapi_python_client_works(
    shop: Shop,
    order: str,
    site: str,  # noqa: F811
    importing: Path,
    description: str,
) -> None:
    options = ("--meta", "none", "--output-path", str(importing / "durable_client"))
    generate("openapi-python-client", "generate", "--path", description, *options)
    client = importlib.import_module("durable_client").Client(base_url=site, raise_on_unexpected_status=True)
    models = importlib.import_module("durable_client.models")

    def call(name: str, *path: str, **options: Any) -> Any:
        module = importlib.import_module(f"durable_client.api.workflows.durable_{name}")
        return module.sync(*path, client=client, **options)

    made = call("create", "order", body=models.CreateInstance.from_dict({"id": "o-2", "params": {"order_id": "7"}}))
    assert (made.id, made.details.status) == ("o-2", "active")
    shop.work()
    assert call("get", "order", "o-2").details.status == "waiting"
    assert [step.status for step in call("history", "order", "o-2").steps] == ["completed", "waiting"]
    assert call("explain", "order", "o-2").code == "WAITING_EVENT"
    sent = models.SendEvent.from_dict({"type": "approval", "payload": {"by": "eve"}})
    assert call("send_event", "order", "o-2", body=sent).accepted is True
    assert {item.id for item in call("list_instances", "order").instances} == {"o-1", "o-2"}
    refused = call("get", "order", "o-9")
    assert (refused.status, refused.code) == (404, models.ProblemCode.INSTANCE_NOT_FOUND)
    client.get_httpx_client().close()


def test_the_models_of_datamodel_codegen_read_what_the_server_says(
    shop: Shop,
    order: str,
    site: str,  # noqa: F811
    importing: Path,
    description: str,
) -> None:
    output = importing / "durable_models.py"
    options = ("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel", "--output", str(output))
    generate("datamodel-codegen", "--input", description, *options)
    models = importlib.import_module("durable_models")
    for path, name in (
        ("/workflows", "WorkflowList"),
        ("/workflows/order/instances", "InstanceList"),
        (order, "InstanceDetails"),
        (f"{order}/history?includeRun=true&includeLogs=true", "HistoryResponse"),
        (f"{order}/explain", "Diagnosis"),
        (f"{order}/published", "PublishedValues"),
        ("/workflows/order/instances/o-9", "Problem"),
        ("/topics/news/waiters", "WaiterList"),
        ("/healthz", "Healthy"),
    ):
        said = httpx2.get(f"{site}{path}").json()
        read = getattr(models, name).model_validate(said)
        assert json.loads(read.model_dump_json(by_alias=True, exclude_unset=True)).keys() == said.keys()


def test_no_enum_of_the_description_has_members_that_differ_in_case_alone() -> None:
    schemas = json.loads(text())["components"]["schemas"]
    enums = {name: schema["enum"] for name, schema in schemas.items() if "enum" in schema}
    assert {"StepState", "Status", "ProblemCode"} <= enums.keys()
    for name, members in enums.items():
        assert len({member.lower() for member in members}) == len(members), name
