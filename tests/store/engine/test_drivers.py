"""The drivers besides psycopg and PyMySQL: what they do differently, through each that is installed here.

All of the tests run through them with DURABLE_TEST_POSTGRESQL_URL=postgresql+psycopg2://... and
DURABLE_TEST_MARIADB_URL=mysql+mysqldb://...
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import multiprocessing
import ssl
import sys
import weakref
from collections.abc import Iterator

import pymysql
import pytest
import sqlalchemy as sa

from celery_durable.errors import StoreUnavailable
from celery_durable.model import to_us
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.store.engine.time_limits import Timeouts
from tests.conftest import MovableRuntime
from tests.runner.test_no_writes import read_only
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.store.world import World, seconds
from tests.support.services import missing_tool

MODULES = {"psycopg": "psycopg", "psycopg2": "psycopg2", "pymysql": "pymysql", "mysqldb": "MySQLdb"}
ON_POSTGRESQL = [("postgresql", "psycopg"), ("postgresql", "psycopg2")]
ON_MARIADB = [("mariadb", "pymysql"), ("mariadb", "mysqldb")]
DRIVERS = pytest.mark.parametrize(("database", "driver"), ON_POSTGRESQL + ON_MARIADB, indirect=["database"])
COPIES = 10
"""Nine shifts of 5,000,000 are negative in 32 bits."""


@pytest.fixture
def url(store_url: str, driver: str) -> sa.URL:
    spec = importlib.util.find_spec(MODULES[driver])
    if spec is None or spec.name != MODULES[driver]:  # PyMySQL stands in for MySQLdb in the tests with Django
        missing_tool(driver)
    url = sa.make_url(store_url)
    return url.set(drivername=f"{url.get_backend_name()}+{driver}")


@pytest.fixture
def driven(url: sa.URL) -> Iterator[Store]:
    store = Store(url, runtime=MovableRuntime())
    yield store
    store.close()


@DRIVERS
def test_the_age_of_a_message_with_many_copies_is_compared_in_64_bits(driven: Store) -> None:
    """psycopg2 writes a bare number, and PostgreSQL shifts 5,000,000 in 32 bits: no age at all, with ten copies."""
    world, i = World(driven), driven.tables.instance
    ref = world.create()
    sent = {"sent_at": to_us(world.now - seconds(60)), "dispatch_count": COPIES}
    with driven.engine.begin() as connection:
        connection.execute(sa.update(i).where(i.c.instance_id == ref.instance_id).values(**sent))
    assert world.take_lost_runs(empty=world.now - seconds(3)) == []
    world.close()


@DRIVERS
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_close_the_connections_of_its_parents_pool(driven: Store) -> None:
    """mysqlclient sends QUIT for what is collected, and the parent's next statement found the server gone."""
    with driven.engine.connect() as connection:
        held = weakref.ref(connection.connection.driver_connection)
        before = _session(connection)

    def child() -> None:
        gc.collect()
        sys.exit(held() is None)

    proc = multiprocessing.get_context("fork").Process(target=child)
    proc.start()
    proc.join(20)
    assert proc.exitcode == 0
    with driven.engine.connect() as connection:
        assert _session(connection) == before


@DRIVERS
def test_a_statement_to_a_silent_server_times_out(driven: Store, url: sa.URL) -> None:
    assert url.host is not None
    proxy = FaultProxy((url.host, url.port or {"postgresql": 5432}.get(url.get_backend_name(), 3306)))
    store = Store(url.set(host="127.0.0.1", port=proxy.port), runtime=Runtime())
    try:
        assert store.run_statement(lambda tx: tx.conn.scalar(sa.select(1))) == 1
        proxy.set(Mode.BLACKHOLE)
        with pytest.raises(StoreUnavailable):
            store.run_statement(lambda tx: tx.conn.scalar(sa.select(1)), timeouts=Timeouts(0.4, 0.4))
        proxy.set(Mode.PASS)
        assert store.run_statement(lambda tx: tx.conn.scalar(sa.select(1))) == 1
    finally:
        store.close()
        proxy.close()


@pytest.mark.parametrize(("database", "driver"), ON_POSTGRESQL, indirect=["database"])
def test_a_read_only_server_is_logged_in_one_line(driven: Store, caplog: pytest.LogCaptureFixture) -> None:
    world = World(driven)
    with read_only(driven.engine.url.set(drivername="postgresql+psycopg")), caplog.at_level(logging.WARNING):
        driven._connections.reconnect()
        with pytest.raises(StoreUnavailable, match="read-only transaction"):
            world.create()
    assert "The database takes no writes now: cannot execute INSERT in a read-only transaction" in caplog.messages
    world.close()


def _session(connection: sa.Connection) -> int:
    query = "SELECT pg_backend_pid()" if connection.dialect.name == "postgresql" else "SELECT connection_id()"
    return int(connection.exec_driver_sql(query).scalar_one())


@pytest.mark.parametrize(("database", "driver"), [("mariadb", "pymysql")], indirect=["database"])
def test_connections_of_pymysql_share_a_tls_context(url: sa.URL, monkeypatch) -> None:
    """PyMySQL reads all certificates of the system for each connection: 30 ms of CPU."""
    calls: list[int] = []
    load = ssl.SSLContext.load_default_certs
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *args: calls.append(1) or load(*args))
    with contextlib.closing(Store(url)) as first, contextlib.closing(Store(url)) as second:
        for store in (first, second):
            with store.engine.connect() as one, store.engine.connect() as other:
                drivers = [each.connection.driver_connection for each in (one, other)]
                assert drivers[0].ctx is drivers[1].ctx
    assert len(calls) <= 1  # none if an earlier test has connected
    assert type(drivers[0])(ssl_verify_cert=True, defer_connect=True).ctx is not drivers[0].ctx


@pytest.mark.parametrize(("database", "driver"), [("mariadb", "pymysql")], indirect=["database"])
def test_a_wrapped_connect_of_pymysql_is_called(url: sa.URL, monkeypatch) -> None:
    """Tools that trace statements wrap it."""
    calls: list[str] = []
    connect = pymysql.connect
    monkeypatch.setattr(pymysql, "connect", lambda **options: calls.append(options["host"]) or connect(**options))
    with contextlib.closing(Store(url)) as store, store.engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1
    assert calls == [url.host]
