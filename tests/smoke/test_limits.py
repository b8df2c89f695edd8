"""Limits with real workers. A server outside of them counts its callers: it says what runs at once, not our tables."""

from __future__ import annotations

import os
import signal
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from tests.smoke.proc import until
from tests.smoke.site import REDIS_IN_GATE, Site

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(120)]


class Server(socketserver.ThreadingTCPServer):
    """Answers a caller after a while, or when the test wants, and remembers how many called at once."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Caller)
        self.lock, self.may_answer = threading.Lock(), threading.Event()
        self.now: dict[str, int] = {}
        self.most, self.called = 0, list[str]()

    @property
    def port(self) -> int:
        return self.server_address[1]


class Caller(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        name, pid = self.rfile.readline().decode().split()
        with server.lock:
            server.now[name] = int(pid)
            server.called.append(name)
            server.most = max(server.most, len(server.now))
        try:
            server.may_answer.wait(60) or pytest.fail("nobody let the server answer")
            threading.Event().wait(0.05)  # the others have time to call, if they may
            with server.lock:
                del server.now[name]
            self.wfile.write(name.encode())
        finally:
            server.now.pop(name, None)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def holds(site: Site) -> int:
    with site.engine.connect() as connection:
        return connection.execute(sa.text("SELECT count(*) FROM workflow_hold")).scalar_one()


@REDIS_IN_GATE
def test_two_processes_hold_a_limit_of_one_after_each_other(site: Site, server: Server) -> None:
    site.beat(wait=False)
    instances = [site.create("metered", server.port) for _ in range(8)]
    site.worker()
    until("one call, and seven that wait", lambda: len(server.called) == 1 and holds(site) == 8)
    server.may_answer.set()
    for instance in instances:
        assert instance.result("30 seconds") == instance.id
    assert server.most == 1
    assert sorted(server.called) == sorted(instance.id for instance in instances)
    assert holds(site) == 0
    site.finish()


@REDIS_IN_GATE
def test_the_limit_of_a_killed_process_is_free_soon(site_with: Callable[..., Site], server: Server) -> None:
    site = site_with(durable_lease_seconds=2.0)
    site.beat(wait=False)
    site.worker()
    first = site.create("metered", server.port)
    until("a call", lambda: server.called == [first.id])
    second = site.create("metered", server.port)
    until("one that waits", lambda: holds(site) == 2)
    os.kill(server.now[first.id], signal.SIGKILL)
    server.may_answer.set()
    assert second.result("30 seconds") == second.id
    assert first.result("30 seconds") == first.id
    assert holds(site) == 0
    site.finish()
