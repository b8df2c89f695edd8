"""The destination of a stored task: the queue to which Celery routes it now, and its priority there."""

from __future__ import annotations

import json
import logging
from typing import Any

from celery import Celery

logger = logging.getLogger("celery_durable.lost")

Destination = tuple[str, int]


def find_destination(app: Celery, body: str) -> Destination | None:
    """Return the destination of an encoded task; None if it is not one known queue."""
    content = json.loads(body)
    name = content["name"]
    task: Any = app.tasks.get(name)
    # Task.apply_async starts from these options too.
    options = {**(task._get_exec_options() if task is not None else {}), **content["options"]}  # noqa: SLF001
    try:
        routed = app.amqp.router.route(options, name, content["args"], content["kwargs"], task)
    except Exception as exc:  # noqa: BLE001  # the queue does not exist, or a router of the application fails
        logger.debug("The destination of task %r is unknown: %s", name, exc)
        return None
    queue = _find_queue(app, routed)
    return None if queue is None else (queue, int(routed.get("priority") or app.conf.task_default_priority or 0))


def _find_queue(app: Celery, routed: dict[str, Any]) -> str | None:
    exchange, key = routed.get("exchange"), routed.get("routing_key")
    if not exchange:
        queue = routed.get("queue")
        return None if queue is None else str(queue.name)
    wanted = (getattr(exchange, "name", exchange), key)
    bound = [each for each in app.amqp.queues.values() if (each.exchange.name, each.routing_key) == wanted]
    return str(bound[0].name) if len(bound) == 1 else None
