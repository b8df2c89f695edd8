"""The servers that tests use, where the environment says or where they usually are."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
from kombu import Connection

DATABASES = {
    "postgresql": os.environ.get(
        "DURABLE_TEST_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres"
    ),
    "mariadb": os.environ.get("DURABLE_TEST_MARIADB_URL", "mysql+pymysql://root@127.0.0.1:3306/mysql"),
}
BROKERS = {
    "redis": os.environ.get("DURABLE_TEST_REDIS_URL", "redis://127.0.0.1:6379/0"),
    "rabbitmq": os.environ.get("DURABLE_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//"),
}


def missing(what: str, why: str) -> NoReturn:
    """Skip where people develop, fail where everything must be there."""
    text = f"NOT TESTED ON {what.upper()}: {why}"
    (pytest.fail if os.environ.get("DURABLE_REQUIRE_SERVICES") == "1" else pytest.skip)(text)


def require_broker(name: str, url: str | None = None) -> str:
    """Return the URL of a broker that answers, by default that of `BROKERS`."""
    url = url or BROKERS[name]
    try:
        with Connection(url, connect_timeout=3) as connection:
            connection.ensure_connection(max_retries=0)
    except Exception as error:  # each transport raises errors of its own
        missing(name, f"{url} does not answer ({error})")
    return url


TOOLS = {
    "chromium": "apt-get install chromium",
    "promtool": "apt-get install prometheus",
    "pgbouncer": "apt-get install pgbouncer",
    "galera": "apt-get install mariadb-server",
    "psycopg2": "pip install psycopg2-binary",
    "mysqldb": "pip install mysqlclient",
    "dbos": "pip install 'celery-durable[bench]'",
    "absurd": "pip install 'celery-durable[bench]'",
    "restate": "pip install 'celery-durable[bench]'; npm install --global @restatedev/restate-server",
}
"""Programs and drivers that some tests use, and how each is installed."""


def missing_tool(name: str) -> NoReturn:
    """Skip, or fail if DURABLE_REQUIRE_TOOLS names the tool. "1" stands for all of them, and "a,b" for some."""
    required = os.environ.get("DURABLE_REQUIRE_TOOLS", "")
    is_required = required == "1" or name in required.split(",")
    text = f"NOT TESTED WITH {name.upper()}: it is not installed ({TOOLS[name]})"
    (pytest.fail if is_required else pytest.skip)(text)
