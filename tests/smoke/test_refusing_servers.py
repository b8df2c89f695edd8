"""Servers that answer and refuse: a Redis that loads its data, a database that takes no writes, a disk that is full.

Each is named, refuses a request in time, fails no step, and is forgotten when it is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from fastapi.testclient import TestClient

from celery_durable.errors import StoreUnavailable
from celery_durable.http import asgi
from celery_durable.store.engine import server_info
from tests.smoke import flows
from tests.smoke.conftest import close
from tests.smoke.proc import MariadbServer, PostgresqlCluster, RedisServer, until
from tests.smoke.site import POSTGRESQL, Site
from tests.support.services import missing

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

MakeSite = Callable[..., Site]
KEYS, BYTES = 100_000, 200
LEASE_SECONDS = 3.0
_SMALL_BYTES = 32 * 1024 * 1024


# --- Redis loads its data -----------------------------------------------------------------------


@pytest.fixture
def reloaded_redis(tmp_path: Path, sites: list[Site]) -> Iterator[RedisServer]:
    """A Redis that can be told to load its data, slowly."""
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    slowly = ("--loading-process-events-interval-bytes", "1024", "--dir", str(tmp_path))
    server = RedisServer(tmp_path, "--enable-debug-command", "local", *slowly)
    yield server
    close(sites)
    server.proc.clean_up()


@contextlib.contextmanager
def loading(server: RedisServer) -> Iterator[None]:
    """Redis answers LOADING to all, on open connections and new ones; afterwards it has what it had."""
    with redis.Redis(port=server.port) as client, redis.Redis(port=server.port) as reloading:
        client.mset({f"ballast-{number}": os.urandom(BYTES) for number in range(KEYS)})
        client.config_set("key-load-delay", 20_000)  # microseconds; between hundreds of keys it answers
        loads = threading.Thread(target=reloading.execute_command, args=("DEBUG", "RELOAD"))
        loads.start()

        def is_loading() -> bool:
            try:
                client.get("ballast-1")
            except redis.exceptions.BusyLoadingError:
                return True
            return False

        try:
            until("Redis loads", is_loading, 20)
            yield
        finally:
            client.config_set("key-load-delay", 0)
            loads.join(30)


@POSTGRESQL
def test_a_redis_that_loads_its_data_is_named_and_waited_for(
    make_site: MakeSite, reloaded_redis: RedisServer, store_url: str
) -> None:
    site = make_site(reloaded_redis.url, store_url)
    beat, worker = site.beat(), site.worker()
    assert site.create("chain", {"steps": 1}).result("60 seconds") == [0]
    with loading(reloaded_redis):
        site.create("chain", {"steps": 2})
        site.create("nap", 0.2)
        beat.wait_for_log(
            "The broker .* takes no messages; due work is published .*Redis is loading the dataset",
            30,
        )
        until("the heartbeat says so", lambda: "Redis is loading" in str(errors(site)), 30)
    site.finish()
    until("the heartbeat says that it is over", lambda: errors(site) == [], 30)
    assert worker.is_running


def errors(site: Site) -> list[str]:
    heartbeat = site.durable.internals.store.tables.heartbeat.c
    with site.engine.connect() as connection:
        return list(connection.execute(sa.select(heartbeat.outages).where(heartbeat.outages.is_not(None))).scalars())


# --- the database takes no writes ---------------------------------------------------------------


class Refused(Site):
    """All but the test itself work as a user who is refused."""

    detoured = ("worker", "beat")


@contextlib.contextmanager
def served(site: Site) -> Iterator[Any]:
    """The HTTP API of a process of its own user."""
    app = flows.build(dataclasses.replace(site.config, role="web"))
    durable = vars(app)["durable"]
    try:
        yield TestClient(asgi(durable, allow_anonymous=True), raise_server_exceptions=False)
    finally:
        durable.close()
        app.close()


def post(api: Any, params: Any = None, workflow: str = "chain") -> Any:
    return api.post(f"/workflows/{workflow}/instances", json={"params": params or {"steps": 1}})


@pytest.mark.parametrize("own_database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_mariadb_that_is_read_only_is_named_and_waited_for(
    make_site: MakeSite, own_database: MariadbServer, broker_url: str
) -> None:
    """Its user has no SUPER, as at every host of databases."""
    root = sa.create_engine(own_database.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    def say(*statements: str) -> None:
        with root.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    say("CREATE USER app@'%%' IDENTIFIED BY 'app'", "GRANT ALL PRIVILEGES ON test.* TO app@'%%'")
    url = sa.make_url(own_database.url).set(username="app", password="app").render_as_string(hide_password=False)
    site = make_site(broker_url, url, bodies_url=own_database.url, kind=Refused, durable_lease_seconds=LEASE_SECONDS)
    beat, worker = site.beat(), site.worker()
    held = site.create("chain", {"steps": 4, "hold": 1})
    site.wait_for_body(held, "plain 1")
    with served(site) as api:
        assert post(api).status_code == 201
        say("SET GLOBAL read_only = 1")
        refused = post(api)
        assert (refused.status_code, refused.json()["code"]) == (503, "STORE_UNAVAILABLE")
        assert api.get("/workflows/chain/instances").status_code == 200
        site.let_go()
        worker.wait_for_log("The database takes no writes now: .*--read-only")
        site.create("nap", 0.2)  # by the user who may
        beat.wait_for_log("The database takes no writes now: .*--read-only")
        say("SET GLOBAL read_only = 0")
        until("the API takes requests", lambda: post(api).status_code == 201, 30)
    assert held.result("60 seconds") == [0, 1, 2, 3]
    site.finish(reruns=None)
    root.dispose()
    assert "failed" not in {step.status for step in held.history().steps}


@pytest.fixture
def small_disk(own_database: PostgresqlCluster, sites: list[Site]) -> Iterator[Path]:
    """Where the database's tables are: a file system of 32 MiB, apart from the server's log."""
    folder = own_database.folder / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED ON A FULL DISK: only root may mount a small one")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_BYTES},mode=0777", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=20).returncode != 0:
        pytest.skip("NOT TESTED ON A FULL DISK: a small one may not be mounted here")
    try:
        tables = folder / "tables"
        tables.mkdir()
        shutil.chown(tables, "postgres")
        engine = sa.create_engine(own_database.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE TABLESPACE small LOCATION '{tables}'")
            connection.exec_driver_sql("ALTER DATABASE postgres SET default_tablespace = small")
        yield folder
        close(sites)
        own_database.stop()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.mark.parametrize("own_database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_disk_that_is_full_is_named_and_waited_for(
    make_site: MakeSite, own_database: PostgresqlCluster, small_disk: Path, broker_url: str
) -> None:
    site = make_site(broker_url, own_database.url, durable_lease_seconds=LEASE_SECONDS)
    beat, worker = site.beat(), site.worker()
    site.create("chain", {"steps": 2})
    with served(site) as api:
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as full:
            while True:
                full.write(b"x" * 4096)
                full.flush()
        text = "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=100_000))
        answers = []

        def is_refused() -> bool:
            answers.append(post(api, {"steps": 1, "text": text}))
            return bool(answers[-1].status_code != 201)

        until("the disk is full", is_refused, 60)
        assert (answers[-1].status_code, answers[-1].json()["code"]) == (503, "STORE_UNAVAILABLE")
        for number in range(40):  # pages that have room still take rows
            with contextlib.suppress(StoreUnavailable):
                site.create("chain", {"steps": 20}, id=f"c-{number}")
        worker.wait_for_log("The database takes no writes now: .*No space left on device")
        ballast.unlink()
        until("the API takes requests", lambda: post(api).status_code == 201, 30)
    site.finish(reruns=None)
    assert worker.is_running
    assert beat.is_running
    assert not server_info.read_server_info(site.durable.internals.store).is_read_only
