"""Following an instance: server-sent events, long polls; what waits holds neither a thread nor a connection."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.testclient import TestClient

from celery_durable import RedactionContext, Step, WorkflowEvent
from celery_durable.http import asgi, timeouts
from tests.http.conftest import Shop


def messages(text: str) -> list[tuple[str, str, Any]]:
    """(id, event, data) of each message."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"])))
    return found


def told(text: str) -> list[tuple[str, str]]:
    words = {"step": ("stepKey", "status"), "log": ("message", "level"), "status": ("status",), "end": ("status",)}
    return [(kind, " ".join(data[key] for key in words[kind])) for _, kind, data in messages(text) if kind]


@pytest.fixture
def ended(shop: Shop, api: TestClient, order: str) -> str:
    api.post(f"{order}/events", json={"type": "approval", "payload": {"by": "eve"}})
    shop.work()
    return order


# --- what is told -------------------------------------------------------------------------------


def test_a_stream_of_what_has_ended_tells_all_and_ends(api: TestClient, ended: str) -> None:
    answer = api.get(f"{ended}/stream")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith("retry: 2000\n\n")
    assert told(answer.text) == [
        ("log", "order received info"),
        ("log", "order received info"),  # a replay's
        ("log", "decided warn"),
        ("step", "charge completed"),
        ("step", "await approval completed"),
        ("step", "ship completed"),
        ("end", "complete"),
    ]
    *_, (_, _, end) = messages(answer.text)
    assert end == {"status": "complete", "output": "shipped"}
    (_, _, charge) = next(message for message in messages(answer.text) if message[1] == "step")
    assert charge["result"] == {"cents": 1999, "card": "4242"}


def test_a_client_that_comes_again_goes_on_where_it_was(api: TestClient, ended: str) -> None:
    all_ = messages(api.get(f"{ended}/stream").text)
    for position, (id_, _, _) in enumerate(all_[:-1]):
        rest = messages(api.get(f"{ended}/stream", headers={"Last-Event-ID": id_}).text)
        assert rest == all_[position + 1 :]
    over = api.get(f"{ended}/stream", headers={"Last-Event-ID": all_[-1][0]})
    assert (over.status_code, over.content) == (204, b"")  # a browser comes no more


def test_after_a_restart_a_client_gets_the_new_run_from_its_beginning(shop: Shop, api: TestClient, ended: str) -> None:
    last = messages(api.get(f"{ended}/stream").text)[-1][0]
    api.post(f"{ended}/restart")
    api.post(f"{ended}/terminate")
    again = told(api.get(f"{ended}/stream", headers={"Last-Event-ID": last}).text)
    assert again == [("end", "terminated")]
    prior = told(api.get(f"{ended}/stream", params={"runNumber": 1}).text)
    assert prior[-1] == ("end", "complete")
    assert api.get(f"{ended}/stream", params={"runNumber": 3}).json()["code"] == "RUN_NOT_FOUND"


def test_a_long_history_is_told_in_order_and_once(shop: Shop, api: TestClient) -> None:
    api.post("/workflows/count/instances", json={"id": "c-1", "params": 230})
    shop.work()
    found = told(api.get("/workflows/count/instances/c-1/stream").text)
    assert [word for kind, word in found if kind == "step"] == [f"step {number} completed" for number in range(230)]
    assert [word for kind, word in found if kind == "log"] == [f"line {number} debug" for number in range(230)]


# --- live ---------------------------------------------------------------------------------------


