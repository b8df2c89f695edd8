"""What a run publishes, over HTTP: read while a body runs, redacted, authorised as reading, told by the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import RedactionContext, Step, WorkflowEvent
from tests.http.conftest import Shop
from tests.http.test_stream import messages

HALF = {"value": {"done": 5, "total": 10}, "updatedAt": "2030-01-01T00:00:00Z"}
PATH = "/workflows/pack/instances/p-1"


class Packing:
    """An instance p-1 whose body stands still half way and before its end, on a worker of its own."""

    def __init__(self, shop: Shop) -> None:
        shop.clock.monotonic = lambda: shop.clock.now_us / 1e6
        self.is_half_way, self.goes_on, self.may_end = threading.Event(), threading.Event(), threading.Event()

        def pack(step: Step) -> None:
            step.publish("progress", {"done": 5, "total": 10})
            step.publish("box no", "secret 7")
            self.is_half_way.set()
            assert self.goes_on.wait(60)
            shop.clock.advance(1)
            step.publish("progress", {"done": 10, "total": 10})
            assert self.may_end.wait(60)

        @shop.durable.workflow(name="pack")
        def packing(event: WorkflowEvent[Any], step: Step) -> str:
            step.do("pack", pack, step)
            return "packed"

        packing.create(id="p-1")
        self._worker = threading.Thread(target=shop.work)
        self._worker.start()
        assert self.is_half_way.wait(60)

    def end(self) -> None:
        self.goes_on.set()
        self.may_end.set()
        self._worker.join()


@pytest.fixture
def packing(shop: Shop) -> Iterator[Packing]:
    packing = Packing(shop)
    yield packing
    packing.end()


def test_values_are_read_while_a_body_runs_and_after_the_end(packing: Packing, api: TestClient) -> None:
    before = {"progress": HALF, "box no": HALF | {"value": "secret 7"}}
    assert api.get(f"{PATH}/published").json() == {"runNumber": 1, "published": before}
    packing.end()
    after = api.get(f"{PATH}/published", params={"runNumber": 1}).json()["published"]
    assert after["progress"] == {"value": {"done": 10, "total": 10}, "updatedAt": "2030-01-01T00:00:01Z"}


def test_a_new_value_ends_a_long_poll(packing: Packing, api: TestClient) -> None:
    known = api.get(PATH).headers["etag"]
    threading.Timer(0.1, packing.goes_on.set).start()
    assert api.get(PATH, params={"wait": 20}, headers={"If-None-Match": known}).status_code == 200
    assert not packing.may_end.is_set()
    assert api.get(f"{PATH}/published").json()["published"]["progress"]["value"]["done"] == 10


def test_an_instance_that_has_published_nothing_has_no_values(api: TestClient, order: str) -> None:
    assert api.get(f"{order}/published").json() == {"runNumber": 1, "published": {}}
    assert api.get(f"{order}/published", params={"runNumber": 2}).json()["code"] == "RUN_NOT_FOUND"
    assert api.get("/workflows/order/instances/none/published").json()["code"] == "INSTANCE_NOT_FOUND"


def test_values_pass_the_redaction_hook(shop: Shop, packing: Packing) -> None:
    seen: list[RedactionContext] = []

    def redact(value: Any, shown: RedactionContext) -> Any:
        if shown.kind == "published":
            seen.append(shown)
        return "[secret]" if shown.name == "box no" else value

    shop.durable.internals.redact, client = redact, shop.client()
    found = client.get(f"{PATH}/published").json()["published"]
    assert {key: each["value"] for key, each in found.items()} == {"progress": HALF["value"], "box no": "[secret]"}
    assert sorted(seen, key=lambda each: each.name) == [
        RedactionContext("published", "pack", "p-1", "box no"),
        RedactionContext("published", "pack", "p-1", "progress"),
    ]
    packing.end()
    assert "secret 7" not in client.get(f"{PATH}/stream").text


def test_the_stream_tells_each_value_as_it_comes(shop: Shop, packing: Packing, api: TestClient) -> None:
    def go_on_when_it_is_shown(value: Any, shown: RedactionContext) -> Any:
        if shown.name == "progress":
            (packing.goes_on if value["done"] == 5 else packing.may_end).set()
        return value

    shop.durable.internals.redact = go_on_when_it_is_shown
    text = shop.client().get(f"{PATH}/stream").text
    values = [data for _, kind, data in messages(text) if kind == "published"]
    at = HALF["updatedAt"]
    assert [each for each in values if each["key"] == "box no"] == [
        {"key": "box no", "value": "secret 7", "updatedAt": at}
    ]
    progress = [each["value"]["done"] for each in values if each["key"] == "progress"]
    assert progress == [5, 10]
    rest = [kind for _, kind, _ in messages(text) if kind != "published"]
    assert rest == ["status", "step", "end"]
    again = api.get(f"{PATH}/stream", headers={"Last-Event-ID": messages(text)[-2][0]}).text
    assert [kind for _, kind, _ in messages(again)] == ["published", "published", "end"]
