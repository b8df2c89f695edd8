"""Tasks of steps that are lost with a worker, a machine or a queue: found, and sent again."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import WorkflowInstance
from tests.smoke import flows
from tests.smoke.proc import Proc, RedisServer, until
from tests.smoke.site import PAIRS, POSTGRESQL, REDIS_AND_POSTGRESQL, REDIS_IN_GATE, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

PROCESSES = 2
"""Of each worker: so many bodies a kill interrupts at most."""
HELD = PROCESSES * (1 + 4)
"""What a worker holds at most, started or not."""
ALL_DONE_SECONDS = 90.0
"""After the last kill; with what a busy machine may add."""
SLACK = 2.0
SETTINGS = {"worker_prefetch_multiplier": 4, "durable_grace_seconds": 10}
"""Workers prefetch, as they do by default: what a kill takes with it is more than what runs.

A sender of 200 messages may need longer than the half second of other tests, and then a sweep sends copies.
"""
STORM_SECONDS, STORM_RUNS, BEAT_SECONDS = 90, 390, 5


def kill(worker: Proc) -> float:
    """SIGKILL to a worker and all its processes, as when its machine dies."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.process.wait(30)
    return time.monotonic()


def notes(site: Site) -> dict[int, list[str]]:
    """The task ids under which the bodies of each item have run, by number."""
    b, found = flows.bodies.c, defaultdict(list)
    with site.engine.connect() as connection:
        for row in connection.execute(sa.select(b.run, b.instance).where(b.step == "note")):
            found[row.run].append(row.instance)
    return found


def wait_for_notes(site: Site, count: int) -> None:
    """Wait for so many bodies, and until all tasks are sent: a sender that is killed may repeat 200 of them."""
    outbox = site.durable.internals.store.tables.outbox

    def have_run() -> bool:
        with site.engine.connect() as connection:
            unsent = connection.execute(sa.select(sa.func.count()).select_from(outbox)).scalar_one()
        return not unsent and len(notes(site)) >= count

    until(f"{count} bodies", have_run, pause=0.1)


def await_result(instance: WorkflowInstance[Any], killed_at: float) -> list[Any]:
    """What came of it; in time."""
    left = SLACK * ALL_DONE_SECONDS - (time.monotonic() - killed_at)
    result: list[Any] = instance.result(max(1.0, left))
    print(f"all done {time.monotonic() - killed_at:.1f} s after the last kill")
    return result


def check_runs(site: Site, count: int, most_again: int) -> None:
    """Every item ran, under one id; only what a kill may have hit ran again."""
    found = notes(site)
    assert sorted(found) == list(range(count))
    assert {number: ids for number, ids in found.items() if len(set(ids)) > 1} == {}
    again = Counter({number: len(ids) - 1 for number, ids in found.items() if len(ids) > 1})
    assert again.total() <= most_again, again


@pytest.fixture
def site_with(make_site: Callable[..., Site], broker_url: str, store_url: str) -> Callable[..., Site]:
    return functools.partial(make_site, broker_url, store_url, **SETTINGS)


@pytest.mark.parametrize(
    ("broker", "database", "task", "pool"),
    [
        pytest.param("redis", "postgresql", "media.note", "prefork", marks=pytest.mark.gate),
        pytest.param("rabbitmq", "mariadb", "media.note_late", "threads", marks=pytest.mark.gate),
        ("redis", "postgresql", "media.note_late", "threads"),
        ("rabbitmq", "mariadb", "media.note", "prefork"),
    ],
    indirect=["broker", "database"],
)
def test_a_worker_that_is_killed_loses_no_item_of_a_map(site_with: Callable[..., Site], task: str, pool: str) -> None:
    site = site_with()
    site.beat()
    workers = [site.worker("--pool", pool) for _ in range(2)]
    instance = site.create("notes", {"task": task, "seconds": 0.05, "count": 300})
    wait_for_notes(site, 60)
    killed_at = kill(workers[0])
    assert await_result(instance, killed_at) == list(range(300))
    check_runs(site, 300, PROCESSES)


