"""How many connections a process has, and for how long."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.runtime import real_monotonic
from celery_durable.store.engine import Store, Tx, drivers
from celery_durable.store.engine.connections import IDLE_SECONDS, MAX_KEPT, _close_idle_connections
from tests.support.lost_connections import session_id

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def one(tx: Tx) -> int:
    return session_id(tx.conn)


@on_servers
def test_a_thread_that_advances_runs_uses_one_connection(store: Store) -> None:
    """Single statements, transactions, reads, and the sessions of its steps; the second is for renewing leases."""
    ids = {
        store.run_statement(one),
        store.transact(one),
        store.read(one),
        store.transact_once(one),
    }
    session = store.sessions.open()
    ids.add(session_id(session.connection()))
    type(session).close(session)
    ids |= {store.run_statement(one), store.transact(one)}
    assert len(ids) == 1
    assert store.engine.pool.checkedout() == 1


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_mariadb_is_asked_for_the_statements_and_their_end_alone(store: Store) -> None:
    """A connection of the pool would get another rollback when it is returned, and more if it was in autocommit."""

    def count_questions(tx: Tx) -> int:
        return int(tx.conn.exec_driver_sql("SHOW SESSION STATUS LIKE 'Questions'").one()[1])

    counts = [run(count_questions) for run in [store.transact, store.read] * 3]
    assert [later - earlier for earlier, later in itertools.pairwise(counts)] == [2] * 5


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_read_of_mariadb_leaves_no_transaction_open(store: Store) -> None:
    """Each of its statements sees what was committed before it, and its locks end with the read."""

    def count_rows(tx: Tx) -> int:
        return int(tx.conn.exec_driver_sql(f"SELECT count(*) FROM {store.prefix}some_rows").scalar_one())

    def read_twice(tx: Tx) -> list[int]:
        before = count_rows(tx)
        change(f"INSERT INTO {store.prefix}some_rows VALUES (1)")
        return [before, count_rows(tx)]

    def change(sql: str) -> None:
        with changing.begin() as connection:
            connection.exec_driver_sql("SET lock_wait_timeout = 1")
            connection.exec_driver_sql(sql)

    changing = sa.create_engine(store.engine.url, poolclass=sa.NullPool)
    change(f"CREATE TABLE {store.prefix}some_rows (id INTEGER)")
    try:
        assert store.read(read_twice) == [0, 1]
    finally:
        change(f"DROP TABLE {store.prefix}some_rows")  # it would wait for the transaction that has read it


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_many_threads_use_a_file_of_sqlite_at_the_same_time(store: Store) -> None:
    """SQLAlchemy's own pool would let the sixteenth wait."""
    all_connected = threading.Barrier(MAX_KEPT + 3)

    def work(tx: Tx) -> int:
        all_connected.wait(30)
        return int(tx.conn.execute(sa.text("SELECT 1")).scalar_one())

    with ThreadPoolExecutor(MAX_KEPT + 3) as threads:
        assert sum(threads.map(store.read, [work] * (MAX_KEPT + 3))) == MAX_KEPT + 3


def test_connections_to_servers_are_closed_after_a_minute_and_those_to_sqlite_stay_open(store: Store) -> None:
    assert store.read(lambda tx: tx.conn.execute(sa.text("SELECT 1")).scalar_one()) == 1
    _close_idle_connections(real_monotonic() + IDLE_SECONDS + 1)  # as the watchdog's thread does
    assert len(store._connections._idle) == (1 if store.database.has_one_writer else 0)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_sqlite_compiles_its_statements_once(store: Store) -> None:
    """A pragma makes it compile all statements of its connection again; SQLAlchemy sends one for AUTOCOMMIT."""
    sent: list[str] = []

    def watched(tx: Tx) -> int:
        driver: Any = tx.conn.connection.driver_connection
        driver.set_trace_callback(sent.append)
        return int(tx.conn.execute(sa.text("SELECT 1")).scalar_one())

    for _ in range(2):
        assert store.read(watched) == store.transact(watched) == 1
    assert set(sent) == {"SELECT 1", "BEGIN IMMEDIATE", "COMMIT"}


def test_a_commit_of_sqlite_waits_for_the_disk(tmp_path: Path) -> None:
    """Outside of the tests, which change the module."""
    spec = importlib.util.find_spec(drivers.__name__)
    assert spec is not None
    assert spec.loader is not None
    unchanged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchanged)
    with contextlib.closing(sqlite3.connect(tmp_path / "durable.sqlite3")) as connection:
        unchanged._configure_sqlite(connection, None)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


@on_servers
def test_threads_that_take_turns_use_the_same_connections(store: Store) -> None:
    """As many as a worker's threads or a web server's usually are."""
    ids: list[int] = []
    all_connected = threading.Barrier(16)

    def work(tx: Tx) -> None:
        ids.append(one(tx))
        all_connected.wait(10)

    for _ in range(2):
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(store.transact, [work] * 16))
    assert len(ids) == 32
    assert len(set(ids)) == 16


