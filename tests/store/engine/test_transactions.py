"""Store.transact: repetition, commits in doubt, killed connections, lost races, lock timeouts."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import sqlalchemy as sa
from celery.exceptions import SoftTimeLimitExceeded

from celery_durable.errors import StoreUnavailable, Superseded
from celery_durable.model import RunRef
from celery_durable.store.engine import Store, Tx, time_limits
from celery_durable.store.engine.statements import CompiledStatement
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances
from tests.store.world import GRACE, World, commit_in, step
from tests.support.lost_connections import cut_commit, kill, session_id

SERVERS = ["postgresql", "mariadb"]
servers_only = pytest.mark.parametrize("database", SERVERS, indirect=True)


# --- repetition ---------------------------------------------------------------------------------


@servers_only
def test_a_transaction_that_lost_a_deadlock_is_repeated(world: World) -> None:
    refs = [world.create("o-1"), world.create("o-2")]
    both_hold_one, tries = threading.Barrier(2, timeout=10), []

    def work(tx: Tx, order: list[RunRef]) -> str:
        tries.append(order[0].instance_id)
        for n, ref in enumerate(order):
            row = instances.lock(tx, ref.workflow, ref.instance_id)
            run_events.insert_event(tx, row, type_="a", payload="1", event_id=f"from {order[0].instance_id}")
            if n == 0 and len(tries) <= 2:
                both_hold_one.wait()
        return "done"

    rivals = [world.start(world.store.transact, lambda tx, o=o: work(tx, o)) for o in (refs, refs[::-1])]
    assert [rival.result() for rival in rivals] == ["done", "done"]
    assert len(tries) >= 3  # row locks are not fair: the loser may be first again, and lose again
    assert len(world.read_all_rows()["workflow_event"]) == 4


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_serialization_failure_is_repeated(world: World) -> None:
    ref = world.create()
    versions: list[int] = []

    def work(tx: Tx) -> int:
        if not versions:
            tx.conn.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        versions.append(instances.read(tx, ref.workflow, ref.instance_id).version)
        if len(versions) == 1:
            world.send(ref)  # another connection changes what was read
        return instances.lock(tx, ref.workflow, ref.instance_id).version

    assert world.store.transact(work) == 2
    assert versions == [1, 2]


@servers_only
def test_a_transaction_whose_lock_wait_timed_out_is_repeated(world: World) -> None:
    ref = world.create()
    tries: list[int] = []
    no_waiting = {"postgresql": "SET LOCAL lock_timeout = 10", "mariadb": "SET innodb_lock_wait_timeout = 0"}

    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        instances.lock(Tx(connection, world.store), ref.workflow, ref.instance_id)

        def work(tx: Tx) -> str:
            tries.append(1)
            if len(tries) == 3:
                transaction.rollback()
            tx.conn.exec_driver_sql(no_waiting[world.store.database.name])
            try:
                return instances.lock(tx, ref.workflow, ref.instance_id).instance_id
            finally:
                if world.store.database.name == "mariadb":
                    tx.conn.detach()  # its lock timeout is changed

        assert world.store.transact(work) == "o-1"
    assert len(tries) == 3


@servers_only
def test_a_transaction_that_never_succeeds_raises_after_the_last_try(world: World) -> None:
    tries: list[int] = []

    def work(tx: Tx) -> None:
        tries.append(1)
        _raise_serialization_failure(tx)

    with pytest.raises(StoreUnavailable):
        world.store.transact(work)
    assert len(tries) == 8


def _raise_serialization_failure(tx: Tx) -> None:
    if tx.store.database.name == "postgresql":
        tx.conn.exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    tx.conn.exec_driver_sql("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'again'")


def test_other_errors_are_raised_at_once_and_leave_nothing(world: World) -> None:
    tries: list[int] = []

    def work(tx: Tx) -> None:
        tries.append(1)
        instances.insert(tx, workflow="order", instance_id="o-1", params="{}", queue="q", grace=GRACE, commit_id="c")
        tx.conn.exec_driver_sql("SELECT nonsense")

    with pytest.raises(sa.exc.DBAPIError):
        world.store.transact(work)
    assert len(tries) == 1
    assert world.read_all_rows()["workflow_instance"] == []


# --- lost connections ---------------------------------------------------------------------------


@servers_only
def test_work_whose_connection_is_killed_is_repeated_on_another(world: World) -> None:
    ref = world.create()
    ids: list[int] = []

    def work(tx: Tx) -> bool:
        ids.append(session_id(tx.conn))
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        if len(ids) == 1:
            kill(world.store, ids[0])
        return run_events.insert_event(tx, row, type_="a", payload="1", event_id="e-1") is not None

    assert world.store.transact(work) is True
    assert len(set(ids)) == 2
    assert len(world.read_all_rows()["workflow_event"]) == 1


@servers_only
def test_a_connection_that_died_in_the_pool_is_replaced(world: World) -> None:
    ref = world.create()
    kill(world.store, world.store.transact(lambda tx: session_id(tx.conn)))
    assert world.change(ref, lambda tx, row: row.instance_id) == "o-1"
    kill(world.store, world.store.read(lambda tx: session_id(tx.conn)))
    assert world.row(ref).instance_id == "o-1"


@servers_only
@pytest.mark.parametrize("method", ["transact", "run_statement", "read"])
def test_a_pool_of_the_application_without_a_free_connection_is_an_outage(world: World, method: str) -> None:
    engine = sa.create_engine(world.store.engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    store = Store(engine=engine)
    with engine.connect(), pytest.raises(StoreUnavailable, match=r"QueuePool limit of size 1 .* timeout 0\.10"):
        getattr(store, method)(lambda tx: tx.conn.exec_driver_sql("SELECT 1"))
    engine.dispose()


@servers_only
def test_connections_that_died_in_a_shared_pool_are_replaced(world: World) -> None:
    engine = sa.create_engine(world.store.engine.url)
    store = Store(engine=engine)
    ref = world.create()

    def read(tx: Tx) -> str:
        return instances.read(tx, ref.workflow, ref.instance_id).instance_id

    for use in (store.transact, store.read, store.run_statement):
        with engine.connect() as one, engine.connect() as two:
            ids = [session_id(one), session_id(two)]
        for victim in ids:
            kill(store, victim)
        assert use(read) == "o-1"
    engine.dispose()


def _send(ref: RunRef, calls: list[str]) -> Callable[[Tx], str]:
    def work(tx: Tx) -> str:
        calls.append("work")
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        run_events.insert_event(tx, row, type_="a", payload="1", event_id=f"e-{len(calls)}")
        return "worked"

    return work


def _find_committed(ref: RunRef, calls: list[str]) -> Callable[[Tx], str | None]:
    def find_committed(tx: Tx) -> str | None:
        calls.append("find_committed")
        instances.lock(tx, ref.workflow, ref.instance_id)
        e = tx.t.event.c
        return "found" if tx.execute(sa.select(e.event_id)).first() else None

    return find_committed


@servers_only
@pytest.mark.parametrize(
    ("when", "result", "expected"),
    [("after", "found", ["work", "find_committed"]), ("before", "worked", ["work", "find_committed", "work"])],
)
def test_a_commit_in_doubt_is_resolved(world: World, when: str, result: str, expected: list[str]) -> None:
    ref = world.create()
    calls: list[str] = []
    with cut_commit(world.store, when=when) as cuts:
        assert world.store.transact(_send(ref, calls), find_committed=_find_committed(ref, calls)) == result
    assert cuts == [when]
    assert calls == expected
    assert len(world.read_all_rows()["workflow_event"]) == 1


@servers_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sessions_commit_in_doubt_is_recognized(world: World, when: str) -> None:
    ref = world.create()
    transaction = world.store.step_transactions.begin("book")
    with cut_commit(world.store, when=when), pytest.raises(Exception) as caught:
        world.store.transact_step(transaction, _send(ref, []))
    transaction.close()
    assert world.store.is_commit_in_doubt(caught.value)
    assert len(world.read_all_rows()["workflow_event"]) == (when == "after")


@servers_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_whose_outcome_cannot_be_looked_up_stays_in_doubt(world: World, when: str) -> None:
    ref = world.create()
    calls: list[str] = []

    def find_committed(tx: Tx) -> str | None:
        calls.append("find_committed")
        _raise_serialization_failure(tx)
        raise AssertionError("unreachable")

    with cut_commit(world.store, when=when), pytest.raises(StoreUnavailable, match="may have been applied") as caught:
        world.store.transact(_send(ref, calls), find_committed=find_committed)
    assert calls == ["work"] + ["find_committed"] * 8
    assert caught.value.is_in_doubt


@servers_only
@pytest.mark.parametrize("ends_with", ["refused connections", "no time"])
def test_a_commit_in_doubt_stays_so_if_no_later_try_reaches_the_server(
    world: World, monkeypatch: pytest.MonkeyPatch, ends_with: str
) -> None:
    """Without a lookup, as for create(): a later try would find what an earlier one has written."""
    ref = world.create()

    def fail_from_now_on() -> None:
        if ends_with == "no time":
            monkeypatch.setattr(time_limits, "real_monotonic", lambda: math.inf)
        else:
            monkeypatch.setattr(world.store._connections, "_checkout", refuse)

    def refuse() -> None:
        raise sa.exc.OperationalError("connect", {}, OSError("refused"), connection_invalidated=True)

    with cut_commit(world.store, when="after", then=fail_from_now_on), pytest.raises(StoreUnavailable) as caught:
        world.store.transact(_send(ref, []))
    assert caught.value.is_in_doubt
    assert "The change may have been applied" in str(caught.value)


@servers_only
def test_a_commit_is_not_in_doubt_if_a_lookup_found_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(tx: Tx) -> None:
        monkeypatch.setattr(time_limits, "real_monotonic", lambda: math.inf)

    ref = world.create()
    with cut_commit(world.store, when="before"), pytest.raises(StoreUnavailable) as caught:
        world.store.transact(_send(ref, []), find_committed=find_nothing)
    assert not caught.value.is_in_doubt


@servers_only
@pytest.mark.parametrize("method", ["transact", "run_statement", "read"])
def test_each_operation_on_an_unreachable_server_raises_the_same_error(world: World, method: str) -> None:
    store = Store(world.store.engine.url.set(port=1), runtime=world.store.runtime)
    with pytest.raises(StoreUnavailable, match=r"^The database could not do this now: .*1.* Try again in") as caught:
        getattr(store, method)(lambda tx: tx.conn.exec_driver_sql("SELECT 1"))
    assert store.is_transient(caught.value)
    assert not store.is_commit_in_doubt(caught.value)
    assert not caught.value.is_in_doubt
    assert isinstance(caught.value.__cause__, sa.exc.OperationalError)
    store.close()


# --- losing a race ------------------------------------------------------------------------------


def test_a_violated_constraint_of_the_store_raises_superseded(world: World) -> None:
    claim = world.claim(world.create())
    world.commit(claim, step())

    def work(tx: Tx) -> None:
        commit_in(tx, claim, step())

    with pytest.raises(Superseded):
        world.store.run_statement(work)
    assert len(world.steps(claim)) == 1


# --- lock timeouts ------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("prepared", [True, False], ids=["own connection", "behind a pooler"])
def test_lock_waits_are_bounded_in_every_transaction(store_url: str, prepared: bool) -> None:
    """Behind a pooler no setting of the session changes, because its connections serve other clients too."""

    def lock_timeout(tx: Tx) -> str:
        return str(tx.conn.exec_driver_sql("SHOW lock_timeout").scalar_one())

    store = Store(store_url, prepared_statements=prepared)
    try:
        session = store.sessions.open()
        in_a_step = session.execute(sa.text("SHOW lock_timeout")).scalar_one()
        store.sessions.close(session)
        in_a_transaction = store.transact(lock_timeout)
        in_a_single_statement = store.run_statement(lock_timeout)
        assert (in_a_step, in_a_transaction) == ("5s", "5s")
        assert in_a_single_statement == ("5s" if prepared else "0")
        assert store.transact(lock_timeout) == "5s"  # on the connection that the statement has left
        assert store.read(lock_timeout) == in_a_single_statement
    finally:
        store.close()


# --- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_read_that_is_interrupted_leaves_no_snapshot_on_its_connection(world: World) -> None:
    """A soft time limit may fire between a query and its rows. The exception outlives the transaction."""
    ref = world.create()

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not CompiledStatement.run.__code__:
            return None
        if event == "line" and (cursor := frame.f_locals.get("cursor")) is not None and cursor.description:
            raise SoftTimeLimitExceeded
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(SoftTimeLimitExceeded) as interrupted:
            world.store.transact(lambda tx: instances.read(tx, ref.workflow, ref.instance_id))
    finally:
        sys.settrace(before)
    other = sa.create_engine(world.store.engine.url, poolclass=sa.NullPool)
    with other.begin() as connection:
        connection.execute(sa.update(world.store.tables.instance).values(crash_count=3))
    assert world.row(ref).crash_count == 3
    assert interrupted.value.__traceback__ is not None
