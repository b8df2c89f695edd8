"""Sessions: joined ones of the application, callbacks after their commit, and the sessions of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from celery_durable.errors import StoreMismatch, ValueRefused
from celery_durable.model import RunRef
from celery_durable.store.engine import Store, Tx, sessions
from celery_durable.store.instances import instances
from tests.store.world import GRACE, World, step

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


UNBOUND = (
    "session= is bound to no single engine: pass a session of the database of the workflows, such as Session(engine)."
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda engine: Session(), UNBOUND),
        (lambda engine: Session(binds={sa.Table("accounts", sa.MetaData()): engine}), UNBOUND),
        (lambda engine: engine, "session={!r} is no session: pass an SQLAlchemy Session, such as Session(engine)."),
    ],
    ids=["unbound", "bound by table", "engine"],
)
def test_what_is_no_session_of_one_database_is_refused(store: Store, make: Any, message: str) -> None:
    given = make(store.engine)
    with pytest.raises(ValueRefused) as refused:
        store.join(given)
    assert str(refused.value) == message.format(given)


# --- after_commit -------------------------------------------------------------------------------


def _register_callback(store: Store, session: Session, calls: list[str], what: str = "calls") -> None:
    sessions.after_commit(session, lambda: calls.append(what))


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
    session = store.sessions.open()
    levels = {
        "postgresql": "SHOW transaction_isolation",
        "mariadb": "SELECT REPLACE(@@session.tx_isolation, '-', ' ')",
        "sqlite": "SELECT 'read committed'",
    }
    assert session.execute(sa.text(levels[database])).scalar_one().lower() == "read committed"
    assert session.connection().connection.dbapi_connection.in_transaction if database == "sqlite" else True
    store.sessions.close(session)
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


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_step_session_that_is_lost_at_its_return_is_closed(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sa.create_engine(store_url)
    store = Store(engine=engine, session_factory=sessionmaker(engine))
    session = store.sessions.open()

    def reset(connection: Any) -> None:
        raise engine.dialect.loaded_dbapi.OperationalError(2013, "Lost connection to MySQL server during query")

    monkeypatch.setattr(engine.dialect, "reset_isolation_level", reset)
    store.sessions.close(session)
    engine.dispose()