@on_servers
def test_a_process_with_many_threads_keeps_40_connections_at_most(store: Store) -> None:
    """Of 45 that were used at the same time, the pool closes those that it has no room for."""
    all_connected = threading.Barrier(45)

    def work(tx: Tx) -> int:
        all_connected.wait(30)
        return one(tx)

    with ThreadPoolExecutor(45) as threads:
        assert len(set(threads.map(store.transact, [work] * 45))) == 45
    pool = store.engine.pool
    assert isinstance(pool, sa.QueuePool)
    assert pool.checkedout() == MAX_KEPT
    assert pool.checkedin() == pool.size() == 20


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_kept_connection_that_had_a_transaction_is_in_autocommit_again(store: Store) -> None:
    store.run_statement(one)
    with pytest.raises(ZeroDivisionError):
        store.transact(lambda _: 1 / 0)
    for _ in range(2):
        assert len(set(store.transact(transactions))) == 1
        assert len(set(store.run_statement(transactions))) == 2


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_kept_connection_does_not_grow_with_its_transactions(store: Store) -> None:
    """SQLAlchemy collects what it has to undo at the connection's return to its pool, which may be days later."""
    store.run_statement(one)

    def count_callbacks(tx: Tx) -> int:
        pooled: Any = tx.conn.connection
        return len(pooled._connection_record.finalize_callback)

    before = store.run_statement(count_callbacks)
    assert [store.transact(count_callbacks) for _ in range(3)] == [before] * 3


def transactions(tx: Tx) -> list[str]:
    """In which transactions two statements are."""
    return [tx.conn.exec_driver_sql("SELECT pg_current_xact_id()::text").scalar_one() for _ in range(2)]


def idle(store: Store) -> None:
    """What the watchdog's thread does when a minute has passed."""
    store._connections.close_idle(real_monotonic() + IDLE_SECONDS + 1)


def has_ended(store: Store, session: int) -> bool:
    query = (
        f"SELECT count(*) FROM pg_stat_activity WHERE pid = {session}"
        if store.database.name == "postgresql"
        else f"SELECT count(*) FROM information_schema.processlist WHERE id = {session}"
    )
    watching = sa.create_engine(store.engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with watching.connect() as connection:  # in a transaction, PostgreSQL would repeat the first answer
        while connection.exec_driver_sql(query).scalar_one():
            pass  # a session takes a moment to end
    return True


@on_servers
@pytest.mark.parametrize("single", [True, False])
def test_a_connection_that_is_idle_for_a_minute_is_closed_and_reopened_on_demand(store: Store, single: bool) -> None:
    before = (store.run_statement if single else store.transact)(one)
    store._connections.close_idle(real_monotonic())
    assert (store.run_statement if single else store.transact)(one) == before
    idle(store)
    assert has_ended(store, before)
    assert (store.run_statement if single else store.transact)(one) != before


@on_servers
def test_a_pool_in_use_is_closed_when_its_connection_has_been_returned(store: Store) -> None:
    ids: list[int] = []

    def work(tx: Tx) -> None:
        ids.append(session_id(tx.conn))
        idle(store)
        assert session_id(tx.conn) == ids[0]

    store.transact(work)
    assert store.transact(one) == ids[0]
    idle(store)
    assert has_ended(store, ids[0])


@on_servers
def test_a_connection_that_a_migration_uses_for_minutes_is_closed_afterwards(store: Store) -> None:
    """Migrations use the engine itself. A pool that was replaced meanwhile would never close their connection."""
    store.transact(one)
    with store.engine.connect() as connection:
        session = session_id(connection)
        idle(store)
    idle(store)
    gc.collect()
    assert has_ended(store, session)


@on_servers
def test_a_connection_in_use_is_closed_later_although_its_pool_was_replaced(store: Store) -> None:
    ids: list[int] = []

    def work(tx: Tx) -> None:
        ids.append(session_id(tx.conn))
        store.engine.dispose()
        assert session_id(tx.conn) == ids[0]

    store.transact(work)
    idle(store)
    assert has_ended(store, ids[0])


@on_servers
def test_connections_of_the_applications_engine_are_not_closed(store: Store) -> None:
    engine = sa.create_engine(store.engine.url, pool_size=1, max_overflow=0)
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        shared = Store(engine=engine)
        ways: list[Callable[[], int]] = [
            lambda: shared.run_statement(one),
            lambda: shared.transact(one),
            lambda: shared.read(one),
        ]
        ids = {way() for way in ways}
        assert engine.pool.checkedout() == 0
        idle(shared)
        assert {way() for way in ways} == ids
        assert len(ids) == 1
