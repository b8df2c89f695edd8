"""A database that says nothing more: what waits for it comes back in time, and what is an author's is left alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import signals
from celery_durable.errors import StoreUnavailable
from celery_durable.runtime import Runtime, real_monotonic
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.time_limits import Timeouts, limit_database_time
from celery_durable.store.runs import claims, step_rows
from celery_durable.store.watchdog import watch_socket_of
from tests.signals.conftest import hearing
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.store.world import LEASE, World, step
from tests.support.embedded import until
from tests.support.lost_connections import session_id

SHORT = Timeouts(0.5, 30.0)
ONE_TRY = Timeouts(0.4, 0.4)
"""The next try would connect, which has a timeout of its own."""
SLACK_SECONDS = 15.0
"""For machines that have other things to do. A hung read would last for ever."""

pytestmark = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@pytest.fixture
def proxy(store: Store) -> Iterator[FaultProxy]:
    url = store.engine.url
    proxy = FaultProxy((url.host or "127.0.0.1", url.port or {"postgresql": 5432}.get(url.get_backend_name(), 3306)))
    yield proxy
    proxy.close()


class Nudged(Runtime):
    """Does something at a checkpoint, once."""

    def __init__(self) -> None:
        self.at: dict[str, Callable[[], object]] = {}

    def checkpoint(self, name: str) -> None:
        self.at.pop(name, lambda: None)()


@pytest.fixture
def runtime() -> Nudged:
    return Nudged()


@pytest.fixture
def detoured(store: Store, proxy: FaultProxy, runtime: Nudged) -> Iterator[Store]:
    """The same tables, through the proxy."""
    url = store.engine.url.set(host="127.0.0.1", port=proxy.port)
    detoured = Store(url, schema=store.schema, prefix=store.prefix, runtime=runtime)
    yield detoured
    proxy.set(Mode.PASS)
    detoured.close()


def one(tx: Tx) -> int:
    return int(tx.conn.exec_driver_sql("SELECT 1").scalar_one())


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def took(work: Callable[[], object]) -> float:
    began = real_monotonic()
    work()
    return real_monotonic() - began


@pytest.mark.parametrize("mode", [Mode.BLACKHOLE, Mode.MUTE, Mode.STALL])
@pytest.mark.parametrize("single", [True, False])
def test_a_statement_without_an_answer_times_out(detoured: Store, proxy: FaultProxy, mode: Mode, single: bool) -> None:
    (detoured.run_statement if single else detoured.transact)(one)
    proxy.set(mode)

    def fails() -> None:
        with pytest.raises(StoreUnavailable):
            (detoured.run_statement if single else detoured.transact)(one, timeouts=ONE_TRY)

    with hearing(signals.connections_cut) as cut:
        assert took(fails) < SLACK_SECONDS
        until(lambda: cut)
    proxy.set(Mode.PASS)
    assert (detoured.run_statement if single else detoured.transact)(one) == 1


def test_a_receiver_that_hangs_does_not_keep_the_watchdog_from_the_next_connection(
    detoured: Store, proxy: FaultProxy
) -> None:
    is_called, is_over = threading.Event(), threading.Event()

    def hang(**_: object) -> None:
        is_called.set()
        is_over.wait()

    def lose_a_connection() -> None:
        proxy.set(Mode.PASS)
        detoured.transact(one)
        proxy.set(Mode.BLACKHOLE)
        with pytest.raises(StoreUnavailable):
            detoured.transact(one, timeouts=ONE_TRY)

    signals.connections_cut.connect(hang)
    try:
        lose_a_connection()
        assert is_called.wait(SLACK_SECONDS)
        thread = threading.Thread(target=lose_a_connection, daemon=True)
        thread.start()
        thread.join(SLACK_SECONDS)
        assert not thread.is_alive()
    finally:
        signals.connections_cut.disconnect(hang)
        is_over.set()


def test_a_read_without_an_answer_times_out(detoured: Store, proxy: FaultProxy) -> None:
    detoured.read(one)
    proxy.set(Mode.BLACKHOLE)

    def fails() -> None:
        with pytest.raises(StoreUnavailable):
            detoured.read(one, timeouts=ONE_TRY)

    assert took(fails) < SLACK_SECONDS


def test_after_a_failover_an_operation_continues_on_a_new_connection(detoured: Store, proxy: FaultProxy) -> None:
    for single in (True, False):
        (detoured.run_statement if single else detoured.transact)(one)
        proxy.set(Mode.STALL_OLD)
        assert (
            took(lambda single=single: (detoured.run_statement if single else detoured.transact)(one, timeouts=SHORT))
            < SLACK_SECONDS
        )
    detoured.read(one)
    proxy.set(Mode.STALL_OLD)
    assert took(lambda: detoured.read(one, timeouts=SHORT)) < SLACK_SECONDS


def test_connecting_to_a_silent_server_times_out(detoured: Store, proxy: FaultProxy) -> None:
    """PyMySQL's own timeout ends before the server's greeting."""
    proxy.set(Mode.HANG)

    def fails() -> None:
        with pytest.raises(StoreUnavailable):
            detoured.read(one, timeouts=Timeouts(1, 1))

    assert took(fails) < 3 + SLACK_SECONDS


def test_a_commit_without_an_answer_is_resolved_by_its_id(
    detoured: Store, proxy: FaultProxy, runtime: Nudged, store: Store
) -> None:
    """The server has it: it must not be done again, nor be given up."""
    world = World(store)
    claim = world.claim(world.create())
    write = step(result="1")
    calls: list[str] = []

    def work(tx: Tx) -> str:
        calls.append("work")
        guarded = claims.guard(tx, claim, lease=LEASE)
        step_rows.write_step(tx, claim, guarded, write)
        runtime.at["before-commit"] = mute
        return "worked"

    def mute() -> None:
        proxy.set(Mode.MUTE)
        threading.Timer(0.2, proxy.set, [Mode.STALL_OLD]).start()

    def find_committed(tx: Tx) -> str | None:
        calls.append("find_committed")
        assert claims.is_held(tx, claim)
        found = step_rows.find_commit(tx, claim, commit_id=write.commit_id)
        return "found" if found else None

    assert detoured.transact(work, find_committed=find_committed, timeouts=SHORT) == "found"
    assert calls == ["work", "find_committed"]
    assert len(world.steps(claim)) == 1


# --- what has no bound --------------------------------------------------------------------------


def test_operations_without_timeouts_are_never_cut(detoured: Store, proxy: FaultProxy) -> None:
    """An author's statements, a migration, an export: longer than any of our limits, and never cut."""
    ids = [detoured.transact(lambda tx: session_id(tx.conn), timeouts=None)]
    proxy.set(Mode.STALL)
    threading.Timer(1.0, proxy.set, [Mode.PASS]).start()
    with limit_database_time(0.1):
        pass  # the limit of an earlier request, which has ended
    ids.append(detoured.transact(lambda tx: session_id(tx.conn), timeouts=None))
    proxy.set(Mode.STALL)
    threading.Timer(1.0, proxy.set, [Mode.PASS]).start()
    with limit_database_time(None):
        ids.append(detoured.transact(lambda tx: session_id(tx.conn), timeouts=Timeouts(0.1, 0.1)))
    assert len(set(ids)) == 1


