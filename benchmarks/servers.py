"""The servers of the benchmark, and the database of its own that it makes and drops.

BENCH_POSTGRESQL_URL and BENCH_BROKER name the servers. BENCH_NAME names the database and the prefix of all keys in
Redis, so that two benchmarks on the same servers do not meet.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import psycopg
import sqlalchemy as sa
from redis import Redis

NAME = os.environ.get("BENCH_NAME", "durable_bench")
SERVER = sa.make_url(os.environ.get("BENCH_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres"))
DATABASE = SERVER.set(database=NAME)
BROKER = os.environ.get("BENCH_BROKER", "redis://127.0.0.1:6379/9")
KEY_PREFIX = f"{NAME}:"


def address(database: str, server: sa.URL = SERVER) -> str:
    """The address of a database as libpq reads it."""
    return server.set(drivername="postgresql", database=database).render_as_string(hide_password=False)


def query_one(query: str, database: str = NAME) -> Any:
    """The one value of a query."""
    row = _connection(database).execute(query).fetchone()
    assert row is not None
    return row[0]


def execute(statement: str, database: str = NAME) -> None:
    _connection(database).execute(statement)


@functools.cache
def _connection(database: str) -> psycopg.Connection:
    return psycopg.connect(address(database), autocommit=True)


def fresh_database(name: str = NAME) -> None:
    drop_database(name)
    with _admin().connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {name}"))


def drop_database(name: str = NAME) -> None:
    with _admin().connect() as conn:
        conn.execute(sa.text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


def forget_keys() -> None:
    """Delete what has been written to Redis."""
    with Redis.from_url(BROKER) as client:
        for key in client.scan_iter(f"{KEY_PREFIX}*", count=1000):
            client.delete(key)


def _admin() -> sa.Engine:
    return sa.create_engine(SERVER, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
