"""What the store says of a database that it cannot work with."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.errors import ConfigInvalid, SchemaOutdated
from celery_durable.store.engine import Store
from celery_durable.store.instances import instances
from celery_durable.store.migrations import migrate
from celery_durable.store.runs import outbox
from celery_durable.store.schema.tables import REVISION
from tests.store.world import World

REMEDY = (
    f"The database has no celery_durable tables; this version needs revision '{REVISION}'. "
    "Bring it up to date: celery -A <your app> durable migrate"
)


def test_missing_tables_are_named_with_the_remedy(store_url: str) -> None:
    store = Store(store_url, prefix="other_")
    try:
        with pytest.raises(SchemaOutdated) as written:
            store.transact(lambda tx: instances.lock(tx, "order", "o-1"))
        with pytest.raises(SchemaOutdated) as read:
            store.read(lambda tx: instances.read(tx, "order", "o-1"))
    finally:
        store.close()
    assert (str(written.value), str(read.value)) == (REMEDY, REMEDY)


def test_a_missing_table_of_the_author_keeps_the_drivers_error(live: World) -> None:
    with pytest.raises(sa.exc.DBAPIError):
        live.store.transact(lambda tx: tx.execute(sa.text("SELECT * FROM shop_order")))


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_rejected(url: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Store(url)
    assert str(refused.value) == (
        f"Setting durable_database_url={url!r} cannot be used: "
        "in memory each thread has a database of its own; name a file"
    )


NO_DRIVER = "SQLAlchemy knows no such driver; use postgresql+psycopg, mysql+pymysql or sqlite"


@pytest.mark.parametrize(
    ("url", "shown", "remedy"),
    [
        ("postgres://eve:secret@db/shop", "postgres", NO_DRIVER),
        ("shop:secret@db", "***", "it is no URL such as postgresql+psycopg://user@host/db"),
        ("postgresql://eve:se:cret@db:port/shop", "***", "it is no URL such as postgresql+psycopg://user@host/db"),
        ("postgresql+nodriver://eve:secret@db/shop", "postgresql+nodriver", NO_DRIVER),
        (
            "sqlite+aiosqlite:///shop.sqlite3",
            "sqlite+aiosqlite",
            "this driver is for async code only; use postgresql+psycopg, mysql+pymysql or sqlite",
        ),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_showing_passwords(url: str, shown: str, remedy: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Store(url)
    assert str(refused.value) == f"Setting durable_database_url={shown!r} cannot be used: {remedy}"


def test_a_prefix_of_the_tables_may_need_quotes(store_url: str) -> None:
    store = Store(store_url, prefix="shop-")
    try:
        migrate.upgrade(store)
        assert store.transact(lambda tx: outbox.read_entries(tx, given_up=False, limit=1)) == []
    finally:
        store.tables.metadata.drop_all(store.engine)
        store.close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_connection_that_a_body_holds_while_the_store_closes_is_closed_at_its_return(store_url: str) -> None:
    store = Store(store_url)
    session = store.sessions.open()
    session.execute(sa.text("SELECT 1"))
    driver = session.connection().connection.driver_connection
    store.close()
    assert not driver.closed
    store.sessions.close(session)
    assert driver.closed


# --- what the URL asks for ------------------------------------------------------------------------

servers = {name: pytest.mark.parametrize("database", [name], indirect=True) for name in ("postgresql", "mariadb")}


def open_with(url: str, **query: str) -> Store:
    return Store(sa.make_url(url).update_query_dict(query))


def read_settings(store: Store, query: str) -> list[tuple[Any, ...]]:
    """What a single statement, a transaction and a step's session see."""
    session = store.sessions.open()
    try:
        seen = [
            store.run_statement(lambda tx: tx.execute(sa.text(query)).one()),
            store.transact(lambda tx: tx.execute(sa.text(query)).one()),
            session.execute(sa.text(query)).one(),
        ]
    finally:
        store.sessions.close(session)
    return [tuple(each) for each in seen]


PG_SETTINGS = (
    "SELECT current_schema(), current_setting('statement_timeout'), current_setting('lock_timeout'), "
    "current_setting('transaction_isolation')"
)
TENANT = "-csearch_path=tenant_a -c statement_timeout=70s"


