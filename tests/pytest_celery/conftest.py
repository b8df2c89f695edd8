"""The nodes of pytest-celery: a Redis, a database, and a worker of the application of docker-compose.yml.

``--durable-nodes=local`` (the default) has them as processes of this machine; ``--durable-nodes=docker`` in
containers: the image of the Dockerfile, and those that docker-compose.yml names.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import sqlalchemy as sa
from celery import Celery, _state
from pytest_celery import CeleryTestWorker, CeleryWorkerContainer, RedisTestBroker
from pytest_docker_tools import build, container, fetch, fxtr

from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from tests.pytest_celery.local import LocalRedis, LocalWorker
from tests.smoke.proc import ROOT, RedisServer, until
from tests.support.services import missing

COMMAND = ["celery", "-A", "examples.order_approval", "worker", "-Q", "celery,durable", "--loglevel", "INFO"]
LEASE = {"DURABLE_LEASE_SECONDS": "3"}


@pytest.fixture(scope="session")
def durable_nodes(request: pytest.FixtureRequest) -> str:
    """Where the nodes run."""
    nodes: str = request.config.getoption("--durable-nodes")
    if nodes == "docker":
        _skip_without_engine()
    elif RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    return nodes


def _skip_without_engine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # docker-py leaves the socket open on which nobody answered
        try:
            docker.from_env().close()
            why = None
        except docker.errors.DockerException as error:
            why = str(error)
        gc.collect()
    if why is not None:
        pytest.skip(f"NOT RUN IN CONTAINERS: no Docker engine answers: {why}")


# --- what pytest-celery asks for ----------------------------------------------------------------


@pytest.fixture
def celery_broker(durable_nodes: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisTestBroker]:
    """One Redis, in place of every broker that pytest-celery knows."""
    if durable_nodes == "docker":
        yield request.getfixturevalue("celery_redis_broker")
        return
    broker = RedisTestBroker(LocalRedis.start(tmp_path))
    broker.ready()
    yield broker
    broker.teardown()


@pytest.fixture
def celery_backend_cluster() -> None:
    """None: durable workflows need no result backend."""


@pytest.fixture
def celery_worker(
    durable_nodes: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    worker_environment: dict[str, str],
    celery_setup_app: Celery,
) -> Iterator[CeleryTestWorker]:
    if durable_nodes == "docker":
        node = request.getfixturevalue("durable_worker")
    else:
        node = LocalWorker.start(COMMAND, tmp_path, worker_environment)
    worker = CeleryTestWorker(node, app=celery_setup_app)
    worker.ready()
    yield worker
    worker.teardown()


@pytest.fixture
def celery_setup_app(celery_setup_app: Celery) -> Iterator[Celery]:
    """As pytest-celery makes it; what it makes the current app is so for these tests only."""
    before = _state._tls.current_app
    yield celery_setup_app
    celery_setup_app.close()
    _state._set_current_app(before)


# --- the application ----------------------------------------------------------------------------


@pytest.fixture
def worker_environment(
    durable_nodes: str, request: pytest.FixtureRequest, tmp_path: Path, celery_worker_cluster_config: dict[str, Any]
) -> dict[str, str]:
    """What the worker finds in its environment, its tables being made."""
    if durable_nodes == "docker":
        url = request.getfixturevalue("postgres_url")
        own = {}
    else:
        url = f"sqlite:///{tmp_path}/durable.sqlite3"
        own = {"DURABLE_EXAMPLES_DIR": str(tmp_path / "examples")}
        (tmp_path / "examples").mkdir()
        _migrate(url)
    initial = {**LEASE, **own, "DURABLE_DATABASE_URL": url}
    return CeleryWorkerContainer.initial_env(celery_worker_cluster_config, initial)


def _migrate(url: str) -> None:
    store = Store(url)
    migrate.upgrade(store)
    store.close()


# --- containers; made only when a test asks for them --------------------------------------------

postgres_image = fetch(repository="postgres:16")
durable_postgres = container(
    image="{postgres_image.id}",
    environment={"POSTGRES_DB": "durable", "POSTGRES_HOST_AUTH_METHOD": "trust"},
    ports={"5432/tcp": None},
    network="{default_pytest_celery_network.name}",
)


@pytest.fixture
def postgres_url(durable_postgres: Any) -> str:
    """The database as workers see it; its tables are made from here."""
    host, port = durable_postgres.get_addr("5432/tcp")
    ours = f"postgresql+psycopg://postgres@{host}:{port}/durable"
    until("PostgreSQL answers", lambda: _answers(ours), pause=0.5)
    _migrate(ours)
    return f"postgresql+psycopg://postgres@{durable_postgres.ips.primary}:5432/durable"


def _answers(url: str) -> bool:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    try:
        engine.connect().close()
    except sa.exc.OperationalError:
        return False
    return True


durable_image = build(path=os.fspath(ROOT), tag="celery-durable-example")
durable_worker = container(
    image="{durable_image.id}",
    environment=fxtr("worker_environment"),
    network="{default_pytest_celery_network.name}",
    wrapper_class=CeleryWorkerContainer,
    command=COMMAND,
    timeout=60,
)
