"""docs/reference/http.md: its commands are run against its own application, and its tables are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from celery_durable.app import Durable
from celery_durable.definitions import SHARED
from celery_durable.http import Access, asgi
from celery_durable.wire.responses import STATUS
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "reference" / "http.md"
TEXT = PAGE.read_text()


@pytest.fixture
def database() -> str:
    return "sqlite"


@pytest.fixture
def page(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The page's first block, over a database of the test; messages run at once."""
    monkeypatch.setattr(SHARED, "_definitions", dict(SHARED._definitions))
    code = blocks(PAGE, "python")[0].text.replace("postgresql+psycopg://shop@localhost/shop", store_url)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code.replace('broker="redis://localhost:6379/0"', "set_as_current=False"), str(PAGE), "exec"), names)
    names["app"].conf.task_always_eager = True
    names["app"].conf.broker_url = "memory://"
    yield names
    names["durable"].close()


def ask(api: TestClient, line: str) -> Any:
    program, *words = shlex.split(line)
    assert program == "curl"
    method, headers, body, url = "GET", {}, None, ""
    while words:
        match words.pop(0):
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "--json":
                method, body = "POST", json.loads(words.pop(0))
            case "-X":
                method = words.pop(0)
            case "-N":
                pass
            case url:
                pass
    parts = urlsplit(f"http://{url}")
    assert parts.netloc == "localhost:8000"
    return api.request(method, f"{parts.path}?{parts.query}", headers=headers, json=body)


def test_the_commands_of_the_page_work_and_answer_as_it_says(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = TestClient(page["site"])
    answers: list[Any] = []
    for language, text in re.findall(r"^```(sh|json)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        if language == "json":
            wanted, found = json.loads(text), answers[-1].json()
            if "accepted" in wanted:
                found["status"] = wanted["status"]  # here the worker comes at once
            assert found == wanted
            continue
        for line in text.splitlines():
            if line.startswith("export "):
                monkeypatch.setenv(*line.removeprefix("export ").split("="))
                continue
            if line == "uvicorn shop:site":
                continue
            answers.append(ask(api, line))
            assert answers[-1].status_code < 300, (line, answers[-1].text)
            assert ask(api, line.replace("sesame", "sesam")).status_code == 401
    assert len(answers) == 9
    listed, waited, history, published, stream, explained, _ = answers[2:]
    assert [item["id"] for item in listed.json()["instances"]] == ["order-42"]
    assert waited.json()["details"] == {"status": "complete", "output": "shipped"}
    assert history.json()["events"][0]["payload"] == {"by": "eve"}
    assert published.json() == {"runNumber": 1, "published": {}}
    assert "event: end" in stream.text
    assert explained.json()["code"] == "DONE"


def test_the_table_of_permissions_is_that_of_the_routing_table() -> None:
    rows = re.findall(r"^\| (\w+) \| (`(?:GET|POST|PATCH) .+`) \|$", TEXT, re.MULTILINE)
    told = {route: right for right, routes in rows for route in re.findall(r"`((?:GET|POST|PATCH) \S+)`", routes)}
    rights: dict[str, str] = {}

    def hook(access: Access) -> bool:
        rights[f"{access.request.method} {access.request.scope['path']}"] = access.permission.value
        return False

    app = asgi(Durable(), authorize=hook, tick=True)
    api = TestClient(app)
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            api.request(method.upper(), path)
    assert told == rights


def test_the_table_of_codes_is_that_of_the_description() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (`[A-Z_]+`.*) \|$", TEXT, re.MULTILINE)
    told = {code: int(status) for status, codes in rows for code in re.findall(r"`([A-Z_]+)`", codes)}
    assert told == STATUS
