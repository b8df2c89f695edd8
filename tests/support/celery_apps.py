"""Celery apps on the memory broker: nothing outside this process, except where a test starts another."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, current_app, signals
from celery._state import _set_current_app, set_default_app

from celery_durable import Durable
from tests.smoke.proc import RedisServer
from tests.support.brokerless import REFUSED, a_refused_port
from tests.support.services import missing

MakeApp = Callable[..., Celery]


@signals.setup_logging.connect
def _leave_logging_alone(**_: Any) -> None:
    """An embedded worker would set the root logger's level for all tests after it."""


@pytest.fixture
def make_app(store_url: str) -> Iterator[MakeApp]:
    """Celery apps on the test's database, each with queues of its own: the memory broker is one per process."""
    made: list[Celery] = []

    def make(**settings: Any) -> Celery:
        unique = uuid.uuid4().hex[:8]
        app = Celery(f"app-{unique}", broker="memory://", set_as_current=False)
        app.conf.update(
            {
                "task_default_queue": f"celery-{unique}",
                "broker_transport_options": {"polling_interval": 0.01},
                "broker_connection_retry_on_startup": True,
                "durable_database_url": store_url,
                "durable_queue": f"durable-{unique}",
                "durable_poll_seconds": 0.02,
                "durable_dispatcher": "worker",
                **settings,
            }
        )
        made.append(app)
        return app

    before = current_app._get_current_object()
    yield make
    for app in made:
        if "durable" in vars(app):
            app.durable.close()
        app.close()
    # Embedded workers make their app the current and the default one.
    set_default_app(before)
    _set_current_app(before)


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app()


@pytest.fixture
def durable(app: Celery) -> Durable:
    return Durable(app)


@pytest.fixture(params=REFUSED)
def brokerless(request: pytest.FixtureRequest, make_app: MakeApp) -> Celery:
    """An app whose broker refuses connections."""
    return make_app(broker_url=f"{request.param}://127.0.0.1:{a_refused_port()}//")


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that a test may flush and stop."""
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    server = RedisServer(tmp_path)
    yield server
    server.proc.clean_up()
