"""The server for one person on this machine."""

from __future__ import annotations

import threading
import urllib.request

from celery_durable.dashboard import dashboard
from celery_durable.dashboard.local import LocalServer, OneTimeLink
from tests.dashboard.conftest import Browser
from tests.http.conftest import Shop


def test_a_link_admits_the_first_browser_only(shop: Shop) -> None:
    hook = OneTimeLink(shop.durable.internals.runtime)
    served = dashboard(shop.durable, authorize=hook)
    link = hook.make_url("/instances")
    stranger, first, second = Browser(served), Browser(served), Browser(served)
    assert stranger.get("/instances").status_code == 401
    assert stranger.get("/instances?link=" + "0" * 32).status_code == 401
    opened = first.get(link)
    assert opened.status_code == 200
    assert "link=" not in str(opened.url)
    assert opened.history[0].headers["set-cookie"].endswith("; HttpOnly; Path=/; SameSite=lax")
    assert first.get("/instances").status_code == 200
    refused = second.get(link)
    assert refused.status_code == 401
    assert "Open the link that the command printed. It works once." in refused.text


def test_the_server_stops_beside_a_page_that_follows_a_run(orders: Shop) -> None:
    server = LocalServer(orders.durable, port=0, read_only=False)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(server.link).read()
    address = server.link.partition("?")[0]
    stream = opener.open(f"{address}workflows/order/instances/o-0/stream")
    assert stream.readline().startswith(b"retry:")
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
