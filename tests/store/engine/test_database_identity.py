"""The database's id, if the tables were emptied: it is inserted once, and all processes agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.server_info import ensure_database_id, find_database_id

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


@pytest.fixture
def emptied(store: Store) -> Iterator[Store]:
    """A store whose tables were emptied. Afterwards they have their id again, which other stores may know."""
    table = store.tables.database
    with store.engine.begin() as connection:
        (before,) = connection.execute(sa.select(table))
        connection.execute(sa.delete(table))
    with contextlib.closing(Store(store.engine.url)) as emptied:
        yield emptied
    with store.engine.begin() as connection:
        connection.execute(sa.update(table).values(before._mapping))


class Undone(Exception):
    pass


def ensure_and_undo(tx: Tx) -> None:
    assert ensure_database_id(tx) == ensure_database_id(tx)
    raise Undone


def test_an_id_whose_transaction_was_rolled_back_is_forgotten(emptied: Store) -> None:
    with pytest.raises(Undone):
        emptied.transact(ensure_and_undo)
    assert emptied.read(find_database_id) is None
    id_ = emptied.transact(ensure_database_id)
    with contextlib.closing(Store(emptied.engine.url)) as other:
        assert other.read(find_database_id) == emptied.read(find_database_id) == id_
        assert (other.database_id, emptied.database_id) == (id_, id_)


def test_a_read_inserts_no_id(emptied: Store) -> None:
    assert emptied.read(find_database_id) is None
    with contextlib.closing(Store(emptied.engine.url)) as other:
        id_ = other.transact(ensure_database_id)
    assert emptied.read(find_database_id) == id_ == emptied.transact(ensure_database_id)
