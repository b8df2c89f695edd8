"""Limits with real workers. A server outside of them counts its callers: it says what runs at once, not our tables."""

from __future__ import annotations

import bisect
import os
import random
import select
import signal
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, REDIS_IN_GATE, Site

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(120)]


class Server(socketserver.ThreadingTCPServer):
    """Answers a caller after a while, or when the test wants, and remembers how many called at once."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Caller)
        self.lock, self.may_answer = threading.Lock(), threading.Event()
        self.now: dict[str, int] = {}
        self.most, self.called = 0, list[str]()
        self.seconds, self.started, self.superseded = 0.05, list[float](), 0

    @property
    def port(self) -> int:
        return self.server_address[1]


class Caller(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        name, pid = self.rfile.readline().decode().split()
        caller = int(pid)
        with server.lock:
            server.superseded += name in server.now and is_alive(server.now[name])
            server.now = {each: other for each, other in server.now.items() if is_alive(other)} | {name: caller}
            server.called.append(name)
            server.started.append(time.monotonic())
            server.most = max(server.most, len(server.now))
        try:
            server.may_answer.wait(60) or pytest.fail("nobody let the server answer")
            # The others have time to call, if they may. A caller that dies closes its connection.
            is_dead = bool(select.select([self.connection], [], [], server.seconds)[0])
            self.leave(name, caller)
            if not is_dead:
                self.wfile.write(name.encode())
        finally:
            self.leave(name, caller)

    def leave(self, name: str, caller: int) -> None:
        server = self.server
        assert isinstance(server, Server)
        with server.lock:
            if server.now.get(name) == caller:
                del server.now[name]


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that was killed, and not yet waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def holds(site: Site) -> int:
    with site.engine.connect() as connection:
        return connection.execute(sa.text("SELECT count(*) FROM workflow_hold")).scalar_one()


def seconds_after_the_lease(site: Site) -> float:
    """How long ago the lease of the claim ended that has held a limit for longest."""
    h, i = (getattr(site.durable.internals.store.tables, name).c for name in ("hold", "instance"))
    query = sa.select(sa.func.min(i.lease_until)).where(i.id == h.instance_pk, i.claim_token == h.token)
    with site.engine.connect() as connection:
        until_us = connection.execute(query.where(h.state == "held")).scalar()
    return float("-inf") if until_us is None else time.time() - until_us / 1_000_000


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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@REDIS_AND_POSTGRESQL
def test_a_limit_holds_while_processes_and_workers_are_killed(site_with: Callable[..., Site], server: Server) -> None:
    """A call that runs beside its own successor had lost its lease: it is counted apart.

    solid_queue#761 had 11 at once under a limit of 1, and in #546 a killed worker kept its place for ever.
    """
    length, dice = float(os.environ.get("DURABLE_KILL_SECONDS", "30")), random.Random(7)
    site = site_with(durable_lease_seconds=4.0, durable_max_crashes=1000)
    server.seconds = 0.1
    server.may_answer.set()
    site.beat(wait=False)
    workers = [site.worker(concurrency=4) for _ in range(2)]
    ends, kills = time.monotonic() + length, {"process": 0, "worker": 0}
    kill_at, late = time.monotonic() + 2, float("-inf")
    while time.monotonic() < ends:
        if len(site.instances) - len(server.called) < 20:
            site.create("crowd", server.port)
        late = max(late, seconds_after_the_lease(site))
        if time.monotonic() < kill_at:
            time.sleep(0.05)
            continue
        kill_at, number = time.monotonic() + 2, dice.randrange(2)
        pool = workers[number].children()
        if pool and dice.random() < 0.7:
            os.kill(dice.choice(pool), signal.SIGKILL)
            kills["process"] += 1
        else:
            os.killpg(workers[number].pid, signal.SIGKILL)
            workers[number] = site.worker(concurrency=4, wait=False)
            kills["worker"] += 1
    site.finish(reruns=None)
    print(f"killed {kills}, {len(server.called)} calls of {len(site.instances)} runs, at most {server.most} at once,")
    print(
        f"{server.superseded} calls beside a successor; a dead holder kept its place for {late:.3f} s after its lease"
    )
    assert min(kills.values()) > 0
    assert server.most == 3
    assert {instance.id for instance in site.instances} == set(server.called)
    until("no hold", lambda: holds(site) == 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@REDIS_AND_POSTGRESQL
def test_a_rate_is_kept_by_eight_processes(site: Site, server: Server) -> None:
    rate, runs = 90, 1000
    server.seconds = 0.0
    site.beat(wait=False)
    for _ in range(runs):
        site.create("paced", server.port)
    server.may_answer.set()
    for _ in range(2):
        site.worker(concurrency=4)
    site.finish()
    at = sorted(server.started)
    windows = [bisect.bisect_right(at, each + 1) - first for first, each in enumerate(at)]
    print("starts in each second:", sorted(Counter(int(each - at[0]) for each in at).items()))
    print(f"at most {max(windows)} in any second; use of the rate {runs / (at[-1] - at[0]) / rate:.2f}")
    assert len(at) == runs
    assert max(windows) <= 1.5 * rate
    until("no hold", lambda: holds(site) == 0)
