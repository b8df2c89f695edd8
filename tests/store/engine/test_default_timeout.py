"""Sockets with a default timeout: Celery sets one in every beat."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from celery_durable.store.engine import Store


@pytest.fixture
def default_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("default_timeout")
@pytest.mark.parametrize("database", ["mariadb", "postgresql"], indirect=True)
def test_connections_stay_blocking(store_url: str, database: str) -> None:
    store = Store(store_url)
    try:
        with store.engine.connect() as connection:
            rests = "SELECT sleep(0.2)" if database == "mariadb" else "SELECT pg_sleep(0.2)"
            for _ in range(2):
                assert len(connection.exec_driver_sql(rests).all()) == 1
    finally:
        store.close()
