"""What Flower shows of this package: a search for an instance finds it, with the outcome of the pass."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.smoke.proc import free_port, until
from tests.smoke.site import Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("flower")


@pytest.mark.parametrize(("broker", "database"), [("redis", "postgresql"), ("rabbitmq", "postgresql")], indirect=True)
def test_flower_shows_workflow_instance_and_what_came_of_it(site: Site) -> None:
    port = free_port()
    flower = site.flower(port)
    site.beat(wait=False)
    site.worker("--task-events")
    flower.wait_for_log("Connected to ")

    def tasks() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/tasks", timeout=5) as answer:
                return dict(json.load(answer))
        except urllib.error.URLError:
            return {}

    instance = site.create("nap", 0.2)
    assert instance.result("30 seconds") == "rested"
    shown = until("both passes in Flower", lambda: _both(tasks(), instance.id))
    assert re.fullmatch(r"'waiting until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC'", shown[0]["result"])
    assert shown[1]["result"] == "'complete'"
    for task in shown:
        assert task["name"] == "durable:nap"
        assert task["args"] == f"('nap', '{instance.id}', 1)"
        assert task["kwargs"] == "{}"
        assert task["state"] == "SUCCESS"
        assert task["uuid"].startswith(f"nap:{instance.id}:1:")
    site.finish()


def _both(tasks: dict[str, Any], instance_id: str) -> list[Any] | None:
    """The passes over an instance that did something, in order; superfluous messages are nobody's business."""
    ours = [task for task in tasks.values() if instance_id in task["uuid"] and not _is_noop(task)]
    done = sorted((task for task in ours if task["state"] == "SUCCESS"), key=lambda task: task["succeeded"])
    return done if len(done) == 2 else None


def _is_noop(task: dict[str, Any]) -> bool:
    return str(task["result"]).startswith("'noop")
