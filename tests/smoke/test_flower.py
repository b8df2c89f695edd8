"""What Flower shows of this package: a search for an instance finds it, with the outcome of the pass."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable.errors import WorkflowFailed
from tests.smoke.proc import free_port, until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("flower")


@pytest.mark.parametrize(("broker", "database"), [("redis", "postgresql"), ("rabbitmq", "postgresql")], indirect=True)
def test_flower_shows_workflow_instance_and_what_came_of_it(site: Site) -> None:
    tasks = watch(site)
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


@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize(
    ("fails_tasks", "state"),
    [(True, "FAILURE"), (False, "SUCCESS")],
)
def test_flower_shows_a_failed_run_as_a_failed_task_if_that_is_set(
    site_with: Callable[..., Site], fails_tasks: bool, state: str
) -> None:
    site = site_with(durable_failed_runs_fail_tasks=fails_tasks)
    tasks = watch(site)
    instance = site.create("refuse", None)
    with pytest.raises(WorkflowFailed):
        instance.result("30 seconds")

    def find_ended() -> dict[str, Any] | None:
        ours = [task for task in tasks().values() if instance.id in task["uuid"] and not _is_noop(task)]
        return next((task for task in ours if task["state"] in ("SUCCESS", "FAILURE")), None)

    shown = until("the pass in Flower", find_ended)
    assert shown["state"] == state
    if fails_tasks:
        assert shown["exception"].startswith("WorkflowFailed(")
        assert shown["retries"] in (None, 0)
    else:
        assert shown["result"].startswith("'errored: ")
    site.check()


def watch(site: Site) -> Callable[[], dict[str, Any]]:
    """Start Flower, beat and a worker with events; returns a function that reads the tasks from Flower's API."""
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

    return tasks


def _both(tasks: dict[str, Any], instance_id: str) -> list[Any] | None:
    """The passes over an instance that did something, in order; superfluous messages are nobody's business."""
    ours = [task for task in tasks.values() if instance_id in task["uuid"] and not _is_noop(task)]
    done = sorted((task for task in ours if task["state"] == "SUCCESS"), key=lambda task: task["succeeded"])
    return done if len(done) == 2 else None


def _is_noop(task: dict[str, Any]) -> bool:
    return str(task["result"]).startswith("'noop")
