"""The search's access to Celery: the destination of a task's messages, and the length of its queue."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_durable.tasks.lost.search import Destination

logger = logging.getLogger("celery_durable.lost")


class CeleryMessageBroker:
    """The message broker of one app. ``queue_length``: how many messages wait in a queue; None if unknown."""

    def __init__(self, app: Celery, queue_length: Callable[[str], int | None]) -> None:
        self._app, self.queue_length = app, queue_length

    def destination(self, body: str) -> Destination | None:
        """The destination to which Celery routes a stored task now; None if it is not one known queue."""
        content = json.loads(body)
        name = content["name"]
        task: Any = self._app.tasks.get(name)
        # Task.apply_async starts from these options too.
        options = {**(task._get_exec_options() if task is not None else {}), **content["options"]}  # noqa: SLF001
        try:
            routed = self._app.amqp.router.route(options, name, content["args"], content["kwargs"], task)
        except Exception as exc:  # noqa: BLE001  # the queue does not exist, or a router of the application fails
            logger.debug("The destination of task %r is unknown: %s", name, exc)
            return None
        queue = self._queue(routed)
        priority = routed.get("priority") or self._app.conf.task_default_priority or 0
        return None if queue is None else (queue, int(priority))

    def find_queue(self, body: str) -> str | None:
        """The queue to which Celery routes a stored task now; None if it is not one known queue."""
        found = self.destination(body)
        return None if found is None else found[0]

    def _queue(self, routed: dict[str, Any]) -> str | None:
        exchange, key = routed.get("exchange"), routed.get("routing_key")
        if not exchange:
            queue = routed.get("queue")
            return None if queue is None else str(queue.name)
        wanted = (getattr(exchange, "name", exchange), key)
        bound = [each for each in self._app.amqp.queues.values() if (each.exchange.name, each.routing_key) == wanted]
        return str(bound[0].name) if len(bound) == 1 else None
