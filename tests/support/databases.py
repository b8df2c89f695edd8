"""The databases of a test process on the servers: one with the tables, and one without for tests of migrations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from pymysql.constants import CLIENT

from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from celery_durable.store.schema.tables import Tables
from tests.support import leftovers, open_connections
from tests.support.services import DATABASES

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
IS_FIRST = _WORKER in ("main", "gw0")
"""Whether this process removes what killed test runs have left behind."""
_CONNECT_ARGS: dict[str, dict[str, Any]] = {
    "postgresql": {"options": "-c plan_cache_mode=force_generic_plan", "prepare_threshold": 1},
    "mariadb": {"client_flag": CLIENT.MULTI_STATEMENTS},
}


def on_databases(*names: str) -> Any:
    """Make the fixture `database` of a room or a module: ``database = on_databases("sqlite")``."""

    @pytest.fixture(params=names)
    def database(request: pytest.FixtureRequest) -> str:
        return request.param

    return database


@dataclass(frozen=True)
class OwnDatabase:
    """A process's database on one server. Its engine waits for the server, where a store's gives up after 3 seconds."""

    engine: sa.Engine
    tables: Tables

    @property
    def url(self) -> str:
        return self.engine.url.render_as_string(hide_password=False)

    @property
    def inspector(self) -> sa.Engine:
        """The same connection, but in autocommit: psycopg forgets what is prepared after each rollback."""
        return self.engine.execution_options(isolation_level="AUTOCOMMIT")

    def empty(self) -> None:
        tables = (table for table in self.tables.metadata.sorted_tables if table is not self.tables.database)
        with self.engine.begin() as connection:  # in one round trip
            connection.exec_driver_sql("; ".join(f"DELETE FROM {table.name}" for table in tables))


@contextmanager
def own_database(name: str) -> Iterator[OwnDatabase]:
    """A database with the tables, on the server of this name, as long as the block lasts."""
    with empty_database(name) as engine:
        with contextlib.closing(Store(engine=engine)) as store:
            migrate.upgrade(store)
        yield OwnDatabase(engine, store.tables)


@contextmanager
def empty_database(name: str, label: str = "") -> Iterator[sa.Engine]:
    """A database without tables. ``label``: a part of its name, for a second one of this process."""
    server = sa.make_url(DATABASES[name])
    database = f"{leftovers.PREFIX}{_WORKER}{label}_{os.getpid()}"
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    force = " WITH (FORCE)" if name == "postgresql" else ""
    if IS_FIRST:
        leftovers.drop_databases_of_the_dead(admin)
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {database}{force}")
        connection.exec_driver_sql(f"CREATE DATABASE {database}")
        if name == "postgresql":  # no test kills this server; tests/smoke and tests/chaos kill servers of their own
            connection.exec_driver_sql(f"ALTER DATABASE {database} SET synchronous_commit = off")
    url = server.set(database=database)
    engine = sa.create_engine(url, isolation_level="READ COMMITTED", connect_args=_CONNECT_ARGS[name])
    try:
        yield engine
    finally:
        open_connections.close_all(url.render_as_string(hide_password=False))
        engine.dispose()
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {database}{force}")
        admin.dispose()
