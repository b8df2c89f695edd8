"""Heartbeats: a row per process, renewed by one statement, removed when it is old."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable.model import Heartbeat, Outage, RunRef, TaskReference
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.store.heartbeats import HeartbeatUpdate
from tests.store.world import World

WORKER = HeartbeatUpdate("id-1", "worker", "celery@a", 7, queues=["celery", "durable"], workflows=["order", "größe"])
DISPATCHER = HeartbeatUpdate(
    "id-2", "dispatcher", "beat@a", 8, swept_ago=timedelta(seconds=1), wakes_in=timedelta(seconds=5)
)


def beat(world: World, update: HeartbeatUpdate) -> None:
    world.store.transact_once(lambda tx: heartbeats.upsert(tx, update))


def read(world: World) -> tuple[Heartbeat, ...]:
    now, found = world.store.read(heartbeats.read)
    assert now == world.now
    return found


def test_a_heartbeat_writes_the_facts_of_a_process_and_renews_them(world: World) -> None:
    started = world.now
    beat(world, WORKER)
    world.advance(10)
    beat(world, DISPATCHER)
    beat(
        world, HeartbeatUpdate("id-1", "worker", "celery@a", 7, queues=["durable"], workflows=["order"], pool="gevent")
    )
    mine, dispatcher = read(world)
    assert mine == Heartbeat(
        "id-1", "worker", "celery@a", 7, ("durable",), ("order",), started, world.now, None, None, pool="gevent"
    )
    assert (mine.runs_workflows, dispatcher.runs_workflows) == (False, False)
    assert dispatcher == Heartbeat(
        "id-2",
        "dispatcher",
        "beat@a",
        8,
        (),
        (),
        world.now,
        world.now,
        world.now - timedelta(seconds=1),
        world.now + timedelta(seconds=5),
    )


def test_outages_are_read_by_the_clock_of_the_database_until_they_are_over(world: World) -> None:
    elsewhere = world.now + timedelta(days=400)  # the process's own clock is wrong, so only how long counts
    refused = Outage("queue", "größe", elsewhere, "PreconditionFailed: (406) 'x'", 7)
    away = Outage("broker", "redis://shop", elsewhere, "e" * 5000, 1)
    lasting = [(refused, timedelta(seconds=90)), (away, timedelta(seconds=4))]
    beat(world, replace(DISPATCHER, outages=lasting))
    said = (
        replace(refused, since=world.now - timedelta(seconds=90)),
        replace(away, since=world.now - timedelta(seconds=4), error="e" * 1000),
    )
    world.advance(10)
    world.store.transact_once(lambda tx: heartbeats.renew_worker(tx, DISPATCHER.id, held=None, is_current=True))
    assert [found.outages for found in read(world)] == [said]
    beat(world, DISPATCHER)
    assert [found.outages for found in read(world)] == [()]


def test_heartbeat_facts_read_back_as_written(world: World) -> None:
    beat(world, WORKER)
    (found,) = read(world)
    assert (found.queues, found.workflows) == (("celery", "durable"), ("order", "größe"))


def test_a_process_is_silent_when_it_has_missed_a_heartbeat(world: World) -> None:
    beat(world, DISPATCHER)
    world.advance(19)
    (found,) = read(world)
    assert not found.is_silent(world.now)
    world.advance(1)
    assert found.is_silent(world.now)


def test_a_process_sweeps_until_it_has_not_swept_for_three_heartbeats(world: World) -> None:
    beat(world, DISPATCHER)
    world.advance(29)
    (found,) = read(world)
    assert found.sweeps(world.now)
    world.advance(1)  # it had swept a second before
    assert not found.sweeps(world.now)


def test_a_process_that_ends_deletes_its_row(world: World) -> None:
    beat(world, WORKER)
    beat(world, DISPATCHER)
    world.store.transact_once(lambda tx: heartbeats.delete(tx, "id-1"))
    assert [found.id for found in read(world)] == ["id-2"]


def test_rows_of_the_dead_are_removed_after_an_hour(world: World) -> None:
    beat(world, WORKER)
    world.advance(1)
    beat(world, DISPATCHER)
    world.advance(3599.5)
    world.store.transact_once(heartbeats.delete_old)
    assert [found.id for found in read(world)] == ["id-2"]


def test_a_heartbeat_is_one_statement(world: World) -> None:
    said: list[str] = []
    sa.event.listen(world.store.engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    beat(world, WORKER)
    beat(world, WORKER)
    assert [text.split()[0] for text in said if not text.startswith("BEGIN")] == ["INSERT", "INSERT"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_attempt_is_made_once(store: Store) -> None:
    tries: list[int] = []

    def lost(_: object) -> None:
        tries.append(1)
        raise sa.exc.OperationalError("x", None, Exception("gone"), connection_invalidated=True)

    with pytest.raises(sa.exc.OperationalError):
        store.transact_once(lost)
    assert tries == [1]


# --- the tasks that a worker holds ---------------------------------------------------------------

HELD = TaskReference("db", RunRef("order", "größe", 1), "item:1:pages:7:1", "t" * 32, "celery", 2)


def renew(world: World, held: str | None = None, **state: bool) -> bool:
    state = {"is_current": True} | state
    return world.store.transact_once(lambda tx: heartbeats.renew_worker(tx, WORKER.id, held=held, **state))


def worker(world: World) -> heartbeats.WorkerRow:
    now, (found,) = world.store.read(heartbeats.read_workers)
    assert now == world.now
    return found


def test_a_worker_has_listed_its_tasks_as_of_its_last_report(world: World) -> None:
    assert not renew(world)
    beat(world, WORKER)
    beat(world, DISPATCHER)
    started = world.now
    assert worker(world) == heartbeats.WorkerRow(
        "id-1", "celery@a", frozenset({"celery", "durable"}), started, None, None, is_stuck=False, has_list=False
    )
    world.advance(2)
    assert renew(world, heartbeats.encode_held([HELD]))
    reported = world.now
    world.advance(2)
    assert renew(world, is_current=False)  # what came since may not be in the list
    found = worker(world)
    assert (found.seen_at, found.listed_at, found.has_list) == (world.now, started, True)
    renew(world)
    assert worker(world).listed_at == world.now
    assert reported < world.now
    assert world.store.read(lambda tx: heartbeats.read_held(tx, ["id-1", "id-2"])) == {"id-1": [HELD]}
    world.store.transact_once(lambda tx: heartbeats.forget_held(tx, "id-1"))
    assert world.store.read(lambda tx: heartbeats.read_held(tx, ["id-1"])) == {}


def test_a_worker_whose_loop_is_stuck_says_so_until_it_turns(world: World) -> None:
    beat(world, WORKER)
    renew(world, is_current=False, is_stuck=True)
    assert worker(world).is_stuck
    renew(world)
    assert not worker(world).is_stuck


def test_a_worker_is_silent_until_it_is_seen_again(world: World) -> None:
    beat(world, WORKER)
    world.advance(5)
    for seconds in (6, 4):  # the first time it was seen meanwhile
        since = world.now - timedelta(seconds=seconds)
        world.store.transact_once(lambda tx, since=since: heartbeats.record_silence(tx, ["id-1"], since=since))
    assert worker(world).silent_at == world.now
    world.advance(1)
    renew(world)
    assert worker(world).silent_at is None
