"""The search's access to Celery: the destination of a task's messages, markers to it, and the length of its queue."""

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
    """The message broker of one app. ``marker``: the name of the task whose messages serve as markers."""

    def __init__(self, app: Celery, publisher: Publisher, marker: str) -> None:
        self._app, self._publisher, self._marker = app, publisher, marker

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
        return None if queue is None else Destination(queue, int(priority))

    def find_queue(self, body: str) -> str | None:
        """The queue to which Celery routes a stored task now; None if it is not one known queue."""
        found = self.destination(body)
        return None if found is None else found.queue

    def _queue(self, routed: dict[str, Any]) -> str | None:
        exchange, key = routed.get("exchange"), routed.get("routing_key")
        if not exchange:
            queue = routed.get("queue")
            return None if queue is None else str(queue.name)
        wanted = (getattr(exchange, "name", exchange), key)
        bound = [each for each in self._app.amqp.queues.values() if (each.exchange.name, each.routing_key) == wanted]
        return str(bound[0].name) if len(bound) == 1 else None

    def send_marker(self, id_: str, to: Destination) -> bool:
        """Send a marker with this id; returns False if the broker certainly did not take it."""
        options = {"queue": to.queue, "priority": to.priority}
        body = json.dumps({"args": [], "kwargs": {}, "options": options})
        (state,) = self._publisher.send([OutboxMessage(id_, OutboxKind.TASK, self._marker, body)]).states
        return state in (SendState.SENT, SendState.UNKNOWN)

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait in the queue; None if unknown."""
        return self._publisher.queue_length(queue)
