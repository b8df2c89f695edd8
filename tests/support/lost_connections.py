"""Lost connections: end a session of the server, or cut a connection during its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.errors import StoreUnavailable
from celery_durable.store.engine import Store
from celery_durable.store.engine.libpq import PreparedStatements


def session_id(connection: Any) -> int:
    """Return the server's number of a connection."""
    query = "SELECT pg_backend_pid()" if connection.dialect.name == "postgresql" else "SELECT connection_id()"
    return int(connection.exec_driver_sql(query).scalar_one())


def kill(store: Store, session: int) -> None:
    """End a session of the server from another connection."""
    engine = sa.create_engine(store.engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        if store.database.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_terminate_backend({session}, 5000)")
        else:
            connection.exec_driver_sql(f"KILL {session}")


@contextmanager
def cut_commit(
    store: Store, *, when: str, then: Callable[[], object] = lambda: None, nth: int = 1
) -> Iterator[list[str]]:
    """Kill the connection of the next (or ``nth``) transaction that commits, before or after the server does.

    ``then`` is called before the store finds out that the connection is lost.
    """
    cuts: list[str] = []
    spared = nth - 1
    do_commit = store.engine.dialect.do_commit

    def commit(dbapi_connection: Any) -> None:
        nonlocal spared
        spared -= 1
        if cuts or spared >= 0:
            do_commit(dbapi_connection)
            return
        cuts.append(when)
        if when == "after":
            do_commit(dbapi_connection)
        query = "SELECT pg_backend_pid()" if store.database.name == "postgresql" else "SELECT connection_id()"
        cursor = dbapi_connection.cursor()
        cursor.execute(query)
        victim = cursor.fetchone()[0]
        cursor.close()
        kill(store, victim)
        then()
        do_commit(dbapi_connection)  # fails: the connection is lost

    store.engine.dialect.do_commit = commit
    try:
        yield cuts
    finally:
        store.engine.dialect.do_commit = do_commit


@contextmanager
def cut_statement(
    store: Store, *, when: str, then: Callable[[], object] = lambda: None, part: str = ""
) -> Iterator[list[str]]:
    """Like `cut_commit`, for the next statement with this ``part`` that PostgreSQL runs on a kept connection."""
    cuts: list[str] = []
    execute = PreparedStatements.execute

    def cut(self: PreparedStatements, sql: str, values: Sequence[Any]) -> Any:
        if cuts or part not in sql:
            return execute(self, sql, values)
        cuts.append(when)
        if when == "after":
            execute(self, sql, values)
        kill(store, self._connection.info.backend_pid)
        then()
        return execute(self, sql, values)  # fails: the connection is lost

    PreparedStatements.execute = cut  # type: ignore[method-assign]
    try:
        yield cuts
    finally:
        PreparedStatements.execute = execute  # type: ignore[method-assign]


@contextmanager
def stays_in_doubt(expected: bool = True) -> Iterator[None]:
    """Expect an operation to report that it does not know whether its change was applied, or to succeed."""
    if not expected:
        yield
        return
    with pytest.raises(StoreUnavailable) as caught:
        yield
    assert caught.value.is_in_doubt
