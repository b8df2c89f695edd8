"""What the store says of a database that it cannot work with."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_durable.errors import ConfigInvalid, SchemaOutdated
from celery_durable.store import instances, migrate, outbox
from celery_durable.store.engine import Store
from celery_durable.store.schema import REVISION
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