@pytest.mark.parametrize("kills", [1, 5])
@PAIRS
def test_kills_amidst_a_map_with_a_short_timeout_cost_no_item_its_time(
    site_with: Callable[..., Site], kills: int
) -> None:
    """What a worker had taken in its last second is in no list that it has written."""
    site = site_with()
    site.beat()
    workers = [site.worker(wait=False) for _ in range(kills + 1)]
    for worker in workers:
        worker.wait_for_log(r"ready\.")
    options = {"timeout": "30 seconds"}
    instance = site.create("notes", {"task": "media.note", "seconds": 0.05, "count": 300, "options": options})
    killed_at = 0.0
    for nth in range(kills):
        wait_for_notes(site, 30 * (nth + 1))
        killed_at = kill(workers[nth])
    assert await_result(instance, killed_at) == list(range(300))
    check_runs(site, 300, kills * PROCESSES)


@REDIS_AND_POSTGRESQL
def test_with_on_lost_fail_exactly_what_was_lost_fails(site_with: Callable[..., Site]) -> None:
    """What waited in the queue goes on at the other worker."""
    site = site_with()
    site.beat()
    workers = [site.worker() for _ in range(2)]
    instance = site.create(
        "notes", {"task": "media.note", "seconds": 0.2, "count": 100, "options": {"on_lost": "fail"}}
    )
    wait_for_notes(site, 20)
    killed_at = kill(workers[0])
    result = await_result(instance, killed_at)
    lost = [number for number, each in enumerate(result) if each == "TaskLost"]
    assert [each for each in result if each != "TaskLost"] == [n for n in range(100) if n not in lost]
    assert 1 <= len(lost) <= HELD
    assert all(len(ids) == 1 for ids in notes(site).values())


@PAIRS
def test_a_storm_of_kills_ends_no_run_although_beat_restarts_all_the_time(site_with: Callable[..., Site]) -> None:
    """No dispatcher lives as long as it takes to notice that a worker is dead."""
    site = site_with(durable_lost_limit=20)
    workers, beat = [site.worker(wait=False) for _ in range(3)], site.beat()
    given = {"task": "media.note", "seconds": 0.1, "count": 4, "options": {"timeout": "3 minutes"}}
    began, runs, under_way = time.monotonic(), 0, list[WorkflowInstance[Any]]()
    while runs < STORM_RUNS or under_way:
        until_restart = time.monotonic() + BEAT_SECONDS
        while time.monotonic() < until_restart:
            while runs < min(STORM_RUNS, (time.monotonic() - began) / STORM_SECONDS * STORM_RUNS):
                under_way.append(site.create("notes", given))
                runs += 1
            time.sleep(0.05)
        kill(beat)
        beat = site.beat()
        if runs < STORM_RUNS:
            kill(workers.pop(0))
            workers.append(site.worker(wait=False))
        under_way = [run for run in under_way if not has_ended(run)]


def has_ended(run: WorkflowInstance[Any]) -> bool:
    """Whether a run has ended well; one that has ended otherwise is a failure."""
    found = run.status()
    assert found.status != "complete" or found.output == [0, 1, 2, 3]
    return found.status == "complete"


@POSTGRESQL
def test_a_redis_that_came_back_empty_gets_all_tasks_again(
    make_site: Callable[..., Site], own_redis: RedisServer, store_url: str
) -> None:
    site = make_site(own_redis.url, store_url, **SETTINGS)
    site.beat()
    workers = [site.worker() for _ in range(2)]
    instance = site.create("notes", {"task": "media.note", "seconds": 0.2, "count": 60})
    wait_for_notes(site, 10)
    for worker in workers:
        kill(worker)
    own_redis.flush()
    killed_at = time.monotonic()
    for _ in range(2):
        site.worker(wait=False)
    assert await_result(instance, killed_at) == list(range(60))
    check_runs(site, 60, 2 * PROCESSES)


@REDIS_IN_GATE
def test_a_task_that_kills_its_process_each_time_is_given_up(site_with: Callable[..., Site]) -> None:
    """Its neighbours go on, and those that its worker held are not lost."""
    site = site_with()
    site.beat()
    site.worker()
    instance = site.create("errands", {"tasks": {"die": None, "double": None}})
    got, _ = instance.result("90 seconds")
    assert got["die"] == ["TaskLost", "Celery task 'media.die' was lost 3 times: the process that ran it died"]
    assert got["double"] == 42
    with contextlib.suppress(AssertionError):
        site.finish()
