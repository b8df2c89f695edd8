"""The order example on PostgreSQL and Redis, with a real worker and a real beat, through everything that can hang.

Each fault lasts while one order is approved and another one is started. Afterwards every order has been charged once
and shipped once.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import ROOT, Proc, RedisServer, python, until

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
]

RECOVERY_SECONDS = 45.0
"""After the end of a fault; the lease of the example is 10 s here."""


class Shop:
    """The example's worker and beat behind two proxies, and a clerk who uses its command line."""

    def __init__(self, folder: Path, broker: RedisServer, database_url: str) -> None:
        self.redis = broker
        self.broker = FaultProxy(("127.0.0.1", broker.port))
        self._url = sa.make_url(database_url)
        self.database = FaultProxy((self._url.host or "", self._url.port or 5432))
        self._folder, self._orders = folder, 0
        self._engine = sa.create_engine(self._url, poolclass=sa.NullPool)
        self._drop_tables()
        broker_url = f"redis://127.0.0.1:{self.broker.port}/0"
        far = self._url.set(port=self.database.port).render_as_string(hide_password=False)
        self._direct = {
            **os.environ,
            "CELERY_BROKER_URL": broker_url,
            "DURABLE_DATABASE_URL": database_url,
            "PAYMENTS_DATABASE_URL": database_url,
            "DURABLE_LEASE_SECONDS": "10",
        }
        through = {**self._direct, "DURABLE_DATABASE_URL": far}
        self.beat = self._start("beat", through, "--schedule", str(folder / "schedule"), "--pidfile=")
        self.worker = self._start("worker", through, "--concurrency=2", "--without-gossip", "--without-mingle")
        self.worker.wait_for_log(r"ready\.")

    def _start(self, role: str, environment: dict[str, str], *options: str) -> Proc:
        argv = python("-m", "celery", "-A", "tests.smoke.shop", role, "--loglevel=INFO", *options)
        return Proc(argv, log=self._folder / f"{role}.log", env=environment)

    def close(self) -> None:
        for proc in (self.worker, self.beat):
            proc.clean_up()
        for proxy in (self.broker, self.database):
            proxy.close()
        self._drop_tables()
        self._engine.dispose()

    def _drop_tables(self) -> None:
        with self._engine.begin() as tx:
            for table in ("orders", "payment", "payment_request"):
                tx.exec_driver_sql(f"DROP TABLE IF EXISTS {table}")

    def clerk(self, command: str, order_id: str) -> None:
        """Use the example's command line; it talks to the broker through the proxy, and to the database directly."""
        argv = python("-m", "examples.order_approval", command, order_id)
        done = subprocess.run(argv, cwd=ROOT, env=self._direct, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def start_order(self) -> str:
        self._orders += 1
        self.clerk("start", f"order-{self._orders}")
        return f"order-{self._orders}"

    def states(self) -> dict[str, str]:
        """What the shop's own table says of each order."""
        with self._engine.connect() as connection:
            return {row.id: row.state for row in connection.exec_driver_sql("SELECT id, state FROM orders")}

    def is_waiting(self, order_id: str) -> bool:
        query = sa.text("SELECT status FROM workflow_instance WHERE workflow = 'order' AND instance_id = :id")
        with self._engine.connect() as connection:
            return connection.execute(query, {"id": order_id}).scalar() == "waiting"

    def until(self, what: str, look: Callable[[], bool]) -> None:
        try:
            until(what, look, RECOVERY_SECONDS)
        except AssertionError as error:
            logs = "\n".join(f"--- {proc.log.name}\n{proc.text()[-6000:]}" for proc in (self.worker, self.beat))
            raise AssertionError(f"{error}\n{self.states()}\n{logs}") from None

    def finish(self, *order_ids: str) -> None:
        """Every order gets shipped, and each effect happened once."""
        self.until("all orders are shipped", lambda: all(self.states().get(each) == "shipped" for each in order_ids))
        with self._engine.connect() as connection:
            changes = connection.exec_driver_sql("SELECT id, changes FROM orders ORDER BY id").all()
            charges = connection.exec_driver_sql("SELECT order_id, count(*) FROM payment GROUP BY order_id").all()
        assert {tuple(row) for row in changes} == {(each, 3) for each in order_ids}  # recorded, charged, shipped
        assert {tuple(row) for row in charges} == {(each, 1) for each in order_ids}


@pytest.fixture
def shop(tmp_path: Path, own_redis: RedisServer, store_url: str) -> Iterator[Shop]:
    shop = Shop(tmp_path, own_redis, store_url)
    yield shop
    shop.close()


@contextmanager
def silent(proxy: FaultProxy, mode: Mode) -> Iterator[None]:
    proxy.set(mode)
    yield
    if mode is not Mode.STALL_OLD:  # a fail-over is not undone
        proxy.set(Mode.PASS)


@contextmanager
def child_killed(shop: Shop) -> Iterator[None]:
    os.kill(shop.worker.children()[0], signal.SIGKILL)
    yield


@contextmanager
def flushed(shop: Shop) -> Iterator[None]:
    yield
    shop.redis.flush()


@contextmanager
def out_of_memory(shop: Shop) -> Iterator[None]:
    with redis.Redis(port=shop.redis.port) as client:
        client.config_set("maxmemory", "1")
        yield
        client.config_set("maxmemory", "0")


@contextmanager
def idle_clients_closed(shop: Shop) -> Iterator[None]:
    with redis.Redis(port=shop.redis.port) as client:
        client.config_set("timeout", "1")
    yield


FAULTS: dict[str, Callable[[Shop], AbstractContextManager[None]]] = {
    "broker refuses": lambda shop: silent(shop.broker, Mode.REFUSE),
    "broker hangs": lambda shop: silent(shop.broker, Mode.HANG),
    "broker swallows": lambda shop: silent(shop.broker, Mode.BLACKHOLE),
    "broker fails over": lambda shop: silent(shop.broker, Mode.STALL_OLD),
    "broker forgets": flushed,
    "broker out of memory": out_of_memory,
    "broker closes idle clients": idle_clients_closed,
    "database refuses": lambda shop: silent(shop.database, Mode.REFUSE),
    "database hangs": lambda shop: silent(shop.database, Mode.HANG),
    "database fails over": lambda shop: silent(shop.database, Mode.STALL_OLD),
    "pool process killed": child_killed,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_orders_are_shipped_once_whatever_hangs(shop: Shop, fault: str) -> None:
    first, second = shop.start_order(), shop.start_order()
    until("both wait for approval", lambda: shop.is_waiting(first) and shop.is_waiting(second))
    with FAULTS[fault](shop):
        shop.clerk("approve", first)
        third = shop.start_order()
    shop.clerk("approve", second)
    shop.until("the third waits for approval", lambda: shop.is_waiting(third))
    shop.clerk("approve", third)
    shop.finish(first, second, third)
