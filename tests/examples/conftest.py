"""The examples as an author would test them: real operations and the production runner, on a clock that moves."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

# Before the first import of an example: each takes its database and broker from here.
_FOLDER = tempfile.mkdtemp(prefix="durable-examples-")
os.environ["DURABLE_EXAMPLES_DIR"] = _FOLDER
for _name in ("CELERY_BROKER_URL", "DURABLE_DATABASE_URL", "PAYMENTS_DATABASE_URL"):
    os.environ.pop(_name, None)

from celery_durable import Durable  # noqa: E402
from celery_durable.model import StepStatus, to_us  # noqa: E402
from celery_durable.runtime import Runtime  # noqa: E402
from celery_durable.store.runs import schedule  # noqa: E402
from tests.support.services import require_broker  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def folder() -> Iterator[None]:
    """Removed at the end, also in processes that leave without ceremony, as those of pytest-xdist do."""
    yield
    shutil.rmtree(_FOLDER, ignore_errors=True)


atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)  # if none of our tests ran


class Clock(Runtime):
    def __init__(self) -> None:
        self.now_us = to_us(datetime(2030, 1, 1, tzinfo=UTC))

    def clock(self) -> int:
        return self.now_us


class World:
    """An app without broker and worker: what is published runs at once, in this process (task_always_eager)."""

    def __init__(self, database_url: str) -> None:
        self.app = Celery("world", broker="memory://", set_as_current=False)
        self.app.conf.task_always_eager = True
        self.app.conf.durable_database_url = database_url
        self.runtime = Clock()
        self.durable = Durable(self.app, runtime=self.runtime)

    def workflow(self, name: str) -> Any:
        return self.durable.workflows[name]

    def advance(self, **span: float) -> None:
        """Let this time go by; what comes due meanwhile is dispatched at its time, one after the other."""
        end = self.runtime.now_us + timedelta(**span) // timedelta(microseconds=1)
        while True:
            due_at, _ = self.durable.internals.store.read(schedule.read_next_due)
            if due_at is None or to_us(due_at) > end:
                break
            self.runtime.now_us = max(self.runtime.now_us, to_us(due_at))
            self.durable.internals.sweeper.sweep()
        self.runtime.now_us = end

    @staticmethod
    def completed(handle: Any) -> list[str]:
        return [step.name for step in handle.history().steps if step.status is StepStatus.COMPLETED]


@pytest.fixture
def world(sqlite_template: str, tmp_path: Path) -> Iterator[World]:
    shutil.copy(sqlite_template, tmp_path / "durable.sqlite3")
    world = World(f"sqlite:///{tmp_path}/durable.sqlite3")
    yield world
    world.durable.close()


@pytest.fixture
def broker() -> Iterator[dict[str, str]]:
    """The environment of a worker on a Redis with keys of the test's own."""
    url = require_broker("redis")
    prefix = f"shop-{uuid.uuid4().hex[:10]}:"
    yield {"CELERY_BROKER_URL": url, "SHOP_KEY_PREFIX": prefix}
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{prefix}*", count=1000):
            client.delete(key)
