"""Durable in somebody else's application: it changes nothing for its host (LAW 8)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_durable.insight.explain import Code
from celery_durable.model import HEARTBEAT_INTERVAL, Status
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.host import HostConfig, build
from tests.smoke.proc import ROOT, Proc, RedisServer, python, until
from tests.smoke.site import POSTGRESQL

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

# --- workers on other pools ---------------------------------------------------------------------

POOLS = pytest.mark.parametrize("pool", ["gevent", "eventlet", "custom"])
QUEUE = "durable"


@POOLS
@POSTGRESQL
def test_a_worker_on_another_pool_does_its_own_tasks_and_answers_for_steps(
    own_redis: RedisServer, tmp_path: Path, store_url: str, procs: list[Proc], pool: str
) -> None:
    """It does not consume the queue of workflows, which a worker of the same application on prefork does."""
    config = HostConfig("host", str(tmp_path), own_redis.url, store_url)
    app = build(config)
    durable = vars(app)["durable"]
    migrate.upgrade(durable.internals.store)
    other = start_worker(config, f"--pool={pool}", "--concurrency=4", name="other")
    procs.append(other)
    sent = app.tasks["late"].delay(0.1).id
    until("its own task ran", lambda: f"end {sent}" in config.runs_so_far())
    instance = durable.workflows["errand"].create(7)
    own = durable.workflows["own"].create()
    procs += [start_worker(config, "-Q", QUEUE, "--concurrency=2", name="prefork"), start_beat(config)]
    try:
        assert instance.result("60 seconds") == 14
    except Exception as error:
        raise AssertionError("\n".join(proc.text() for proc in procs)) from error
    assert f".> {QUEUE} " not in other.text()
    until("it is said why", lambda: own.explain().code is Code.POOL_UNSUPPORTED)
    other.wait_for_log("runs no workflows; instance")
    assert own.status().status is Status.ACTIVE
    procs.append(start_worker(config, "--concurrency=1", name="plain"))
    assert own.result("60 seconds") == 1
    assert other.terminate() == 0
    assert "Traceback" not in other.text()


@POOLS
@POSTGRESQL
def test_a_worker_on_another_pool_that_is_told_to_run_workflows_is_refused(
    own_redis: RedisServer, tmp_path: Path, store_url: str, procs: list[Proc], pool: str
) -> None:
    config = HostConfig("host", str(tmp_path), own_redis.url, store_url)
    refused = start_worker(config, f"--pool={pool}", "-Q", f"celery,{QUEUE}", name="refused", wait=False)
    procs.append(refused)
    assert refused.process.wait(60) != 0
    name = {"custom": "tests.smoke.host.OwnPool"}.get(pool, pool)
    assert (
        f"This worker was told to consume queue '{QUEUE}', but celery_durable does not run workflows on the '{name}' "
        f"pool, where leases are not kept. Run workflows on a worker with -P prefork, threads or solo, or leave "
        f"'{QUEUE}' out of -Q."
    ) in refused.text()


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_database_that_hangs_does_not_hold_up_the_tasks_of_cooperative_threads(
    own_redis: RedisServer, tmp_path: Path, store_url: str, procs: list[Proc], pool: str
) -> None:
    """All of them, and our heartbeat, share one thread of the operating system."""
    url = sa.make_url(store_url)
    assert url.host is not None
    assert url.port is not None
    proxy = FaultProxy((url.host, url.port))
    through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    config = HostConfig("host", str(tmp_path), own_redis.url, through)
    app, store = build(config), Store(store_url)
    migrate.upgrade(store)
    try:
        procs.append(start_worker(config, f"--pool={pool}", "--concurrency=4"))
        until("its heartbeat is there", lambda: store.read(heartbeats.read)[1])
        proxy.set(Mode.STALL)
        end = (
            time.monotonic() + 1.5 * HEARTBEAT_INTERVAL.total_seconds()
        )  # the next is under way then, and does not end
        while time.monotonic() < end:
            id_ = app.tasks["early"].delay(0.2).id
            until("a task runs", lambda id_=id_: f"end {id_}" in config.runs_so_far(), 8)
    finally:
        proxy.close()
        store.close()


@pytest.fixture
def procs() -> Iterator[list[Proc]]:
    """Processes of a test, which are ended after it."""
    started: list[Proc] = []
    yield started
    for proc in started:
        proc.clean_up()


def start_worker(config: HostConfig, *options: str, name: str = "worker", wait: bool = True) -> Proc:
    worker = _start(config, "worker", "-n", f"{name}@smoke", *options, log=name)
    if wait:
        worker.wait_for_log(r"ready\.")
    return worker


def start_beat(config: HostConfig) -> Proc:
    return _start(config, "beat", "--schedule", f"{config.folder}/schedule", "--pidfile=", log="beat")


def _start(config: HostConfig, *argv: str, log: str) -> Proc:
    return Proc(
        python("-m", "celery", "-A", "tests.smoke.host", *argv, "--loglevel=INFO"),
        log=Path(config.folder, f"{log}.log"),
        env={
            **config.environment(),
            "PYTHONPATH": str(ROOT),
            "C_FORCE_ROOT": "1",
            "CELERY_CUSTOM_WORKER_POOL": "tests.smoke.host:OwnPool",
        },
    )
