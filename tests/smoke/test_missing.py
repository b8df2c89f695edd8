"""Why is it not moving? Real processes, of which one is missing, and what `explain` says of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_durable import WorkflowInstance
from celery_durable.explain import Code, Diagnosis
from tests.smoke.proc import until
from tests.smoke.site import Site

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.timeout(300),
    pytest.mark.parametrize(("broker", "database"), [("redis", "postgresql")], indirect=True),
]


def wait_for(instance: WorkflowInstance[object], code: Code) -> Diagnosis:
    found: list[Diagnosis] = []

    def look() -> bool:
        found[:] = [instance.explain()]
        return found[0].code is code

    try:
        until(f"{code} of {instance}", look)
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from None
    return found[0]


def test_without_processes_and_then_with_a_beat_alone(site: Site) -> None:
    queue = f"durable-{site.config.name}"
    instance = site.create("nap", 0.1)
    nobody = wait_for(instance, Code.DUE_NOT_DISPATCHED)
    assert "no message for it has been sent. No dispatcher has been seen: is celery beat running?" in nobody.sentence
    assert nobody.actions == ("celery -A <your app> beat", f"celery -A <your app> worker -Q {queue}")
    site.beat()
    no_worker = wait_for(instance, Code.DISPATCHED_NOT_CLAIMED)
    assert f"but no worker consumes queue {queue!r}." in no_worker.sentence
    site.worker()
    site.finish()
    assert instance.explain().code is Code.DONE


@pytest.mark.slow
def test_a_sleep_that_no_beat_ends(site: Site) -> None:
    worker = site.worker()
    instance = site.create("nap", 1.0)
    assert 'Sleeps at step "nap"; wakes in' in wait_for(instance, Code.SLEEPING).sentence
    overdue = wait_for(instance, Code.DUE_NOT_DISPATCHED)
    assert overdue.actions == ("celery -A <your app> beat",)  # the worker is there
    assert worker.terminate() == 0
    until("the worker's row is gone", lambda: not instance.explain().facts["workers"])
    site.beat()
    site.worker()
    site.finish()


@pytest.mark.slow
def test_a_workflow_that_no_worker_knows(site: Site) -> None:
    @site.durable.workflow(name="unknown-elsewhere")
    def unknown(event: object, step: object) -> None:
        """The workers are built without it."""

    site.beat(wait=False)
    site.worker()
    instance = site.create("unknown-elsewhere")
    found = wait_for(instance, Code.NOT_REGISTERED)
    assert "knows workflow 'unknown-elsewhere'" in found.sentence
    assert found.facts["known_workflows"] == sorted(vars(site.app)["durable"].workflows.keys() - {"unknown-elsewhere"})
    instance.terminate()
    site.instances.clear()


@pytest.mark.slow
def test_a_worker_that_was_killed(make_site: Callable[..., Site], broker_url: str, store_url: str) -> None:
    site = make_site(broker_url, store_url, durable_lease_seconds=2.0)
    worker = site.worker(concurrency=1)
    instance = site.create("chain", {"steps": 1, "hold": 0})
    site.wait_for_body(instance, "book 0")
    assert wait_for(instance, Code.RUNNING).facts["claimed_by"].endswith("@smoke")
    worker.clean_up()  # and its children
    found = wait_for(instance, Code.LEASE_EXPIRED)
    assert "stopped renewing its lease" in found.sentence
    assert found.actions == ("celery -A <your app> beat",)
    site.let_go()
    site.beat()
    site.worker()
    site.finish()


@pytest.mark.slow
def test_a_task_that_no_worker_does_and_a_child_that_takes_its_time(site: Site) -> None:
    site.beat()
    site.worker()
    queue = f"media-{site.config.name}"
    instance = site.create("delegate", queue)
    until("its message has left", lambda: wait_for(instance, Code.WAITING_TASKS).facts["tasks_unsent"] == 0)
    found = instance.explain()
    assert found.sentence.startswith(f"Waits for Celery task double ({found.facts['task_id']}), under way for ")
    site.worker("-Q", queue)
    child = wait_for(instance, Code.WAITING_CHILD)
    assert 'Waits for instance "c-1" of workflow "chain", which is active, at step "chain"; ' in child.sentence
    assert child.actions == ("celery -A <your app> durable explain chain c-1",)
    site.let_go()
    site.finish()
    assert instance.result() == [14, [0]]
