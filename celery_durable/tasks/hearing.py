"""Whether a worker still hears its broker.

Over Redis, a message whose acknowledgement fails keeps its place among those that a worker may hold at a time
(`kombu.transport.redis.QoS.ack`), and while all places are taken nobody reads the connection. A worker without remote
control and gossip has no other connection whose end would be seen: it stayed deaf when Redis was back, without a word.
"""

from __future__ import annotations

import logging
import select
import socket
from typing import Any

logger = logging.getLogger("celery_durable.tasks")

_ENDED = getattr(select, "POLLRDHUP", 0)  # Linux's; elsewhere it is POLLHUP, which is told unasked


def check_hearing(consumer: Any) -> None:
    """Raise ConnectionError if the consumer's connection is lost where Celery does not look; Celery then connects anew.

    Without a free place only: with one, Celery asks for messages over the connection and sees its end by itself.
    """
    if consumer.connection is None or consumer.connection.transport.driver_type != "redis":
        return
    channel = consumer.task_consumer.channel
    listening = getattr(channel.client, "connection", None)  # none before messages were first asked for
    if listening is None or channel.qos.can_consume():
        return
    if _is_lost(getattr(listening, "_sock", None)):  # redis-py shows it nowhere else
        reason = "The connection to Redis was lost while as many messages were at hand as this worker may hold"
        logger.warning("%s: Celery does not look then, and is told to connect anew", reason)
        raise ConnectionError(reason)


def _is_lost(sock: socket.socket | None) -> bool:
    if sock is None:
        return True
    ends = select.poll()
    ends.register(sock, _ENDED)
    return bool(ends.poll(0))
