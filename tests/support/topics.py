"""A workflow that waits for a topic, and what the tables of topics hold."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable import EventTimeout, Step, WorkflowEvent
from tests.support.world import FlowControl, World

TOPIC = "prices/eur.usd"


def define_watch(world: World) -> FlowControl:
    """A workflow that waits for one price, for a minute."""

    @world.workflow
    def watch(event: WorkflowEvent[Any], step: Step) -> Any:
        try:
            price = step.wait_for_topic("next price", TOPIC, timeout=60)
        except EventTimeout as exc:
            return str(exc)
        return [price.type, price.payload, price.timestamp.isoformat()]

    return watch


def waiting(world: World, topic: str = TOPIC) -> list[str]:
    """The instances that wait for a topic."""
    return [waiter.instance_id for waiter in world.operations.topics.waiters(topic).items]


def left(world: World) -> int:
    """How many emissions and waiters the tables hold."""
    t = world.store.tables
    return sum(len(world.rows(sa.select(table))) for table in (t.emission, t.topic_wait))
