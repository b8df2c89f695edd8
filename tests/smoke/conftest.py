"""Sites: an application on a broker and a database, with real worker and beat processes."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection

from tests.smoke.proc import MariadbServer, PostgresqlCluster, RedisServer, postgresql_programs
from tests.smoke.site import Site
from tests.support.databases import on_databases
from tests.support.services import missing, require_broker

# --- brokers ------------------------------------------------------------------------------------


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> str:
    """The brokers that a test runs on; narrow it with @pytest.mark.parametrize("broker", [...], indirect=True)."""
    return request.param


@pytest.fixture
def site_name() -> str:
    """Names queues, exchanges and keys, so that tests that run at the same time do not meet."""
    return f"smoke-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    """What a test has made. Servers end after it: a test that removes one empties this first."""
    sites: list[Site] = []
    yield sites
    close(sites)


def close(sites: list[Site]) -> None:
    while sites:
        sites.pop().close()


@pytest.fixture
def broker_url(broker: str, site_name: str, sites: list[Site]) -> Iterator[str]:
    """The URL of a shared broker; what the site leaves there is removed."""
    url = require_broker(broker)
    yield url
    close(sites)  # a worker that lives declares its queues again
    if broker == "redis":
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(f"{site_name}:*", count=1000):
                client.delete(key)
    else:
        _remove_from_rabbitmq(url, site_name)


def _remove_from_rabbitmq(url: str, name: str) -> None:
    with Connection(url) as connection:
        for queue in (f"celery-{name}", f"durable-{name}", f"foreign-{name}"):
            connection.channel().queue_delete(queue)
        for exchange in (
            f"celery-{name}",
            f"durable-{name}",
            f"foreign-{name}",
            f"events-{name}",
            f"control-{name}.pidbox",
        ):
            connection.channel().exchange_delete(exchange)
        connection.channel().exchange_delete(f"reply.control-{name}.pidbox")


@pytest.fixture
def own_redis(tmp_path: Path, sites: list[Site]) -> Iterator[RedisServer]:
    """A Redis that a test may flush and stop."""
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    server = RedisServer(tmp_path)
    yield server
    close(sites)
    server.proc.clean_up()


@pytest.fixture(params=["postgresql", "mariadb"])
def own_database(request: pytest.FixtureRequest, sites: list[Site]) -> Iterator[PostgresqlCluster | MariadbServer]:
    """A database server that a test may crash."""
    kind = PostgresqlCluster if request.param == "postgresql" else MariadbServer
    if postgresql_programs() is None if kind is PostgresqlCluster else not all(MariadbServer.programs):
        missing(f"a {request.param} of its own", "its programs are not installed")
    server = kind()
    yield server
    close(sites)
    server.clean_up()


# --- sites --------------------------------------------------------------------------------------


database = on_databases("postgresql", "mariadb")


@pytest.fixture
def make_site(tmp_path: Path, site_name: str, sites: list[Site]) -> Callable[..., Site]:
    """A site on the broker and database at these URLs; `bodies_url` and `control_port` are for proxies."""

    def make(broker_url: str, database_url: str, **settings: Any) -> Site:
        options = {key: settings.pop(key) for key in ("control_port", "bodies_url") if key in settings}
        kind = settings.pop("kind", Site)
        sites.append(kind(site_name, tmp_path, broker_url, database_url, settings, **options))
        return sites[-1]

    return make


@pytest.fixture
def site_with(make_site: Callable[..., Site], broker_url: str, store_url: str) -> Callable[..., Site]:
    """Makes a site on the test's broker and database, with settings of its own."""
    return functools.partial(make_site, broker_url, store_url)


@pytest.fixture
def site(site_with: Callable[..., Site]) -> Site:
    """A site on the test's broker and database, with the ordinary settings."""
    return site_with()
