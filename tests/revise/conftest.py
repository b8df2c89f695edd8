from __future__ import annotations

import pytest

from celery_durable import Step, WorkflowEvent
from tests.support.databases import on_databases
from tests.support.instances import FlowControl
from tests.support.rewinds import say
from tests.support.world import World

database = on_databases("sqlite", "postgresql")


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def abc(world: World, ran: list[str]) -> FlowControl:
    """a, b, c, one after the other; each says in which run it ran."""

    @world.workflow(name="order")
    def order(event: WorkflowEvent, step: Step):
        return [step.do(name, say, ran, f"{name}{event.run_number}") for name in "abc"]

    return order
