"""Why is it not moving? Real processes, of which one is missing, and what `explain` says of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import redis

from celery_durable import WorkflowInstance
from celery_durable.insight.explain import Code, Diagnosis
from celery_durable.store import heartbeats
from tests.smoke.proc import RedisServer, until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.timeout(300),
    REDIS_AND_POSTGRESQL,
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


@pytest.mark.gate
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
def test_a_worker_that_was_killed(site_with: Callable[..., Site]) -> None:
    site = site_with(durable_lease_seconds=2.0)
    worker = site.worker(concurrency=1)
    instance = site.create("chain", {"steps": 1, "hold": 0})
    site.wait_for_body(instance, "book 0")
    until("a renewal has recorded the step", lambda: instance.explain().facts["running"])
    running = wait_for(instance, Code.RUNNING)
    node = running.facts["claimed_by"]
    assert running.sentence.startswith('It runs step "book 0", attempt 1, for ')
    assert f", on {node}" in running.sentence
    assert "; the lease is valid for " in running.sentence
    worker.clean_up()  # and its children
    found = wait_for(instance, Code.LEASE_EXPIRED)
    assert "stopped renewing its lease" in found.sentence
    assert found.actions == ("celery -A <your app> beat",)
    site.let_go()
    site.beat()
    site.worker()
    site.finish()


@pytest.mark.gate
def test_a_beat_that_stops_signs_off(site: Site) -> None:
    beat = site.beat()
    store = site.durable.internals.store
    until("beat has a heartbeat", lambda: store.read(heartbeats.read)[1])
    assert beat.terminate() == 0
    assert store.read(heartbeats.read)[1] == ()


@pytest.mark.slow
def test_a_task_that_no_worker_does_and_a_child_that_takes_its_time(site: Site) -> None:
    site.beat()
    site.worker()
    queue = f"media-{site.config.name}"
    instance = site.create("delegate", queue)
    found = wait_for(instance, Code.TASK_NOT_CONSUMED)
    assert found.sentence.startswith(f"Waits for Celery task double ({found.facts['task_id']}), under way for ")
    assert f"No worker of this app consumes its queue {queue!r}." in found.sentence
    assert found.actions[0] == f"celery -A <your app> worker -Q {queue}"
    site.worker("-Q", queue)
    child = wait_for(instance, Code.WAITING_CHILD)
    assert 'Waits for instance chain/c-1, which is active, at step "chain"; ' in child.sentence
    assert child.actions == ("celery -A <your app> durable explain chain c-1",)
    site.let_go()
    site.finish()
    assert instance.result() == [14, [0]]


@pytest.mark.slow
def test_a_worker_that_is_frozen_while_it_runs_a_step(site_with: Callable[..., Site]) -> None:
    site = site_with(durable_lease_seconds=120.0)
    worker = site.worker(concurrency=1)
    instance = site.create("chain", {"steps": 1, "hold": 0})
    site.wait_for_body(instance, "book 0")
    os.killpg(worker.pid, signal.SIGSTOP)
    found = wait_for(instance, Code.WORKER_SILENT)
    assert re.search(r"But that worker has been silent for 2\d s, since \S+Z: it is frozen or dead", found.sentence)
    assert found.actions == (f"celery -A <your app> inspect ping -d {found.facts['claimed_by']}",)
    os.killpg(worker.pid, signal.SIGCONT)
    wait_for(instance, Code.RUNNING)
    site.let_go()
    site.finish()


@pytest.mark.slow
@pytest.mark.usefixtures("broker")  # by which the module's tests are parametrized
def test_a_broker_that_hangs_and_one_that_is_down(
    own_redis: RedisServer, make_site: Callable[..., Site], store_url: str
) -> None:
    site = make_site(own_redis.url, store_url)
    site.beat()
    os.kill(own_redis.proc.pid, signal.SIGSTOP)
    instance = site.create("nap", 0.1)
    hung = wait_for(instance, Code.BROKER_UNAVAILABLE)
    assert re.search(
        r"but the broker redis://:\*\*@127\.0\.0\.1:\d+/0 has accepted no messages since \S+Z: ", hung.sentence
    )
    assert "It does not answer: check its load" in hung.sentence
    own_redis.stop()
    until("the broker is down", lambda: "Nothing listens there: start the broker" in instance.explain().sentence)
    own_redis.start()
    site.worker()
    site.finish()


@pytest.mark.slow
def test_a_queue_that_is_full(site_with: Callable[..., Site]) -> None:
    site = site_with(durable_queue_high_water=2)
    queue = f"durable-{site.config.name}"
    for _ in range(2):
        site.create("nap", 0.1)  # sent by its creator
    site.beat()
    instance = site.workflow("nap").create(0.1, run_at=datetime.now(UTC) + timedelta(seconds=1))
    site.instances.append(instance)
    found = wait_for(instance, Code.QUEUE_FULL)
    assert f"but queue {queue!r} has been full since " in found.sentence
    assert found.sentence.endswith(
        ": QueueFull: 2 or more messages wait in it (durable_queue_high_water). Start more workers of this queue, or "
        "raise durable_queue_high_water. Until then, work waits in the database. Also, no worker consumes queue "
        f"{queue!r}."
    )
    assert found.actions[0] == f"celery -A <your app> worker -Q {queue}"
    site.worker()
    site.finish()


@pytest.mark.slow
def test_a_queue_that_the_broker_refuses(site: Site, broker_url: str) -> None:
    queue = f"durable-{site.config.name}"
    site.beat()
    with redis.Redis.from_url(broker_url) as client:
        key = f"{site.config.name}:{queue}"
        client.set(key, "other data")
        instance = site.create("nap", 0.1)
        found = wait_for(instance, Code.QUEUE_REFUSED)
        assert f"queue {queue!r}" in found.sentence
        assert "WRONGTYPE" in found.sentence
        assert (
            "The queue's key in Redis is not a list: other data uses that name. Rename one of them." in found.sentence
        )
        client.delete(key)
    site.worker()
    site.finish()