def test_an_authors_session_is_never_cut(detoured: Store, proxy: FaultProxy) -> None:
    with Session(detoured.engine) as plain, detoured.sessions.open() as session:
        for each in (session, plain):
            each.execute(sa.text("SELECT 1"))
        proxy.set(Mode.STALL)
        threading.Timer(1.0, proxy.set, [Mode.PASS]).start()
        with limit_database_time(0.1):
            assert session.execute(sa.text("SELECT 2")).scalar_one() == 2
        type(session).close(session)


# --- who waits for an answer --------------------------------------------------------------------


def test_operations_end_at_the_callers_deadline(detoured: Store, proxy: FaultProxy) -> None:
    detoured.transact(one)
    proxy.set(Mode.BLACKHOLE)

    def fails() -> None:
        with limit_database_time(0.5):
            with pytest.raises(StoreUnavailable):
                detoured.transact(one)
            with pytest.raises(StoreUnavailable, match="The database does not answer"):
                detoured.read(one)

    assert took(fails) < SLACK_SECONDS


# --- the watchdog itself ------------------------------------------------------------------------


def test_a_statement_that_has_ended_is_never_cut(detoured: Store) -> None:
    with detoured.engine.connect() as connection:
        watched_socket = watch_socket_of(connection.connection.driver_connection)
        assert watched_socket is not None
        for _ in range(1000):
            watched_socket.arm(real_monotonic() - 1)  # late from the start: the first thread that takes it owns it
            if watched_socket.disarm():
                assert not watched_socket.cut_if_late(
                    real_monotonic()
                )  # the watchdog's next look, which comes every 0.25 s
                assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
                continue
            with pytest.raises(sa.exc.OperationalError):
                connection.exec_driver_sql("SELECT 1")
            break
        watched_socket.close()


def test_closed_connections_leak_no_descriptors(detoured: Store) -> None:
    def work() -> None:
        detoured.run_statement(one)
        detoured.transact(one)
        detoured.read(one)
        detoured.close()

    work()
    gc.collect()
    before = descriptors()
    for _ in range(5):
        work()
    gc.collect()
    until(lambda: gc.collect() is not None and descriptors() <= before + 1)  # threads of other tests may open some


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_watchdog(detoured: Store, proxy: FaultProxy) -> None:
    detoured.run_statement(one)
    (read, write), (silent, go) = os.pipe(), os.pipe()

    def child() -> None:
        detoured.run_statement(one)
        os.write(write, b"r")
        os.read(silent, 1)
        with pytest.raises(StoreUnavailable):
            detoured.run_statement(one, timeouts=ONE_TRY)

    proc = multiprocessing.get_context("fork").Process(target=lambda: (child(), os._exit(7)))
    proc.start()
    assert os.read(read, 1) == b"r"
    proxy.set(Mode.BLACKHOLE)
    os.write(go, b"g")
    proc.join(10)
    assert proc.exitcode == 7
    proxy.set(Mode.PASS)
    assert detoured.run_statement(one) == 1
    for end in (read, write, silent, go):
        os.close(end)
