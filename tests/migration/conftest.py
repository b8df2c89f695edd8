from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_durable.store import migrate
from celery_durable.store.engine import Store
from tests.migration.tables import drop_all


@pytest.fixture
def empty(store_url: str) -> Iterator[Store]:
    """A database without any table; its tables are there again afterwards, for the other tests."""
    store = Store(store_url)
    drop_all(store.engine)
    yield store
    drop_all(store.engine)
    migrate.upgrade(store)
    store.close()
