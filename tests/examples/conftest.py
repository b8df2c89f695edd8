"""Where the examples find their servers and folders."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator

import pytest
import redis

# Before the first import of an example: each takes its database and broker from here.
_FOLDER = tempfile.mkdtemp(prefix="durable-examples-")
os.environ["DURABLE_EXAMPLES_DIR"] = _FOLDER
for _name in ("CELERY_BROKER_URL", "DURABLE_DATABASE_URL", "PAYMENTS_DATABASE_URL"):
    os.environ.pop(_name, None)

from tests.support.services import require_broker  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def folder() -> Iterator[None]:
    """Removed at the end, also in processes that leave without ceremony, as those of pytest-xdist do."""
    yield
    shutil.rmtree(_FOLDER, ignore_errors=True)


atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)  # if none of our tests ran


@pytest.fixture
def broker() -> Iterator[dict[str, str]]:
    """The environment of a worker on a Redis with keys of the test's own."""
    url = require_broker("redis")
    prefix = f"shop-{uuid.uuid4().hex[:10]}:"
    yield {"CELERY_BROKER_URL": url, "SHOP_KEY_PREFIX": prefix}
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{prefix}*", count=1000):
            client.delete(key)
