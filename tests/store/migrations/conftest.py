from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_durable.store.engine import Store
from tests.store.migrations.tables import drop_all
from tests.support.databases import empty_database


@pytest.fixture(scope="session")
def empty_postgresql() -> Iterator[sa.Engine]:
    with empty_database("postgresql", "migration") as engine:
        yield engine


@pytest.fixture(scope="session")
def empty_mariadb() -> Iterator[sa.Engine]:
    with empty_database("mariadb", "migration") as engine:
        yield engine


@pytest.fixture
def empty_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without any table, which only tests of migrations use."""
    if database == "sqlite":
        return f"sqlite:///{tmp_path}/empty.sqlite3"
    engine: sa.Engine = request.getfixturevalue(f"empty_{database}")
    drop_all(engine)
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def empty(empty_url: str) -> Iterator[Store]:
    """A store on a database without any table."""
    store = Store(empty_url)
    yield store
    store.close()
