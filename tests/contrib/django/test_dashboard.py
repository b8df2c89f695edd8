"""The dashboard at an address of Django: sessions, permissions, WSGI and ASGI."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.test import AsyncClient, Client

from celery_durable.model import Status
from celery_durable.testing import DurableHarness
from tests.contrib.django.site import log_in, site, users
from tests.contrib.django.workflows import wait

__all__ = ["site", "users"]

INSTANCE = "/durable/workflows/wait/instances/a"
pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture
def waiting(site: DurableHarness, alias: str) -> DurableHarness:
    site.create(wait, alias, id="a")
    site.run_until_idle()
    return site


def submit(client: Client, page: str, action: str) -> Any:
    token = re.search(r'name="token" value="(\w+)"', page)[1]
    return post(client, action, token)


def post(client: Client, action: str, token: str) -> Any:
    sent = f"token={token}"
    form = "application/x-www-form-urlencoded"
    return client.post(action, sent, content_type=form, headers={"Sec-Fetch-Site": "same-origin"})


def test_pages_show_and_change_what_the_permissions_allow(waiting: DurableHarness) -> None:
    client = log_in("view_instance", "pause_instance")
    page = client.get("/durable/instances").content.decode()
    assert f'href="{INSTANCE}"' in page
    page = client.get(INSTANCE).content.decode()
    assert f'action="{INSTANCE}/pause"' in page
    assert f'action="{INSTANCE}/terminate"' not in page
    assert submit(client, page, f"{INSTANCE}/pause")["Location"] == INSTANCE
    assert wait.get("a").status().status is Status.PAUSED
    assert submit(client, page, f"{INSTANCE}/terminate").status_code == 403
    style = re.search(r'href="(/durable/static/[^"]*style.css)"', page)[1]
    assert client.get(style)["Content-Type"].startswith("text/css")


def test_visitors_are_sent_to_the_login(waiting: DurableHarness) -> None:
    answer = Client().get("/durable/instances?where=workflow%3Dwait")
    assert answer.status_code == 302
    assert answer["Location"] == "/admin/login/?next=/durable/instances%3Fwhere%3Dworkflow%253Dwait"
    assert log_in().get("/durable/instances").status_code == 403


def test_a_change_needs_the_token_of_the_page(waiting: DurableHarness) -> None:
    client = log_in("view_instance", "pause_instance")
    client.get(INSTANCE)
    assert post(client, f"{INSTANCE}/pause", "0" * 32).status_code == 403
    assert wait.get("a").status().status is Status.WAITING


def test_under_asgi_a_page_follows_its_instance(waiting: DurableHarness) -> None:
    session = log_in("view_instance").cookies[settings.SESSION_COOKIE_NAME].value

    async def follow() -> list[str]:
        client = AsyncClient()
        client.cookies[settings.SESSION_COOKIE_NAME] = session
        assert INSTANCE in (await client.get("/durable/instances")).content.decode()
        assert f'data-stream="{INSTANCE}/stream"' in (await client.get(INSTANCE)).content.decode()
        response: Any = await client.get(f"{INSTANCE}/stream")
        assert (response.status_code, response["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        parts = aiter(response.streaming_content)
        seen = [(await anext(parts)).decode()]
        wait.get("a").send_event("answer", "yes")
        await sync_to_async(waiting.run_until_idle)()
        while "event: end" not in seen[-1]:
            seen.append((await anext(parts)).decode())
        await sync_to_async(response.close)()
        return seen

    assert any("event: step" in part for part in asyncio.run(follow()))


def test_under_wsgi_no_stream_holds_a_thread(waiting: DurableHarness) -> None:
    client = log_in("view_instance")
    assert "data-stream" not in client.get(INSTANCE).content.decode()
    assert client.get(f"{INSTANCE}/stream").status_code == 501
