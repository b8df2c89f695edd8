"""The connections that a store keeps and that its threads share; a forked child opens its own."""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import RunRef
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.connections import IDLE_SECONDS, MAX_KEPT
from celery_durable.store.runs import claims, step_rows
from tests.store.world import World, commit_in, step
from tests.support.lost_connections import kill, session_id

# --- kept connections ---------------------------------------------------------------------------

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


def get_session(world: World) -> int:
    return world.store.run_statement(lambda tx: session_id(tx.conn))


@contextmanager
def taken(world: World, count: int) -> Iterator[set[int]]:
    """So many connections in use by threads, which return them at the end."""
    connections = world.store._connections
    used = [connections.take_or_open(math.inf) for _ in range(count)]
    yield {session_id(each.conn) for each in used}
    for each in used:
        each.conn.rollback()
        connections.keep(each)


@on_servers
def test_threads_that_use_the_store_one_after_the_other_share_a_connection(world: World) -> None:
    first = get_session(world)
    assert {world.start(lambda: get_session(world)).result() for _ in range(3)} == {first}
    assert world.store.read(lambda tx: session_id(tx.conn)) == first
    assert world.start(lambda: world.store.transact(lambda tx: session_id(tx.conn))).result() == first


@on_servers
def test_threads_that_use_the_store_at_the_same_time_have_a_connection_each(world: World) -> None:
    first = get_session(world)
    with taken(world, 3) as sessions:
        assert first in sessions
        assert len(sessions) == 3
        assert get_session(world) not in sessions


@on_servers
def test_a_process_keeps_some_connections(world: World) -> None:
    """If more threads use the database at the same time, the pool has the others."""
    for _ in range(2):
        with taken(world, MAX_KEPT + 3):
            pass
        assert len(world.store._connections._idle) == MAX_KEPT
        assert world.store.engine.pool.checkedout() == MAX_KEPT


@on_servers
def test_the_kept_connections_that_are_not_needed_become_idle(world: World) -> None:
    """The one that was used last is used next, so the others are closed after a minute."""
    with taken(world, 3):
        pass
    connections = world.store._connections
    last_used = [each.last_used_at for each in connections._idle]
    assert last_used == sorted(last_used)
    session = get_session(world)
    assert {get_session(world) for _ in range(3)} == {session}
    connections._idle[-1].last_used_at += 2 * IDLE_SECONDS
    connections.close_idle(last_used[-1] + IDLE_SECONDS + 1)
    assert len(connections._idle) == 1
    assert get_session(world) == session


@on_servers
def test_a_lost_connection_closes_the_other_kept_ones(world: World) -> None:
    """They are lost as well if the server has restarted: each would cost a statement whose outcome is unknown."""
    with taken(world, 3) as sessions:
        pass
    kept = get_session(world)
    kill(world.store, kept)
    tries: list[int] = []

    def work(tx: Tx) -> int:
        tries.append(1)
        return session_id(tx.conn)

    assert world.store.run_statement(work) not in sessions
    assert len(tries) == 2


@on_servers
def test_a_kept_connection_is_refused_by_the_listeners_of_its_pool(world: World) -> None:
    """Django's engine refuses those to a database that a test runner has replaced."""
    before, refused = get_session(world), [True]

    @sa.event.listens_for(world.store.engine, "checkout")
    def refuse(*_: Any) -> None:
        if refused and refused.pop():
            raise sa.exc.DisconnectionError

    assert get_session(world) != before
    assert refused == []


@on_servers
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
            commit_in(tx, claim, write)
            return "worked"
        victim = session_id(tx.conn)
        if when == "after":
            commit_in(tx, claim, write)
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


@on_servers
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
    watching = sa.create_engine(world.store.engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with watching.connect() as connection:  # in a transaction, PostgreSQL would repeat the first answer
        while connection.exec_driver_sql(f"SELECT 1 FROM pg_stat_activity WHERE pid = {kept}").first():
            pass  # a session takes a moment to end


# --- forks --------------------------------------------------------------------------------------


@contextmanager
def kept_connection(store: Store) -> Iterator[sa.Connection]:
    """A connection that a store keeps between its uses, on every database."""
    kept = store._connections.take_or_open(math.inf)
    yield kept.conn
    kept.conn.rollback()
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
    child = multiprocessing.get_context("fork").Process(target=gc.collect, args=(1,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert questions() == before + 2  # the one in it, and its rollback


def _child(store: Store, ref: RunRef, n: int) -> None:
    gc.collect(1)  # what this test left behind and does not hold goes now, and must not speak to the server
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
    """MariaDB's isolation level is set back over the network, and SQLAlchemy lets the driver's error out of it.

    The store does that with connections of the application's engine.
    """
    guest = Store(engine=sa.create_engine(store.engine.url), schema=store.schema, prefix=store.prefix)
    dialect = guest.engine.dialect
    real = dialect.reset_isolation_level
    lost = [True]

    def reset(connection: Any) -> None:
        if lost and lost.pop():
            raise dialect.loaded_dbapi.OperationalError(2013, "Lost connection to MySQL server during query")
        real(connection)

    monkeypatch.setattr(dialect, "reset_isolation_level", reset)
    assert guest.read(lambda tx: tx.execute(sa.select(sa.literal(7))).scalar_one()) == 7
    assert lost == []
    assert guest.engine.pool.checkedout() == 0
    guest.engine.dispose()
