"""Processes say that they live: workers and dispatchers, through outages and forks, at no cost to work."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, signals

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.model import Heartbeat, Outage
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats
from celery_durable.tasks import SWEEP
from celery_durable.tasks.heartbeats import SWEEP_TASK, ProcessHeartbeat
from tests.support.celery_apps import MakeApp
from tests.support.embedded import until, worker
from tests.tasks.test_dispatcher import beat, nap


class Clock(Runtime):
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


def rows(durable: Durable) -> tuple[Heartbeat, ...]:
    return durable.internals.store.read(heartbeats.read)[1]


def heart_of(durable: Durable, clock: Clock) -> ProcessHeartbeat:
    return ProcessHeartbeat(
        lambda: durable.internals.store, clock, queues=lambda: ["durable"], workflows=lambda: ["order"]
    )


def count_writes(durable: Durable) -> list[str]:
    said: list[str] = []

    def note(*args: Any) -> None:
        if "workflow_heartbeat" in args[2] and not args[2].startswith("SELECT"):
            said.append(args[2].split()[0])

    sa.event.listen(durable.internals.store.engine, "before_cursor_execute", note)
    return said


# --- where --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatcher", ["worker", "beat"])
def test_a_worker_says_what_it_consumes_and_knows_until_it_ends(make_app: MakeApp, dispatcher: str) -> None:
    app = make_app(durable_dispatcher=dispatcher)
    durable = Durable(app)
    nap(durable)
    with worker(app, hostname="w@here"):
        until(lambda: [found.swept_at is not None for found in rows(durable)] == [dispatcher == "worker"])
        (found,) = rows(durable)
        assert (found.kind, found.node, found.pid) == ("worker", "w@here", os.getpid())
        assert set(found.queues) == {app.conf.task_default_queue, app.conf.durable_queue}
        assert "nap" in found.workflows
    until(lambda: not rows(durable))
    threads = {"durable-heartbeat", "durable-dispatcher"}
    until(lambda: threads.isdisjoint(thread.name for thread in threading.enumerate()))


def test_a_beat_says_that_it_sweeps(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(durable_dispatcher="beat")
    durable = Durable(app)
    with beat(app, tmp_path):
        until(lambda: [found.swept_at is not None for found in rows(durable)] == [True])
    (found,) = rows(durable)
    assert (found.kind, found.queues, found.next_sweep_at) == ("dispatcher", (), None)
    durable.close()
    assert rows(durable) == ()


def test_a_worker_and_a_beat_of_one_process_are_one_worker_that_sweeps(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(durable_dispatcher="beat")
    durable = Durable(app)
    with beat(app, tmp_path), worker(app, hostname="w@here"):
        until(lambda: [(found.kind, found.swept_at is not None) for found in rows(durable)] == [("worker", True)])
        assert rows(durable)[0].node == "w@here"


def test_the_sweep_task_says_that_due_work_was_looked_for(make_app: MakeApp, tmp_path: Path) -> None:
    workers = make_app(durable_dispatcher="none")
    beats = make_app(durable_dispatcher="worker", durable_queue=workers.conf.durable_queue)
    durable = Durable(workers)
    Durable(beats)
    queue = {"queue": workers.conf.durable_queue}
    beats.conf.beat_schedule = {SWEEP: {"task": SWEEP, "schedule": 0.05, "options": queue}}
    with worker(workers), beat(beats, tmp_path):
        until(lambda: SWEEP_TASK in {found.id for found in rows(durable)})
    (found,) = [found for found in rows(durable) if found.id == SWEEP_TASK]
    assert (found.kind, found.swept_at) == ("dispatcher", found.seen_at)


# --- what it costs ------------------------------------------------------------------------------


def test_a_heart_writes_once_in_ten_seconds(durable: Durable) -> None:
    clock, said = Clock(), count_writes(durable)
    heartbeat = heart_of(durable, clock)
    assert heartbeat.beat() == 10
    assert said == []  # not before it begins
    heartbeat.register("worker", "w@here")
    assert heartbeat.beat() == 10
    assert said == ["INSERT"]


def test_a_heart_beats_early_for_the_first_check_and_for_a_change_of_the_outages(durable: Durable) -> None:
    heartbeat = heart_of(durable, Clock())
    heartbeat.register("worker", "w@here")
    heartbeat.start()
    until(lambda: rows(durable))
    assert rows(durable)[0].swept_at is None
    heartbeat.record_check(seconds_ago=0.0, seconds_to_next=1.0)
    until(lambda: rows(durable)[0].swept_at)
    outage = Outage("database", "database", Runtime().wall_clock(), "OSError: gone", 1)
    heartbeat.record_outages([outage])
    until(lambda: rows(durable)[0].outages)
    said = count_writes(durable)
    for _ in range(400):
        heartbeat.record_check(seconds_ago=0.0, seconds_to_next=1.0)
        heartbeat.record_outages([dataclasses.replace(outage, failures=2)])
    heartbeat.stop()
    assert said == ["DELETE"]


def test_a_dispatcher_that_cannot_read_what_is_due_says_so_in_its_heartbeat(make_app: MakeApp) -> None:
    durable = Durable(app := make_app(durable_dispatcher="worker"))
    emission = durable.internals.store.tables.emission.name

    def rename(old: str, new: str) -> None:
        with durable.internals.store.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    def outages() -> list[str]:
        return [each.what for beat in rows(durable) for each in beat.outages]

    with worker(app):
        until(lambda: rows(durable) and rows(durable)[0].swept_at)
        rename(emission, "away")
        until(lambda: outages() == ["database"])
        rename("away", emission)
        until(lambda: outages() == [])


def test_a_dispatcher_removes_old_rows_each_ten_minutes(durable: Durable) -> None:
    clock, said = Clock(), count_writes(durable)
    heartbeat = heart_of(durable, clock)
    heartbeat.register("dispatcher", "beat@here")
    for _ in range(120):
        heartbeat.record_check(seconds_ago=0.0, seconds_to_next=1.0)
        clock.seconds += heartbeat.beat()
    assert (said.count("INSERT"), said.count("DELETE")) == (120, 2)


def test_a_pass_writes_no_heartbeat(durable: Durable, app: Celery) -> None:
    app.conf.task_always_eager = True
    said = count_writes(durable)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> int:
        return step.do("one", lambda: 1)

    assert order.create().result("5 seconds") == 1
    assert said == []


# --- what it must not do ------------------------------------------------------------------------


def test_a_heartbeat_that_cannot_be_written_is_told_once_and_fails_nobody(
    durable: Durable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_durable")
    clock = Clock()
    heartbeat = heart_of(durable, clock)
    heartbeat.register("worker", "w@here")
    with durable.internals.store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE workflow_heartbeat RENAME TO elsewhere")
    for _ in range(3):
        clock.seconds += heartbeat.beat()
    heartbeat.stop()
    told = [record for record in caplog.records if "heartbeat" in record.message]
    assert [(record.levelname, record.message.partition(":")[0]) for record in told] == [
        ("WARNING", "This process cannot write its heartbeat and will retry")
    ]
    with durable.internals.store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO workflow_heartbeat")


def test_a_worker_runs_without_the_table_of_heartbeats(make_app: MakeApp) -> None:
    app = make_app(durable_dispatcher="worker")
    durable = Durable(app)
    workflow = nap(durable)
    with durable.internals.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE workflow_heartbeat")
    with worker(app):
        assert workflow.create().result("20 seconds") == "rested"


def test_a_worker_without_a_database_starts_all_the_same(make_app: MakeApp) -> None:
    app = make_app(durable_database_url=None, durable_dispatcher="beat")
    Durable(app)

    @app.task
    def other() -> str:
        return "done"

    ran: list[str] = []
    signals.task_success.connect(lambda result, **_: ran.append(result), sender=other, weak=False)
    with worker(app):
        other.delay()
        until(lambda: ran == ["done"])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_no_heartbeat_before_it_begins_its_own(durable: Durable) -> None:
    clock = Clock()
    heartbeat = heart_of(durable, clock)
    heartbeat.register("worker", "w@here")
    heartbeat.start()
    until(lambda: rows(durable))
    clock.seconds += 100
    child = os.fork()
    if not child:
        heartbeat.beat()
        heartbeat.stop()
        heartbeat.register("dispatcher", "beat@there")
        heartbeat.record_check(seconds_ago=0.0, seconds_to_next=1.0)
        heartbeat.beat()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    by_node = {found.node: found for found in rows(durable)}
    assert set(by_node) == {"w@here", "beat@there"}
    assert (by_node["w@here"].pid, by_node["beat@there"].pid) == (os.getpid(), child)
    heartbeat.stop()
    assert [found.node for found in rows(durable)] == ["beat@there"]