@pytest.fixture
def site(shop: Shop) -> Iterator[str]:
    """A real server on a thread; answers with its URL."""
    config = uvicorn.Config(asgi(shop.durable, allow_anonymous=True), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the server ended before it began"
        assert time.monotonic() < end, "the server did not begin"
        time.sleep(0.01)
    (port,) = [sock.getsockname()[1] for each in server.servers for sock in each.sockets]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_a_stream_tells_what_happens_while_it_happens(shop: Shop, site: str, order: str) -> None:
    with httpx2.Client(base_url=site, timeout=20) as client, client.stream("GET", f"{order}/stream") as answer:
        lines = answer.iter_lines()
        seen = [next(line for line in lines if line.startswith("event: ")) for _ in range(4)]
        assert seen == ["event: log", "event: step", "event: step", "event: status"]
        client.post(f"{order}/events", json={"type": "approval", "payload": 1})
        shop.work()
        rest = "\n".join(lines)
    steps = [word for kind, word in told(rest) if kind == "step"]
    assert steps[-2:] == ["await approval completed", "ship completed"]
    assert told(rest)[-1] == ("end", "complete")


def test_a_stream_ends_with_its_run_also_if_another_run_follows(site: str, order: str) -> None:
    with httpx2.Client(base_url=site, timeout=10) as client, client.stream("GET", f"{order}/stream") as answer:
        lines = answer.iter_lines()
        assert "event: status" in lines
        client.post(f"{order}/restart")
        rest = told("\n".join(lines))
    assert rest == [("end", "terminated")]


def test_a_branch_that_is_recorded_after_a_later_step_is_told_too(shop: Shop, site: str) -> None:
    @shop.durable.workflow(name="late")
    def late(event: WorkflowEvent[Any], step: Step) -> None:
        branch = step.submit("branch", lambda: None)
        step.do("later", lambda: None)
        step.wait_for_event("approval", "approval")
        branch.result()

    late.create(id="l-1")
    shop.work()
    path = "/workflows/late/instances/l-1"
    with httpx2.Client(base_url=site, timeout=20) as client, client.stream("GET", f"{path}/stream") as answer:
        lines = answer.iter_lines()
        assert [next(line for line in lines if line.startswith("event: ")) for _ in range(3)][-1] == "event: status"
        client.post(f"{path}/events", json={"type": "approval"})
        shop.work()
        rest = told("\n".join(lines))
    assert [word for kind, word in rest if kind == "step"][-2:] == ["branch completed", "approval completed"]


def test_a_step_that_was_open_is_told_again_to_a_client_that_comes_again(site: str, order: str) -> None:
    def begin(**headers: str) -> list[tuple[str, str, Any]]:
        """What comes up to the status."""
        found: list[str] = []
        with (
            httpx2.Client(base_url=site, timeout=20) as client,
            client.stream("GET", f"{order}/stream", headers=headers) as answer,
        ):
            for line in answer.iter_lines():
                found.append(line)
                if line.startswith('data: {"status":"waiting"}'):
                    return messages("\n".join(found))
        raise AssertionError(found)

    first = begin()
    assert [(kind, data.get("stepKey")) for _, kind, data in first] == [
        ("log", None), ("step", "charge"), ("step", "await approval"), ("status", None),
    ]  # fmt: skip
    again = begin(**{"Last-Event-ID": first[-1][0]})
    assert [(kind, data.get("stepKey")) for _, kind, data in again] == [("step", "await approval"), ("status", None)]


def test_a_long_poll_answers_when_the_instance_changes_and_when_it_ends(shop: Shop, site: str, order: str) -> None:
    with httpx2.Client(base_url=site, timeout=20) as client:
        before = client.get(order)
        started = time.monotonic()
        same = client.get(order, params={"wait": 0.2}, headers={"If-None-Match": before.headers["etag"]})
        assert (same.status_code, time.monotonic() - started > 0.15) == (304, True)
        threading.Timer(0.1, lambda: httpx2.post(f"{site}{order}/pause")).start()
        changed = client.get(order, params={"wait": 20}, headers={"If-None-Match": before.headers["etag"]})
        assert changed.json()["details"] == {"status": "paused"}
        threading.Timer(0.1, lambda: httpx2.post(f"{site}{order}/terminate")).start()
        assert client.get(order, params={"wait": 20}).json()["details"] == {"status": "terminated"}
        assert time.monotonic() - started < 15
        assert client.get(order, params={"wait": 61}).status_code == 400


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_those_who_wait_hold_neither_a_thread_nor_a_connection(shop: Shop, site: str, order: str) -> None:
    """More than the pool and the thread pool have: were one held, the request in the middle would not be answered."""

    async def crowd() -> list[int]:
        limits = httpx2.Limits(max_connections=200)
        async with (
            httpx2.AsyncClient(base_url=site, timeout=30, limits=limits) as client,
            streams(client, f"{order}/stream", 60),
        ):
            polls = [asyncio.create_task(client.get(order, params={"wait": 30})) for _ in range(60)]
            await asyncio.sleep(0.5)
            started = time.monotonic()
            assert (await client.get(order)).status_code == 200
            assert time.monotonic() - started < 25  # it did not wait until the polls end
            await client.post(f"{order}/terminate")
            return [(await poll).status_code for poll in polls]

    store = shop.durable.internals.store
    assert asyncio.run(crowd()) == [200] * 60
    assert store.engine.pool.checkedout() == len(store._connections._idle)


def test_a_long_poll_may_wait_longer_than_requests_have(
    shop: Shop, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are of each look, not of what goes by between two."""
    monkeypatch.setattr(timeouts, "_DATABASE_SECONDS", 0.8)
    monkeypatch.setattr(timeouts, "_ANSWER_SECONDS", 1.0)
    api, before = shop.client(), time.monotonic()
    assert api.get(order, params={"wait": 2}).json()["details"] == {"status": "waiting"}
    assert time.monotonic() - before > 1.0


def test_followers_leave_the_threads_to_all_other_requests(shop: Shop, api: TestClient) -> None:
    """More instances are followed than there are threads, and none of the looks ends; followers may be told to wait."""
    held, looking = threading.Event(), threading.Semaphore(0)
    paths = [f"/workflows/order/instances/o-{number}" for number in range(20)]
    for path in paths:
        made = {"id": path.rpartition("/")[2], "params": {"order_id": "42", "cents": 1999}}
        assert api.post("/workflows/order/instances", json=made).status_code == 201
    shop.work()

    def redact(value: Any, shown: RedactionContext) -> Any:
        looking.release()
        held.wait(60)
        return value

    shop.durable.internals.redact, app = redact, asgi(shop.durable, allow_anonymous=True)

    async def crowd() -> list[int]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
            followers = [asyncio.create_task(client.get(f"{path}/stream")) for path in paths]
            try:
                assert await asyncio.to_thread(looking.acquire, timeout=30)
                for _ in range(30):
                    assert (await client.get("/workflows")).status_code == 200
            finally:
                held.set()
                for path in paths:
                    assert (await client.post(f"{path}/terminate")).status_code == 200
            return [(await follower).status_code for follower in followers]

    assert set(asyncio.run(crowd())) <= {200, 503}


@asynccontextmanager
async def streams(client: httpx2.AsyncClient, path: str, count: int) -> AsyncIterator[None]:
    async def follow() -> None:
        async with client.stream("GET", path) as answer:
            async for _ in answer.aiter_lines():
                pass

    followers = [asyncio.create_task(follow()) for _ in range(count)]
    yield
    for follower in followers:
        await follower
