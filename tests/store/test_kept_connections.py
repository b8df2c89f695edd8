"""The connections that a store keeps: one per thread for single statements; a forked child opens its own."""

from __future__ import annotations

import gc
import math
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import RunRef
from celery_durable.store import claims, step_rows
from celery_durable.store.engine import Store, Tx
from tests.store.lost_connections import kill, session_id
from tests.store.world import LEASE, World, step

# --- kept connections ---------------------------------------------------------------------------

postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@postgresql_only
def test_single_statements_of_a_thread_share_its_kept_connection(world: World) -> None:
    def id_of(tx: Tx) -> int:
        return session_id(tx.conn)

    first, second = (world.store.run_statement(id_of) for _ in range(2))
    assert first == second
    other = world.start(lambda: world.store.run_statement(id_of)).result()
    assert other != first


@postgresql_only
def test_a_thread_that_advances_no_runs_keeps_no_connection(world: World) -> None:
    """A web process has many threads, and its pool serves them all."""

    def run() -> tuple[int, bool]:
        session = world.store.run_statement(lambda tx: session_id(tx.conn), keeps_connection=False)
        return session, threading.get_ident() in world.store._connections._kept

    first, second = (world.start(run).result() for _ in range(2))
    assert first == second == (first[0], False)
    kept = world.store.run_statement(lambda tx: session_id(tx.conn))
    assert run() == (kept, True)  # a thread that has one uses it


@postgresql_only
def test_a_kept_connection_that_was_killed_is_replaced_at_the_next_use(world: World) -> None:
    ref = world.create()
    kill(world.store, world.store.run_statement(lambda tx: session_id(tx.conn)))
    claim = world.try_claim(ref)
    assert claim is not None
    kill(world.store, world.store.run_statement(lambda tx: session_id(tx.conn)))
    world.commit(claim, step())
    assert [row.step_key for row in world.steps(claim)] == ["charge"]


@postgresql_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_single_statement_in_doubt_is_resolved(world: World, when: str) -> None:
    claim = world.claim(world.create())
    write = step(result="1")
    calls: list[str] = []

    def work(tx: Tx) -> str:
        calls.append("work")
        if len(calls) > 1:
            step_rows.guard_and_write_step(tx, claim, write, lease=LEASE)
            return "worked"
        victim = session_id(tx.conn)
        if when == "after":
            step_rows.guard_and_write_step(tx, claim, write, lease=LEASE)
        kill(world.store, victim)
        session_id(tx.conn)
        raise AssertionError("unreachable")

    def find_committed(tx: Tx) -> str | None:
        calls.append("find_committed")
        assert claims.is_held(tx, claim)
        found = step_rows.find_commit(tx, claim, commit_id=write.commit_id)
        return "found" if found else None

    result = world.store.run_statement(work, find_committed=find_committed)
    assert (result, calls) == {
        "before": ("worked", ["work", "find_committed", "work"]),
        "after": ("found", ["work", "find_committed"]),
    }[when]
    assert len(world.steps(claim)) == 1


@postgresql_only
def test_interrupted_work_returns_its_kept_connection_to_the_pool(world: World) -> None:
    def work(tx: Tx) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.store.run_statement(work)
    assert world.store.engine.pool.checkedout() == 0


@postgresql_only
def test_closing_a_store_closes_the_kept_connections_of_all_threads(world: World) -> None:
    kept = world.start(lambda: world.store.run_statement(lambda tx: session_id(tx.conn))).result()
    world.store.close()
    with sa.create_engine(world.store.engine.url, poolclass=sa.NullPool).connect() as connection:
        while connection.exec_driver_sql(f"SELECT 1 FROM pg_stat_activity WHERE pid = {kept}").first():
            pass  # a session takes a moment to end


# --- forks --------------------------------------------------------------------------------------


@contextmanager
def kept_connection(store: Store) -> Iterator[sa.Connection]:
    """The connection that a thread keeps between its statements, on every database."""
    kept = store._connections.take_or_open(math.inf)
    yield kept.conn
    store._connections.keep(kept)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork_parent_and_child_use_separate_connections(store: Store) -> None:
    world = World(store)  # no thread of it has been started
    ref = world.create()
    with kept_connection(store) as conn:
        conn.exec_driver_sql("SELECT 1")
    fork = multiprocessing.get_context("fork")
    for n in range(3):
        child = fork.Process(target=_child, args=(store, ref, n))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        with kept_connection(store) as conn:
            assert conn.exec_driver_sql("SELECT 41 + 1").scalar_one() == 42
        world.send(ref, id=f"parent {n}")
    assert len(world.read_all_rows()["workflow_event"]) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_forked_child_sends_nothing_over_its_parents_connections(store: Store) -> None:
    def questions() -> int:
        with kept_connection(store) as conn:
            return int(conn.exec_driver_sql("SHOW SESSION STATUS LIKE 'Questions'").one()[1])

    before = questions()
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert questions() == before + 1


def _child(store: Store, ref: RunRef, n: int) -> None:
    gc.collect()  # whatever was inherited and is not held goes now, and must not speak to the server
    world = World(store)
    with kept_connection(store) as conn:
        assert conn.exec_driver_sql("SELECT 40 + 1").scalar_one() == 41
    world.send(ref, id=f"child {n}")
    store.close()


# --- lost at its return -------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_connection_that_is_lost_at_its_return_costs_one_more_resolve(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MariaDB's isolation level is set back over the network, and SQLAlchemy lets the driver's error out of it."""
    dialect = store.engine.dialect
    real = dialect.reset_isolation_level
    lost = [True]

    def reset(connection: Any) -> None:
        if lost and lost.pop():
            raise dialect.loaded_dbapi.OperationalError(2013, "Lost connection to MySQL server during query")
        real(connection)

    monkeypatch.setattr(dialect, "reset_isolation_level", reset)
    assert store.read(lambda tx: tx.execute(sa.select(sa.literal(7))).scalar_one()) == 7
    assert lost == []
    assert store.engine.pool.checkedout() == 0
