"""What the search for lost tasks needs of Celery: where a task's messages go, and a marker that goes there too."""

from __future__ import annotations

import json
import logging
from typing import Any

from celery import Celery

from celery_durable.model import OutboxKind, OutboxMessage
from celery_durable.tasks.lost.search import Destination
from celery_durable.tasks.publishing.publisher import Publisher
from celery_durable.tasks.publishing.report import SendState

logger = logging.getLogger("celery_durable.lost")


class CeleryMessageBroker:
    """The messages of one app. ``marker``: the name of the task that a marker is a message of."""

    def __init__(self, app: Celery, publisher: Publisher, marker: str) -> None:
        self._app, self._publisher, self._marker = app, publisher, marker

    def destination(self, body: str) -> Destination | None:
        """Where a stored task's message goes, as Celery routes it now; None for an exchange without a known queue."""
        content = json.loads(body)
        name = content["name"]
        task: Any = self._app.tasks.get(name)
        # What Task.apply_async starts from.
        options = {**(task._get_exec_options() if task is not None else {}), **content["options"]}  # noqa: SLF001
        try:
            routed = self._app.amqp.router.route(options, name, content["args"], content["kwargs"], task)
        except Exception as exc:  # noqa: BLE001  # no such queue, or a router of the application's that fails
            logger.debug("Where task %r goes is unknown: %s", name, exc)
            return None
        queue = self._queue(routed)
        priority = routed.get("priority") or self._app.conf.task_default_priority or 0
        return None if queue is None else Destination(queue, int(priority))

    def _queue(self, routed: dict[str, Any]) -> str | None:
        exchange, key = routed.get("exchange"), routed.get("routing_key")
        if not exchange:
            queue = routed.get("queue")
            return None if queue is None else str(queue.name)
        wanted = (getattr(exchange, "name", exchange), key)
        bound = [each for each in self._app.amqp.queues.values() if (each.exchange.name, each.routing_key) == wanted]
        return str(bound[0].name) if len(bound) == 1 else None

    def send_marker(self, id_: str, to: Destination) -> bool:
        """Send a marker, under its own id; False where the broker did not take it."""
        options = {"queue": to.queue, "priority": to.priority}
        body = json.dumps({"args": [], "kwargs": {}, "options": options})
        (state,) = self._publisher.send([OutboxMessage(id_, OutboxKind.TASK, self._marker, body)]).states
        return state in (SendState.SENT, SendState.UNKNOWN)

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait; None: unknown."""
        return self._publisher.queue_length(queue)
