"""Workflows whose steps have limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from celery_durable import Limit, Step, StepConfig, WorkflowEvent
from celery_durable.model import RunRef
from celery_durable.operations.limit_queue import LimitQueue
from tests.support.world import World


def holds(world: World) -> list[tuple[str, str]]:
    """Who has or awaits what: instance and state, in the order of the queue."""
    h, i = world.store.tables.hold.c, world.store.tables.instance.c
    query = sa.select(i.instance_id, h.state).join(world.store.tables.instance, i.id == h.instance_pk)
    return [tuple(row) for row in world.rows(query.order_by(h.seq, h.name))]


def serve(world: World) -> None:
    """Run the job once, as a dispatcher does each second."""
    LimitQueue(world.store, world.settings, world.messages.extend).run_job()


class Bodies:
    """The bodies of a world, which record who runs, and do what a test gives them for an instance."""

    def __init__(self, world: World) -> None:
        self.world, self.ran, self.running, self.most = world, list[str](), set[str](), 0
        self.during: dict[str, Callable[[], object]] = {}

    def __call__(self, id: str) -> str:
        self.running.add(id)
        self.most = max(self.most, len(self.running))
        self.ran.append(id)
        try:
            self.during.pop(id, lambda: None)()
        finally:
            self.running.discard(id)
        return id

    def pass_over(self, *ids: str) -> None:
        """Advance other instances, each on a worker of its own."""
        for each in ids:
            self.world.new_worker().advance(RunRef("order", each, 1))


@pytest.fixture
def bodies(world: World) -> Bodies:
    return Bodies(world)


def define(world: World, bodies: Bodies, *limits: Limit, name: str = "order", **config: object):
    @world.workflow(name=name)
    def order(event: WorkflowEvent, step: Step):
        return step.do("call", StepConfig(limits=limits, **config), bodies, event.instance_id)

    return order
