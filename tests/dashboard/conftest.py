"""The shop of the HTTP API's tests behind its pages, and a browser that sends forms."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable.dashboard import dashboard
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from tests.http.conftest import Shop, shop, time_limits
from tests.support.databases import on_databases
from tests.support.services import missing_tool

__all__ = ["database", "open_pages", "orders", "pages", "shop", "time_limits"]

database = on_databases("sqlite")


@pytest.fixture(autouse=True)
def checkups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the checks of the servers however long they take, and not long for workers that are not there."""
    monkeypatch.setattr("celery_durable.dashboard.checkups._FIRST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr("celery_durable.doctor.workers._PING_SECONDS", 0.01)


class Browser(TestClient):
    """A browser: it keeps cookies, says where a request comes from, and sends forms as they are on the page."""

    def open(self, path: str) -> str:
        """The text of a page."""
        response = self.get(path)
        assert response.status_code == 200, response.text
        return response.text

    def submit(self, page: str, action: str, **fields: str) -> Any:
        """Send the form of a page whose action ends with ``action``."""
        [form] = [each for each in re.findall(r"<form[^>]*>.*?</form>", page, re.DOTALL) if f'{action}"' in each]
        target = html.unescape(re.search(r'action="([^"]*)"', form)[1])
        given = dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form))
        given = {name: html.unescape(value) for name, value in given.items()} | fields
        if 'method="get"' in form:
            return self.get(target, params=given)
        return self.post(target, data=given, headers={"Sec-Fetch-Site": "same-origin"}, follow_redirects=False)


@pytest.fixture
def open_pages(shop: Shop) -> Callable[..., Browser]:
    """Makes the pages with these options, without options for everybody."""
    return lambda **options: Browser(dashboard(shop.durable, **(options or {"allow_anonymous": True})))


@pytest.fixture
def pages(open_pages: Callable[..., Browser]) -> Browser:
    return open_pages()


@pytest.fixture
def orders(shop: Shop) -> Shop:
    """Three orders that wait for their approval, and two jobs that failed."""
    for number in range(3):
        params = {"order_id": str(number), "cents": 1999}
        shop.durable.workflows["order"].create(params, id=f"o-{number}", labels={"tenant": "acme"})
    for number in range(2):
        shop.durable.workflows["bad"].create(None, id=f"b-{number}")
    shop.work()
    return shop


def beat(shop: Shop, kind: Any, **given: Any) -> None:
    """Write the heartbeat of a worker that consumes the queue, or of a dispatcher."""
    own: Any = {"swept_ago": timedelta(0)} if kind == "dispatcher" else {"queues": ["durable"]}
    own |= {"id": kind, "kind": kind, "node": f"{kind}@vm", "pid": 1, "workflows": sorted(shop.durable.workflows)}
    shop.durable.internals.store.transact(lambda tx: heartbeats.upsert(tx, HeartbeatUpdate(**(own | given))))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        missing_tool("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
