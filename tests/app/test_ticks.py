"""Durable.tick: passes in the caller's process, for deployments that cron drives; beside workers and other ticks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from celery_durable import Durable, Status, Step, WorkflowEvent
from celery_durable.model import RunRef
from celery_durable.store.runs import claims
from celery_durable.store.runs.claims import ClaimExpired, ClaimRequest
from tests.conftest import MovableRuntime
from tests.support.databases import on_databases
from tests.support.world import World


class Site:
    """An app whose messages nobody reads."""

    def __init__(self, url: str, runtime: MovableRuntime) -> None:
        self.app = Celery("site", broker="memory://", set_as_current=False)
        self.app.conf.durable_database_url = url
        self.clock = runtime
        self.durable = Durable(self.app, runtime=runtime)
        self.ran: list[str] = []
        self.ready = threading.Event()

        @self.durable.workflow(name="count")
        def count(event: WorkflowEvent[int], step: Step) -> int:
            for number in range(event.payload or 0):
                step.do(f"step {number}", self.ran.append, f"{event.instance_id} {number}")
            return len(self.ran)

        @self.durable.workflow(name="pairs")
        def pairs(event: WorkflowEvent[None], step: Step) -> None:
            for number in range(3):
                step.gather(*(step.submit(f"{name} {number}", self.ran.append, name) for name in ("left", "right")))

        @self.durable.workflow(name="nap")
        def nap(event: WorkflowEvent[None], step: Step) -> None:
            step.sleep("nap", "1 hour")
            step.do("after", self.ran.append, event.instance_id)

        @self.durable.workflow(name="family")
        def family(event: WorkflowEvent[None], step: Step) -> None:
            step.child("child", self.durable.workflows["nap"], id="kid")

    def create(self, workflow: str, params: Any, id: str) -> Any:
        return self.durable.workflows[workflow].create(params, id=id)

    def status(self, workflow: str, id: str) -> str:
        return self.durable.workflows[workflow].get(id).status().status


database = on_databases("sqlite", "postgresql", "mariadb")


@pytest.fixture
def site(store_url: str) -> Iterator[Site]:
    site = Site(store_url, MovableRuntime())
    yield site
    site.durable.close()
    site.app.close()


def test_a_tick_advances_what_is_due_at_once_and_answers_with_the_passes(site: Site) -> None:
    for number in range(3):
        site.create("count", 2, f"c-{number}")
    site.create("nap", None, "n-1")
    assert site.durable.tick() == 4
    assert [site.status("count", f"c-{number}") for number in range(3)] == [Status.COMPLETE] * 3
    assert site.status("nap", "n-1") == Status.WAITING
    assert site.durable.tick() == 0
    site.clock.advance(3599)
    assert site.durable.tick() == 0
    site.clock.advance(1)
    assert site.durable.tick() == 1
    assert site.status("nap", "n-1") == Status.COMPLETE


def test_a_tick_ends_after_so_many_instances(site: Site) -> None:
    for number in range(5):
        site.create("count", 1, f"c-{number}")
    assert [site.durable.tick(max_instances=2) for _ in range(4)] == [2, 2, 1, 0]


def test_a_pass_ends_after_siblings_that_together_exceed_the_number_of_steps(site: Site) -> None:
    site.create("pairs", None, "p-1")
    assert site.durable.tick(max_steps=2) == 1  # one commit counts the attempts of both, one more records each
    assert len(site.ran) == 2
    assert site.status("pairs", "p-1") == Status.ACTIVE


def test_a_pass_ends_after_so_many_steps_and_the_next_tick_goes_on(site: Site) -> None:
    site.create("count", 5, "c-1")
    site.create("count", 1, "c-2")
    assert site.durable.tick(max_steps=2) == 2
    assert site.ran == ["c-1 0", "c-1 1", "c-2 0"]
    assert site.status("count", "c-2") == Status.COMPLETE
    assert [site.durable.tick(max_steps=2) for _ in range(3)] == [1, 1, 0]
    assert site.ran[3:] == ["c-1 2", "c-1 3", "c-1 4"]
    assert site.status("count", "c-1") == Status.COMPLETE


def test_a_paused_instance_is_left_alone(site: Site) -> None:
    site.create("count", 1, "c-1").pause()
    assert site.durable.tick() == 0
    site.durable.workflows["count"].get("c-1").resume()
    assert site.durable.tick() == 1


def test_a_tick_takes_over_from_a_dead_worker_once_it_was_looked_at_for_a_leases_time(site: Site) -> None:
    handle = site.create("count", 1, "c-1")
    row = site.durable.internals.operations.queries.get("count", handle.id).instance
    store, lease = site.durable.internals.store, site.durable.internals.settings.lease
    request = ClaimRequest(row.ref, token="dead", task_id="dead", node="dead", lease=lease)
    claim = store.transact(lambda tx: claims.claim(tx, request))
    assert not isinstance(claim, ClaimExpired | None)
    passes = []
    for _ in range(8):
        site.clock.advance(10.5)
        passes.append(site.durable.tick())
    assert sum(passes) == 1
    assert passes.index(1) >= 4  # the lease, and as long again
    assert handle.status().status == Status.COMPLETE


def test_ticks_at_the_same_time_run_each_step_once(site: Site) -> None:
    for number in range(12):
        site.create("count", 3, f"c-{number}")
    with ThreadPoolExecutor(4) as threads:
        ticks = [threads.submit(site.durable.tick, max_instances=20) for _ in range(4)]
        passes = [tick.result(timeout=50) for tick in ticks]
    assert sum(passes) == 12
    assert sorted(site.ran) == sorted(f"c-{number} {step}" for number in range(12) for step in range(3))


def test_only_a_run_that_this_process_executed_counts_as_a_pass(site: Site) -> None:
    site.create("nap", None, "n-1")
    advance = functools.partial(site.durable.internals.runner.advance, task_id="t", node="n")
    results = [advance(RunRef("nap", "n-1", 1)), advance(RunRef("nap", "n-1", 1)), advance(RunRef("napp", "n-1", 1))]
    assert [result.was_executed for result in results] == [True, False, False]
    assert site.durable.tick() == 0


def test_a_dispatcher_waits_ten_times_as_long_as_it_took_to_find_out_what_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old snapshot that a transaction keeps makes that slow. It must not fill the database's time."""
    seconds, cost = 0.0, 0.0

    def look() -> float:
        nonlocal seconds
        seconds += cost
        return seconds

    monkeypatch.setattr(world.sweeper._runtime, "monotonic", look)
    pauses = []
    for cost in (0.0, 0.03, 30.0):  # noqa: B007  # the clock moves so far with each look
        world.sweeper.seconds_to_next()
        pauses.append(round(world.sweeper.pause_seconds, 3))
    assert pauses == [0.0, 0.3, 1.0]


def test_a_tick_ends_the_children_of_a_terminated_run(site: Site) -> None:
    family = site.create("family", None, "f-1")
    site.durable.tick()
    site.durable.tick()
    assert site.status("nap", "kid") == "waiting"
    family.terminate()
    site.clock.advance(60)
    site.durable.tick()
    assert site.status("nap", "kid") == "terminated"
