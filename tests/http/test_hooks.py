"""Hooks of the application that hang, and the hook that the docs show."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable.http import Access, Authorize, Permission, asgi, timeouts
from tests.docs.blocks import ROOT
from tests.http.asgi import ask
from tests.http.conftest import Shop
from tests.http.test_routes import refused


@pytest.mark.parametrize("hooks", ["one", "of each right"])
def test_hooks_that_hang_hold_up_no_probe(shop: Shop, monkeypatch: pytest.MonkeyPatch, hooks: str) -> None:
    monkeypatch.setattr(timeouts, "HOOK_SECONDS", 60)
    has_hung, may_return = threading.Event(), threading.Event()

    def hang(access: Access) -> bool:
        if access.permission is not Permission.HEALTH:
            has_hung.set()
            may_return.wait(60)
        return True

    app = asgi(shop.durable, authorize=hang if hooks == "one" else Authorize(reading=hang, health=lambda _: True))

    async def work() -> None:
        hanging = [asyncio.create_task(ask(app, "GET", "/workflows")) for _ in range(200)]
        try:
            await asyncio.to_thread(has_hung.wait)
            assert (await ask(app, "GET", "/healthz"))[0] == 200
            assert not any(each.done() for each in hanging)
        finally:
            may_return.set()
        assert {status for status, *_ in await asyncio.gather(*hanging)} == {200}

    asyncio.run(work())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hook_that_does_not_return_refuses(shop: Shop, monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    monkeypatch.setattr(timeouts, "HOOK_SECONDS", 0.2)
    may_return = threading.Event()

    def hang(_: Access) -> bool:
        return may_return.wait(60)

    async def hang_too(_: Access) -> bool:
        await asyncio.sleep(60)
        return True

    api = shop.client(authorize=hang_too if is_async else hang)
    answer = api.get("/workflows")
    may_return.set()
    assert refused(answer, 503, "HOOK_TIMEOUT") == "A hook of the application did not return in time. Try again later."
    assert answer.headers["retry-after"] == "2"


def test_the_documented_hook_refuses_any_wrong_key(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "sesame")
    text = (ROOT / "docs" / "reference" / "http.md").read_text()
    start = text.index("def digest(")
    source = text[start : text.index("site = FastAPI()", start)]
    names: dict[str, Any] = {}
    head = "import os\nfrom hashlib import sha256\nfrom hmac import compare_digest\n"
    exec(head + "from celery_durable.http import Access, Unauthenticated\n" + source, names)
    api: TestClient = shop.client(authorize=names["with_key"])
    for key in (b"sesame", b"s\xe9same", "sésame".encode(), b"\xff", b""):
        answer = api.get("/workflows", headers={b"X-Api-Key": key})
        assert answer.status_code == (200 if key == b"sesame" else 401), key
