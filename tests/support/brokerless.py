"""Brokers that refuse connections, and a workflow that waits for an approval."""

from __future__ import annotations

import socket
from typing import Any

from celery_durable import Durable, Step, WorkflowEvent


def a_refused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


REFUSED = ["redis", "amqp"]


def approval(durable: Durable) -> Any:
    @durable.workflow(name="approval")
    def approval(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.wait_for_event("wait", "approval").payload

    return approval
