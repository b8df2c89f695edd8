"""The HTTP API at an address of Django: sessions, CSRF, permissions, and streams under ASGI."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connections
from django.test import AsyncClient, Client

from celery_durable.testing import DurableHarness
from tests.contrib.django.site import log_in, site, users
from tests.contrib.django.workflows import wait

__all__ = ["site", "users"]

INSTANCES = "/api/workflows/wait/instances"


def post(client: Client, where: str, body: Any = None) -> Any:
    return client.post(where, json.dumps(body or {}), content_type="application/json")


def test_instances_are_created_read_and_changed_by_users_with_the_permissions(site: DurableHarness) -> None:
    client = log_in("view_instance", "create_instance", "pause_instance", "send_event_instance")
    made = post(client, INSTANCES, {"id": "a", "params": "x", "labels": {"tenant": "acme"}})
    assert (made.status_code, made.json()["id"]) == (201, "a")
    site.run_until_idle()
    listed = client.get(INSTANCES, {"status": "waiting", "pageSize": 1})
    assert [each["id"] for each in listed.json()["instances"]] == ["a"]
    tag = client.get(f"{INSTANCES}/a")["ETag"]
    assert client.get(f"{INSTANCES}/a", headers={"If-None-Match": tag}).status_code == 304
    assert post(client, f"{INSTANCES}/a/pause").json() == {"ok": True}
    assert post(client, f"{INSTANCES}/a/events", {"type": "answer", "payload": "yes"}).json()["accepted"]
    assert wait.get("a").status().status == "paused"
    assert client.get(f"{INSTANCES}/nobody").json()["code"] == "INSTANCE_NOT_FOUND"
    assert client.get("/api/nowhere").status_code == 404
    assert client.put(f"{INSTANCES}/a").status_code == 405


@pytest.mark.parametrize(
    ("route", "body", "permissions"),
    [
        ("", {"id": "b"}, {"create_instance"}),
        ("/batch", {"instances": [{"id": "b"}]}, {"create_instance"}),
        ("/a/pause", None, {"pause_instance"}),
        ("/a/resume", None, {"pause_instance"}),
        ("/a/wake", None, {"pause_instance"}),
        ("/a/terminate", None, {"terminate_instance"}),
        ("/a/cancel", None, {"terminate_instance"}),
        ("/a/restart", None, {"retry_instance"}),
        ("/a/retry", None, {"retry_instance"}),
        ("/a/rewind", {"step": "answer"}, {"retry_instance"}),
        ("/a/fork", {"step": "answer", "id": "b"}, {"create_instance", "retry_instance"}),
        ("/a/restart-or-create", {}, {"create_instance", "retry_instance"}),
        ("/a/set-result", {"step": "answer", "result": "x"}, {"complete_step_instance"}),
        ("/a/skip", {"step": "answer"}, {"complete_step_instance"}),
        ("/a/events", {"type": "answer"}, {"send_event_instance"}),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_each_command_requires_its_permissions(
    site: DurableHarness, alias: str, route: str, body: Any, permissions: set[str]
) -> None:
    site.create(wait, alias, id="a")
    site.run_until_idle()
    everything = {
        "view_instance", "create_instance", "pause_instance", "retry_instance", "terminate_instance",
        "send_event_instance", "complete_step_instance",
    }  # fmt: skip
    before = wait.get("a").history()
    for each in permissions:
        refused = post(log_in(*(everything - {each})), INSTANCES + route, body)
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN"), each
    assert wait.get("a").history() == before
    assert len(wait.list().items) == 1
    allowed = post(log_in(*permissions), INSTANCES + route, body)
    assert allowed.status_code not in (401, 403), allowed.content


def test_completing_a_step_records_the_user(site: DurableHarness, alias: str) -> None:
    site.create(wait, alias, id="a")
    site.run_until_idle()
    client = log_in("complete_step_instance")
    assert post(client, f"{INSTANCES}/a/skip", {"step": "answer", "by": "somebody else"}).status_code == 200
    assert [record.by for record in wait.get("a").history().audit] == ["alice"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_requests_need_a_session_and_its_token(site: DurableHarness) -> None:
    assert Client().get(INSTANCES).json()["code"] == "UNAUTHENTICATED"
    assert log_in().get(INSTANCES).json()["code"] == "FORBIDDEN"
    log_in("create_instance")
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="alice"))
    assert post(strict, INSTANCES, {"id": "a"}).status_code == 403
    assert wait.list().items == ()
    assert log_in("view_instance").get("/api/healthz").status_code == 403


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_under_wsgi_a_stream_is_refused_with_the_remedy(site: DurableHarness, alias: str) -> None:
    site.create(wait, alias, id="a")
    site.create(wait, alias, id="stream")
    assert log_in("view_instance").get(f"{INSTANCES}/stream").json()["id"] == "stream"
    refused = log_in("view_instance").get(f"{INSTANCES}/a/stream")
    assert (refused.status_code, refused.json()["message"]) == (
        501,
        "Streams need an ASGI server. Poll the instance with ?wait= instead.",
    )


def test_under_asgi_a_stream_follows_the_instance_and_ends_with_its_client(site: DurableHarness, alias: str) -> None:
    site.create(wait, alias, id="a")
    site.run_until_idle()
    session = log_in("view_instance").cookies[settings.SESSION_COOKIE_NAME].value

    async def follow() -> list[str]:
        client = AsyncClient()
        client.cookies[settings.SESSION_COOKIE_NAME] = session
        response: Any = await client.get(f"{INSTANCES}/a/stream")
        assert (response.status_code, response["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        parts = aiter(response.streaming_content)
        seen = [(await anext(parts)).decode()]
        wait.get("a").send_event("answer", "yes")
        await sync_to_async(site.run_until_idle)()
        while "event: end" not in seen[-1]:
            seen.append((await anext(parts)).decode())
        other: Any = await client.get(f"{INSTANCES}/a/stream")
        await anext(aiter(other.streaming_content))
        running = [each for each in asyncio.all_tasks() if "Call._run" in repr(each)]
        assert running
        await sync_to_async(other.close)()
        await sync_to_async(response.close)()
        _, pending = await asyncio.wait(running, timeout=30)
        assert not pending
        refused = await client.get(f"{INSTANCES}/nobody/stream")
        assert refused.status_code == 404
        return seen

    seen = asyncio.run(follow())
    assert '"status": "complete"' in seen[-1].replace('":"', '": "')


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_atomic_requests_do_not_concern_the_api(
    site: DurableHarness, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    assert post(log_in("create_instance"), INSTANCES, {"id": "a", "params": "x"}).status_code == 201