@servers["postgresql"]
@pytest.mark.parametrize("source", ["the URL", "PGOPTIONS"])
def test_all_tables_land_in_the_schema_that_the_connection_asks_for(
    store_url: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "PGOPTIONS":
        monkeypatch.setenv("PGOPTIONS", TENANT)
    store = open_with(store_url, **({"options": TENANT} if source == "the URL" else {}))
    try:
        with store.engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA tenant_a")
        migrate.upgrade(store)
        in_tenant = sa.text("SELECT count(*) FROM pg_tables WHERE schemaname = 'tenant_a'")
        assert store.read(lambda tx: tx.execute(in_tenant).scalar_one()) > 5
        assert store.transact(lambda tx: outbox.read_entries(tx, given_up=False, limit=1)) == []
        assert read_settings(store, PG_SETTINGS) == [("tenant_a", "70s", "5s", "read committed")] * 3
    finally:
        with store.engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA IF EXISTS tenant_a CASCADE")
        store.close()


@servers["postgresql"]
def test_the_timeouts_and_keepalives_of_the_url_replace_the_defaults(store_url: str) -> None:
    store = open_with(
        store_url, options="-c lock_timeout=2s", connect_timeout="7", keepalives_idle="11", tcp_user_timeout="12000"
    )
    try:
        assert read_settings(store, PG_SETTINGS)[0][2] == "2s"
        with store.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            given = driver.info.get_parameters()
        names = ("connect_timeout", "keepalives_idle", "tcp_user_timeout", "keepalives_count")
        assert [given[name] for name in names] == ["7", "11", "12000", "3"]
    finally:
        store.close()


MARIADB_SETTINGS = "SELECT @@sql_mode, @@time_zone, @@innodb_lock_wait_timeout, @@character_set_client, @@tx_isolation"


@servers["mariadb"]
def test_the_init_command_of_the_url_runs_after_that_of_the_store(store_url: str) -> None:
    command = "SET SESSION sql_mode='ANSI', innodb_lock_wait_timeout=3, tx_isolation='SERIALIZABLE'"
    store = open_with(store_url, init_command=command, charset="utf8mb4", connect_timeout="7")
    try:
        modes = "REAL_AS_FLOAT,PIPES_AS_CONCAT,ANSI_QUOTES,IGNORE_SPACE,ANSI"
        assert read_settings(store, MARIADB_SETTINGS) == [(modes, "+00:00", 3, "utf8mb4", "READ-COMMITTED")] * 3
    finally:
        store.close()


@servers["mariadb"]
@pytest.mark.parametrize("command", ["SET NAMES latin1", "SET autocommit=1"])
def test_an_init_command_with_which_the_store_cannot_work_is_refused(store_url: str, command: str) -> None:
    store = open_with(store_url, init_command=command)
    try:
        with pytest.raises(ConfigInvalid) as refused:
            store.transact(lambda tx: outbox.read_entries(tx, given_up=False, limit=1))
    finally:
        store.close()
    assert str(refused.value) == (
        f"Setting durable_database_url={f'init_command={command}'!r} cannot be used: "
        "it must leave character_set_client at utf8mb4 and autocommit off"
    )


@pytest.mark.parametrize(
    ("url", "shown", "remedy"),
    [
        ("mysql+pymysql://u@db/shop?charset=latin1", "charset=latin1", "workflows need charset=utf8mb4"),
        ("postgresql+psycopg://u@db/shop?client_encoding=latin1", "client_encoding=latin1", "workflows need client_"),
        ("postgresql+psycopg://u@db/shop?connect_timeout=soon", "connect_timeout=soon", "it is no whole number"),
        ("postgresql+psycopg://u@db/shop?prepare_threshold=5", "prepare_threshold=5", "Durable sets prepare_threshold"),
        ("mysql+pymysql://u@db/shop?autocommit=1", "autocommit=1", "Durable sets autocommit itself"),
        ("sqlite:///shop.sqlite3?isolation_level=EXCLUSIVE", "isolation_level=EXCLUSIVE", "Durable sets isolation_lev"),
        (
            "postgresql+psycopg://u@db/shop?options=-cdefault_transaction_isolation=serializable",
            "-cdefault_transaction_isolation=serializable",
            "Durable needs READ COMMITTED",
        ),
    ],
)
def test_what_a_url_asks_for_and_workflows_cannot_work_with_is_refused(url: str, shown: str, remedy: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Store(url)
    assert str(refused.value).startswith(f"Setting durable_database_url={shown!r} cannot be used: {remedy}")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_sqlite_waits_for_its_lock_as_long_as_the_url_says(store_url: str) -> None:
    store = open_with(store_url, timeout="7")
    try:
        assert store.run_statement(lambda tx: tx.conn.exec_driver_sql("PRAGMA busy_timeout").scalar_one()) == 7_000
    finally:
        store.close()
