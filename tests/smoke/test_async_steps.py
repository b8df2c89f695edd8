"""Async steps in real workers: one client for all passes of a process, and nothing left of them."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.smoke import asking
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

PASSES = int(os.environ.get("DURABLE_TEST_PASSES", "1000"))
"""How many passes ask the server."""
AT_ONCE = PASSES // 50

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(120 + PASSES // 2)]

POOLS = {"prefork": ["--max-tasks-per-child", "10"], "threads": [], "solo": []}
# A prefork worker takes up to a second to replace a child.
CONCURRENCY = {"prefork": 8, "threads": 2, "solo": 1}


class Asked(Site):
    project = "tests.smoke.asking"
    build = staticmethod(asking.build)


class Server(ThreadingHTTPServer):
    """Answers every request, and notes the connections of each process."""

    daemon_threads = True

    def __init__(self) -> None:
        self.connections: defaultdict[str, set[int]] = defaultdict(set)
        super().__init__(("127.0.0.1", 0), Answering)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps the connection
    server: Server

    def do_GET(self) -> None:
        self.server.connections[self.headers["X-Process"]].add(self.client_address[1])
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize("pool", POOLS)
def test_one_client_serves_all_passes_of_a_process(site_with: Callable[..., Site], server: Server, pool: str) -> None:
    site = site_with(kind=Asked)
    concurrency = CONCURRENCY[pool]
    site.beat(wait=False)
    worker = site.worker("--pool", pool, *POOLS[pool], concurrency=concurrency)
    payload = {"passes": PASSES // AT_ONCE, "url": server.url}
    instances = [site.create("asks", payload) for _ in range(AT_ONCE)]
    found = [each for instance in instances for each in instance.result(f"{60 + PASSES // 2} seconds")]

    assert len(found) == PASSES // AT_ONCE * AT_ONCE
    by_process = defaultdict(list)
    for each in found:
        by_process[each["process"]].append(each)
    at_once = concurrency if pool == "threads" else 1
    for process, said in by_process.items():
        assert len({each["loop"] for each in said}) == 1
        assert max(each["tasks"] for each in said) <= at_once
        assert max(each["threads"] for each in said) <= 12
        assert len(server.connections[process]) <= at_once
        assert max(each["sockets"] for each in said) <= 24
    assert (len(by_process) > concurrency) == (pool == "prefork")
    assert not {row.attempts for instance in instances for row in instance.history().steps} - {0, 1}

    worker.terminate()
    assert closed(site) >= set(by_process)
    assert "Event loop is closed" not in worker.text()
    assert "was never awaited" not in worker.text()


def closed(site: Site) -> set[str]:
    return {path.name.partition("-")[2] for path in site.folder.glob("closed-*")}


@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize("pool", POOLS)
def test_a_timeout_cancels_an_async_function_on_every_pool(site_with: Callable[..., Site], pool: str) -> None:
    site = site_with(kind=Asked)
    site.worker("--pool", pool, concurrency=1)
    late = site.create("hangs").result("60 seconds")
    assert len(late) == 2
