"""The nodes that are processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_docker_tools.wrappers import container

from tests.pytest_celery.local import LocalRedis
from tests.smoke.proc import RedisServer, until
from tests.support.services import missing


@pytest.mark.parametrize("is_inside", [False, True])
def test_the_nodes_use_their_own_redis_also_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_inside: bool
) -> None:
    """Inside a container, pytest-celery takes the port of the image, at which a server of the machine may listen."""
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    monkeypatch.setattr(container, "tests_inside_container", lambda: is_inside)
    node = LocalRedis.start(tmp_path)
    try:
        until("Redis listens", lambda: "Ready to accept connections" in node.logs())
        assert f"port={node.port}." in node.logs()
        assert node.celeryconfig["url"] == f"redis://127.0.0.1:{node.port}/0"
    finally:
        node.teardown()
