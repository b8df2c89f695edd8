"""A claim is on disk before its pass starts: it is the record that a function may have started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from tests.smoke.proc import PostgresqlCluster, postgresql_programs
from tests.store.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(postgresql_programs() is None, reason="PostgreSQL's initdb and pg_ctl are not installed"),
]


@pytest.fixture
def cluster() -> Iterator[PostgresqlCluster]:
    cluster = PostgresqlCluster()
    yield cluster
    cluster.clean_up()


@pytest.fixture
def world(cluster: PostgresqlCluster) -> Iterator[World]:
    store = Store(cluster.url)
    migrate.upgrade(store)
    world = World(store)
    yield world
    world.close()
    store.close()


def stop_wal_writer(world: World) -> None:
    """Stop the process that writes to disk what no commit waits for."""
    with world.store.engine.connect() as connection:
        query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        os.kill(connection.exec_driver_sql(query).scalar_one(), signal.SIGSTOP)


def test_a_crash_of_the_server_loses_no_claim(cluster: PostgresqlCluster, world: World) -> None:
    """If it did, the attempt of a step that may run once would not be counted, and the step would run again."""
    ref = world.create()
    stop_wal_writer(world)
    claim = world.claim(ref)
    cluster.restart()
    assert world.try_claim(ref, by="task-2 host-2") is None
    assert world.row(ref).claim_token == claim.token
