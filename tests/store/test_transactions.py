"""Store.transact and its connections: repetition, commits in doubt, killed connections, forks, joined sessions."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from celery_durable.errors import StoreMismatch, Superseded
from celery_durable.model import RunRef
from celery_durable.store import claims, instances, run_events, step_rows
from celery_durable.store.engine import Store, Tx
from tests.store.lost_connections import cut_commit, kill, session_id
from tests.store.world import GRACE, LEASE, World, step

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
    min_age = {"postgresql": "SET LOCAL lock_timeout = 10", "mariadb": "SET innodb_lock_wait_timeout = 0"}

    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        instances.lock(Tx(connection, world.store), ref.workflow, ref.instance_id)

        def work(tx: Tx) -> str:
            tries.append(1)
            if len(tries) == 3:
                transaction.rollback()
            tx.conn.exec_driver_sql(min_age[world.store.database.name])
            try:
                return instances.lock(tx, ref.workflow, ref.instance_id).instance_id
            finally:
                tx.conn.detach()  # its patience is spoilt

        assert world.store.transact(work) == "o-1"
    assert len(tries) == 3


@servers_only
def test_a_transaction_that_never_succeeds_raises_after_the_last_try(world: World) -> None:
    tries: list[int] = []

    def work(tx: Tx) -> None:
        tries.append(1)
        _raise_serialization_failure(tx)

    with pytest.raises(sa.exc.DBAPIError):
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
    with world.store.engine.connect() as connection:
        victim = session_id(connection)
    kill(world.store, victim)
    assert world.change(ref, lambda tx, row: row.instance_id) == "o-1"
    with world.store.engine.connect() as connection:
        victim = session_id(connection)
    kill(world.store, victim)
    assert world.row(ref).instance_id == "o-1"


@servers_only
def test_connections_that_died_in_a_shared_pool_are_replaced(world: World) -> None:
    engine = sa.create_engine(world.store.engine.url)
    store = Store(engine=engine)
    ref = world.create()

    def read(tx: Tx) -> str:
        return instances.read(tx, ref.workflow, ref.instance_id).instance_id

    for use in (store.transact, store.read, lambda work: store.transact(work, is_single_statement=True)):
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
    session = world.store.open_session()
    with cut_commit(world.store, when=when), pytest.raises(Exception) as caught:
        world.store.transact_session(session, _send(ref, []))
    world.store.close_session(session)
    assert world.store.is_commit_in_doubt(caught.value)
    assert len(world.read_all_rows()["workflow_event"]) == (when == "after")


@servers_only
def test_an_unreachable_server_is_tried_again_and_then_named_in_the_error(world: World) -> None:
    store = Store(world.store.engine.url.set(port=1), runtime=world.store.runtime)
    with pytest.raises(sa.exc.OperationalError) as caught:
        store.transact(lambda tx: None)
    assert store.is_transient(caught.value)
    assert not store.is_commit_in_doubt(caught.value)
    store.close()


# --- kept connections ---------------------------------------------------------------------------

postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@postgresql_only
def test_single_statements_of_a_thread_share_its_kept_connection(world: World) -> None:
    def id_of(tx: Tx) -> int:
        return session_id(tx.conn)

    first, second = (world.store.transact(id_of, is_single_statement=True) for _ in range(2))
    assert first == second
    other = world.start(lambda: world.store.transact(id_of, is_single_statement=True)).result()
    assert other != first


@postgresql_only
def test_a_kept_connection_that_was_killed_is_replaced_at_the_next_use(world: World) -> None:
    ref = world.create()
    kill(world.store, world.store.transact(lambda tx: session_id(tx.conn), is_single_statement=True))
    claim = world.try_claim(ref)
    assert claim is not None
    kill(world.store, world.store.transact(lambda tx: session_id(tx.conn), is_single_statement=True))
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
        found = step_rows.find_commit(tx, claim, key=write.key, commit_id=write.commit_id)
        return None if found is None else "found"

    result = world.store.transact(work, find_committed=find_committed, is_single_statement=True)
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
        world.store.transact(work, is_single_statement=True)
    assert world.store.engine.pool.checkedout() == 0


@postgresql_only
def test_closing_a_store_closes_the_kept_connections_of_all_threads(world: World) -> None:
    kept = world.start(lambda: world.store.transact(lambda tx: session_id(tx.conn), is_single_statement=True)).result()
    world.store.close()
    with sa.create_engine(world.store.engine.url, poolclass=sa.NullPool).connect() as connection:
        while connection.exec_driver_sql(f"SELECT 1 FROM pg_stat_activity WHERE pid = {kept}").first():
            pass  # a session takes a moment to end


# --- forks --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork_parent_and_child_use_separate_connections(store: Store) -> None:
    world = World(store)  # no thread of it has been started
    ref = world.create()
    with store.kept_connection() as tx:
        tx.conn.exec_driver_sql("SELECT 1")
    fork = multiprocessing.get_context("fork")
    for n in range(3):
        child = fork.Process(target=_child, args=(store, ref, n))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        with store.kept_connection() as tx:
            assert tx.conn.exec_driver_sql("SELECT 41 + 1").scalar_one() == 42
        world.send(ref, id=f"parent {n}")
    assert len(world.read_all_rows()["workflow_event"]) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_forked_child_sends_nothing_over_its_parents_connections(store: Store) -> None:
    def questions() -> int:
        with store.kept_connection() as tx:
            return int(tx.conn.exec_driver_sql("SHOW SESSION STATUS LIKE 'Questions'").one()[1])

    before = questions()
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert questions() == before + 1


def _child(store: Store, ref: RunRef, n: int) -> None:
    gc.collect()  # whatever was inherited and is not held goes now, and must not speak to the server
    world = World(store)
    with store.kept_connection() as tx:
        assert tx.conn.exec_driver_sql("SELECT 40 + 1").scalar_one() == 41
    world.send(ref, id=f"child {n}")
    store.close()


# --- joined sessions ----------------------------------------------------------------------------


@pytest.fixture
def app_engine(store_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(store_url)
    yield engine
    engine.dispose()


@pytest.fixture
def session(app_engine: sa.Engine) -> Iterator[Session]:
    with Session(app_engine) as session:
        yield session


def _create(tx: Tx, id: str) -> bool:
    return instances.insert(tx, workflow="order", instance_id=id, params="{}", queue="q", grace=GRACE, commit_id="c")


def test_operations_in_a_joined_session_commit_with_it(world: World, session: Session) -> None:
    assert _create(world.store.join(session), "o-1") is True
    session.rollback()
    assert world.read_all_rows()["workflow_instance"] == []
    assert _create(world.store.join(session), "o-1") is True
    session.commit()
    assert world.row(RunRef("order", "o-1", 1)).instance_id == "o-1"


def test_a_taken_id_leaves_a_joined_session_usable(world: World, session: Session) -> None:
    world.create("o-1")
    assert _create(world.store.join(session), "o-1") is False
    assert _create(world.store.join(session), "o-2") is True
    session.commit()
    assert world.row(RunRef("order", "o-2", 1)).instance_id == "o-2"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_joined_session_may_use_another_driver(world: World, store_url: str) -> None:
    engine = sa.create_engine(store_url, paramstyle="named")
    with Session(engine) as session:
        assert _create(world.store.join(session), "o-1") is True
        session.commit()
    engine.dispose()
    assert world.row(RunRef("order", "o-1", 1)).instance_id == "o-1"


@pytest.mark.parametrize(
    ("session_url", "store_url"),
    [
        ("postgresql+psycopg://app:secret@db/shop", "postgresql+psycopg://durable:hush@db/other"),
        ("postgresql+psycopg://app:secret@db:5433/shop", "postgresql+psycopg://app:secret@db/shop"),
        ("mysql+pymysql://app:secret@db/shop", "postgresql+psycopg://app:secret@db/shop"),
        ("sqlite:////tmp/a.sqlite3", "sqlite:////tmp/b.sqlite3"),
    ],
)
def test_a_session_of_another_database_is_rejected_without_showing_passwords(session_url: str, store_url: str) -> None:
    store = Store(store_url)
    with Session(sa.create_engine(session_url)) as session, pytest.raises(StoreMismatch) as caught:
        store.join(session)
    shown = [url.replace("secret", "***").replace("hush", "***") for url in (session_url, store_url)]
    assert str(caught.value) == (
        f"The session is bound to {shown[0]}, but workflows are stored in {shown[1]}. One transaction "
        "cannot span both: bind the session to the store's database, or leave out session=."
    )


@pytest.mark.parametrize(
    ("session_url", "store_url"),
    [
        ("postgresql+psycopg://web@db:5432/shop", "postgresql://durable:hush@db/shop"),
        ("mariadb+pymysql://web@db/shop", "mysql+pymysql://durable@db:3306/shop"),
        ("sqlite:///shop.sqlite3", "sqlite:///./shop.sqlite3"),
    ],
)
def test_a_session_of_the_same_database_under_another_name_is_accepted(session_url: str, store_url: str) -> None:
    if store_url.startswith("postgresql:"):
        store_url = store_url.replace("postgresql:", "postgresql+psycopg:")
    store = Store(store_url)
    with Session(sa.create_engine(session_url)) as session:
        store.sessions.check_same_database(session)


# --- after_commit -------------------------------------------------------------------------------


def _register_callback(store: Store, session: Session, calls: list[str], what: str = "calls") -> None:
    store.after_commit(session, lambda: calls.append(what))


def test_callbacks_run_once_after_the_callers_commit(store: Store, session: Session) -> None:
    calls: list[str] = []
    for what in ("one", "two"):
        session.execute(sa.text("SELECT 1"))
        _register_callback(store, session, calls, what)
    assert calls == []
    session.commit()
    assert calls == ["one", "two"]
    session.execute(sa.text("SELECT 1"))
    session.commit()
    assert calls == ["one", "two"]


def test_each_transaction_of_a_session_runs_its_own_callbacks(store: Store, session: Session) -> None:
    calls: list[str] = []
    for what in ("one", "two", "three"):
        session.execute(sa.text("SELECT 1"))
        _register_callback(store, session, calls, what)
        session.rollback() if what == "two" else session.commit()
    assert calls == ["one", "three"]


def test_other_listeners_of_the_session_are_not_disturbed(store: Store, session: Session) -> None:
    calls: list[str] = []
    event.listen(session, "after_commit", lambda _: calls.append("before"))
    session.execute(sa.text("SELECT 1"))
    _register_callback(store, session, calls)
    event.listen(session, "after_commit", lambda _: calls.append("after"))
    session.commit()
    assert calls == ["before", "calls", "after"]


def test_releasing_a_savepoint_runs_no_callbacks(store: Store, session: Session) -> None:
    calls: list[str] = []
    with session.begin_nested():
        session.execute(sa.text("SELECT 1"))
        with session.begin_nested():
            _register_callback(store, session, calls)
    assert calls == []
    session.commit()
    assert calls == ["calls"]


def test_rolling_back_a_savepoint_keeps_the_callbacks(store: Store, session: Session) -> None:
    calls: list[str] = []
    session.execute(sa.text("SELECT 1"))
    _register_callback(store, session, calls)
    session.begin_nested().rollback()
    session.commit()
    assert calls == ["calls"]


def test_a_rollback_discards_the_callbacks(store: Store, session: Session) -> None:
    calls: list[str] = []
    session.execute(sa.text("SELECT 1"))
    _register_callback(store, session, calls)
    session.rollback()
    session.execute(sa.text("SELECT 1"))
    session.commit()
    assert calls == []


def test_closing_a_session_discards_the_callbacks(store: Store, app_engine: sa.Engine) -> None:
    calls: list[str] = []
    with Session(app_engine) as session:
        session.execute(sa.text("SELECT 1"))
        _register_callback(store, session, calls)
    session.execute(sa.text("SELECT 1"))
    session.commit()
    session.close()
    assert calls == []


# --- step sessions ------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own engine", "shared factory"])
def test_a_steps_session_reads_what_is_committed(
    store_url: str, app_engine: sa.Engine, shared: bool, database: str
) -> None:
    factory = sessionmaker(app_engine)
    store = Store(engine=app_engine, session_factory=factory) if shared else Store(store_url)
    session = store.open_session()
    levels = {
        "postgresql": "SHOW transaction_isolation",
        "mariadb": "SELECT REPLACE(@@session.tx_isolation, '-', ' ')",
        "sqlite": "SELECT 'read committed'",
    }
    assert session.execute(sa.text(levels[database])).scalar_one().lower() == "read committed"
    assert session.connection().connection.dbapi_connection.in_transaction if database == "sqlite" else True
    store.close_session(session)
    store.close()


def test_a_store_on_a_shared_engine_leaves_it_as_it_was(store_url: str, app_engine: sa.Engine) -> None:
    store = Store(engine=app_engine)
    world = World(store)
    ref = world.create()
    claim = world.claim(ref)
    world.commit(claim, step())
    assert store.engine.pool.checkedout() == 0
    store.close()
    with app_engine.connect() as connection:
        level = connection.get_isolation_level()
        assert level == app_engine.dialect.default_isolation_level


# --- losing a race ------------------------------------------------------------------------------


def test_a_violated_constraint_of_the_store_raises_superseded(world: World) -> None:
    claim = world.claim(world.create())
    world.commit(claim, step())

    def work(tx: Tx) -> None:
        with world.store.conflict_as_superseded():
            step_rows.guard_and_write_step(tx, claim, step(), lease=LEASE)

    with pytest.raises(Superseded):
        world.store.transact(work, is_single_statement=True)
    assert len(world.steps(claim)) == 1


# --- lock timeouts ------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("prepared", [True, False], ids=["of our own", "behind a pooler"])
def test_lock_waits_are_bounded_in_every_transaction(store_url: str, prepared: bool) -> None:
    """Behind a pooler without a setting of the session: what it hands to others is as it was."""

    def lock_timeout(tx: Tx) -> str:
        return str(tx.conn.exec_driver_sql("SHOW lock_timeout").scalar_one())

    store = Store(store_url, prepared_statements=prepared)
    try:
        session = store.open_session()
        in_a_step = session.execute(sa.text("SHOW lock_timeout")).scalar_one()
        store.close_session(session)
        in_a_transaction = store.transact(lock_timeout)
        in_a_single_statement = store.transact(lock_timeout, is_single_statement=True)
        assert (in_a_step, in_a_transaction) == ("5s", "5s")
        assert in_a_single_statement == ("5s" if prepared else "0")
        assert store.read(lock_timeout) == in_a_single_statement
    finally:
        store.close()


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


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_step_session_that_is_lost_at_its_return_is_closed(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sa.create_engine(store_url)
    store = Store(engine=engine, session_factory=sessionmaker(engine))
    session = store.open_session()

    def reset(connection: Any) -> None:
        raise engine.dialect.loaded_dbapi.OperationalError(2013, "Lost connection to MySQL server during query")

    monkeypatch.setattr(engine.dialect, "reset_isolation_level", reset)
    store.close_session(session)
    engine.dispose()
