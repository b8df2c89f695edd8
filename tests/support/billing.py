"""A child for the tests of parents."""

from __future__ import annotations

from typing import Any

import pydantic

from celery_durable import Step, WorkflowEvent
from tests.support.world import World


class Bill(pydantic.BaseModel):
    cents: int


def deploy_billing(world: World) -> Any:
    """Register a workflow that waits for its payment and fails if that is nothing."""

    @world.workflow
    def billing(event: WorkflowEvent[Bill], step: Step) -> Bill:
        paid = step.wait_for_event("payment", "paid").payload
        if not paid:
            raise KeyError("no payment")
        return Bill(cents=event.payload.cents + paid)

    return billing
