"""Workers that report to the database which tasks they hold, and a workflow whose tasks they hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_durable.model import OutboxMessage, TaskReference
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.store.lost_tasks import SentTask
from celery_durable.tasks.lost.search import LostTaskSearch
from tests.support.flows import flow_of
from tests.support.world import World

app = Celery("mill", set_as_current=False)


@app.task(name="mill.grind", shared=False)
def grind(number: int) -> int:
    """Never run here."""


class Broker:
    """One queue; its length is what the test says."""

    length: int | None = 0


def search(world: World, broker: Broker, report_lost: Callable[..., int], **bounds: int) -> LostTaskSearch:
    """A search that asks this broker."""
    doors: dict[str, Any] = {"find_destination": lambda _: ("q", 0), "queue_length": lambda _: broker.length}
    return LostTaskSearch(world.store, world.settings, world._web.runtime, report_lost, **doors, **bounds)


class Peer:
    """A worker that reports what it holds, every second."""

    ids = itertools.count(1)

    def __init__(self, world: World, node: str, *held: OutboxMessage, queue: str = "q", reports: bool = True) -> None:
        self.world, self.held = world, list(held)
        self.id = f"{node}-{next(self.ids)}"
        self.turns, self.is_stuck = True, False
        pulse = HeartbeatUpdate(self.id, "worker", node, 1, queues=[queue])
        world.store.transact_once(lambda tx: heartbeats.upsert(tx, pulse))
        for _ in range(2 * reports):
            self.report()

    def report(self) -> None:
        held = heartbeats.encode_held([reference(each) for each in self.held])
        state = {"is_current": self.turns, "is_stuck": self.is_stuck}
        self.world.store.transact_once(lambda tx: heartbeats.renew_worker(tx, self.id, held=held, **state))


@contextmanager
def outage(world: World) -> Iterator[None]:
    """The database is away."""

    def refuse(*_: Any) -> None:
        raise sa.exc.OperationalError("SELECT 1", {}, OSError("the server is away"))

    sa.event.listen(world.store.engine, "before_cursor_execute", refuse)
    try:
        yield
    finally:
        sa.event.remove(world.store.engine, "before_cursor_execute", refuse)


def reference(message: OutboxMessage) -> TaskReference:
    found = TaskReference.read(message.content["reference"])
    assert found is not None
    return found


def out(world: World, age: float = 0) -> list[SentTask]:
    """The tasks that were sent this many seconds ago, or earlier."""
    before = world.now - timedelta(seconds=age)
    tasks, has_more = world.store.read(lambda tx: lost_tasks.read_sent(tx, before=before, limit=100))
    assert not has_more
    return tasks


def start(world: World, count: int = 3, **options: Any) -> None:
    mill = flow_of(
        world, lambda step: step.map("grind", grind.s(), range(count), timeout="3 days", **options), name="mill"
    )
    mill.run()
