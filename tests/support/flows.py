"""Workflows of a world that are one expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_durable import Step, WorkflowEvent
from tests.support.instances import FlowControl
from tests.support.world import World


def flow_of(world: World, body: Callable[[Step], Any], *, name: str = "order", **options: Any) -> FlowControl:
    """A workflow that returns what ``body`` makes of its steps."""

    @world.workflow(name=name, **options)
    def flow(event: WorkflowEvent[Any], step: Step) -> Any:
        return body(step)

    made: FlowControl = flow
    return made
