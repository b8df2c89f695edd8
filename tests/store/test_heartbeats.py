"""Heartbeats: a row per process, renewed by one statement, removed when it is old."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable.model import Heartbeat
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.store.heartbeats import Pulse
from tests.store.world import World

WORKER = Pulse("id-1", "worker", "celery@a", 7, queues=["celery", "durable"], workflows=["order", "größe"])
DISPATCHER = Pulse("id-2", "dispatcher", "beat@a", 8, swept_ago=timedelta(seconds=1), wakes_in=timedelta(seconds=5))


def beat(world: World, pulse: Pulse) -> None:
    world.store.attempt(lambda tx: heartbeats.upsert(tx, pulse))


def read(world: World) -> tuple[Heartbeat, ...]:
    now, found = world.store.read(heartbeats.read)
    assert now == world.now
    return found


def test_a_process_says_what_it_is_and_says_so_again(world: World) -> None:
    begun = world.now
    beat(world, WORKER)
    world.advance(10)
    beat(world, DISPATCHER)
    beat(world, Pulse("id-1", "worker", "celery@a", 7, queues=["durable"], workflows=["order"]))
    mine, dispatcher = read(world)
    assert mine == Heartbeat("id-1", "worker", "celery@a", 7, ("durable",), ("order",), begun, world.now, None, None)
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


def test_what_is_known_is_read_as_it_was_written(world: World) -> None:
    beat(world, WORKER)
    (found,) = read(world)
    assert (found.queues, found.workflows) == (("celery", "durable"), ("order", "größe"))


def test_a_process_is_live_until_it_has_missed_three_heartbeats(world: World) -> None:
    beat(world, DISPATCHER)
    world.advance(29)
    (found,) = read(world)
    assert found.is_live(world.now)
    assert found.sweeps(world.now)
    world.advance(1)  # it had swept a second before
    assert found.is_live(world.now)
    assert not found.sweeps(world.now)
    world.advance(1)
    assert not found.is_live(world.now)


def test_a_process_that_ends_takes_its_row_with_it(world: World) -> None:
    beat(world, WORKER)
    beat(world, DISPATCHER)
    world.store.attempt(lambda tx: heartbeats.delete(tx, "id-1"))
    assert [found.id for found in read(world)] == ["id-2"]


def test_rows_of_the_dead_are_removed_after_an_hour(world: World) -> None:
    beat(world, WORKER)
    world.advance(1)
    beat(world, DISPATCHER)
    world.advance(3599.5)
    world.store.attempt(heartbeats.delete_old)
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
        store.attempt(lost)
    assert tries == [1]
