"""A workflow that waits for an approval."""

from __future__ import annotations

from typing import Any

import pydantic

from celery_durable import EventTimeout, Step, WorkflowEvent
from tests.support.world import FlowControl, World


class Approval(pydantic.BaseModel):
    approved: bool
    by: str


class Refusal(pydantic.BaseModel):
    by: str


def define_order(world: World) -> FlowControl:
    """A workflow that waits for one approval, for a minute."""

    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        try:
            approval = step.wait_for_event("approval", "approval", timeout=60)
        except EventTimeout as exc:
            return f"{exc}"
        return [approval.type, approval.payload, approval.timestamp.isoformat()]

    return order
