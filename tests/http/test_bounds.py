"""A database that goes silent while requests are open: each is answered in time, and no thread stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.http import asgi
from tests.http.asgi import ask
from tests.http.conftest import Shop
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True),
]

_MANY = 80
_ONE = "/workflows/order/instances/o-1"


@pytest.fixture(autouse=True)
def time_limits() -> None:
    """Keep the time limits of a response, which these tests are about."""


@pytest.fixture
def proxy(store_url: str) -> Iterator[FaultProxy]:
    url = sa.make_url(store_url)
    proxy = FaultProxy((url.host or "127.0.0.1", url.port or 0))
    yield proxy
    proxy.close()


@pytest.fixture
def shop(store_url: str, proxy: FaultProxy) -> Iterator[Shop]:
    url = sa.make_url(store_url).set(host="127.0.0.1", port=proxy.port)
    shop = Shop(url.render_as_string(hide_password=False))
    shop.durable.workflows["order"].create({"order_id": "o-1"}, id="o-1")
    yield shop
    proxy.set(Mode.PASS)
    shop.close()


@pytest.mark.parametrize("mode", [Mode.BLACKHOLE, Mode.HANG])
@pytest.mark.parametrize("is_warm", [True, False])
def test_each_of_many_requests_is_refused_in_time_and_so_is_the_probe(
    shop: Shop, proxy: FaultProxy, mode: Mode, is_warm: bool
) -> None:
    """Twice as many as Starlette has threads, over open connections and over new ones."""

    def hook(_: Any) -> bool:
        return True

    app = asgi(shop.durable, authorize=hook)
    others = _threads_of_requests()  # a client of an earlier test may have left one

    async def work() -> None:
        if is_warm:
            await asyncio.gather(*(ask(app, "GET", _ONE) for _ in range(20)))
        proxy.set(mode)
        many = [ask(app, "GET", _ONE) for _ in range(_MANY // 2)]
        many += [ask(app, "POST", f"{_ONE}/events", {"type": "t"}) for _ in range(_MANY // 2)]
        asked = asyncio.gather(*many)
        await asyncio.sleep(0.5)  # they have the threads now
        status, code, took = await ask(app, "GET", "/readyz")
        assert (status, code) == (503, "NOT_READY")
        assert took < 3 + 1
        answers = await asked
        assert {answer[:2] for answer in answers} == {(503, "STORE_UNAVAILABLE")}
        assert max(took for *_, took in answers) < 10 + 2
        proxy.set(Mode.PASS)
        while (await ask(app, "GET", _ONE))[0] != 200:
            pass
        assert (await ask(app, "GET", "/readyz"))[0] == 200

    asyncio.run(work())
    until("no thread waits", lambda: not _threads_of_requests() - others, 10)


def _threads_of_requests() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("AnyIO")}
