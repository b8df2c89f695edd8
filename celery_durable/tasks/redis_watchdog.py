"""The Redis watchdog: finds a worker that stopped consuming, and makes it consume again without a new connection.

A message whose acknowledgement fails counts against the worker's prefetch limit forever:
`kombu.transport.redis.QoS.ack` removes it from Redis first and from the count afterwards, and `Message.ack_log_error`
only logs the error. While the limit is reached, Celery does not read the connection, so such a worker never consumes
again when Redis is back (celery/celery#8030, #10205).

The failed acknowledgement distinguishes it from a worker that is merely busy. A reconnect would return the worker's
messages to the queue, and so run late-acknowledged tasks a second time (LAW 8).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from celery_durable import notify
from celery_durable.housekeeping import Job

logger = logging.getLogger("celery_durable.tasks")

_Acknowledge = Callable[[], object]


class RedisWatchdog:
    """Repeats failed acknowledgements if they keep a worker from consuming."""

    def __init__(self) -> None:
        self._qos: Any = None
        self._failed: dict[str, _Acknowledge] = {}
        self._job = Job("durable-redis-watchdog", self._repeat_acknowledgements)

    def watch(self, consumer: Any) -> None:
        """Record failed acknowledgements from now on; called for each new connection, whose prefetch count is new."""
        self._qos, self._failed = None, {}
        if consumer.connection is None or consumer.connection.transport.driver_type != "redis":
            return
        self._qos = consumer.task_consumer.channel.qos
        for name in ("ack", "reject"):
            setattr(self._qos, name, _record_failures(getattr(self._qos, name), self._failed))

    def check(self) -> None:
        """Start to repeat failed acknowledgements if the prefetch limit is reached. Celery's event loop calls it."""
        if self._failed and not self._qos.can_consume() and not self._job.is_started():
            self._job.start()

    def _repeat_acknowledgements(self) -> float:
        failed, repeated = self._failed, 0
        for tag, acknowledge in list(failed.items()):
            try:
                acknowledge()
            except Exception as exc:  # noqa: BLE001  # redis-py's errors, kombu's, the socket's: all mean "not yet"
                logger.debug("Redis still does not take the acknowledgement of %s: %s", tag, exc)
                break
            failed.pop(tag, None)
            repeated += 1
        if repeated:
            logger.warning(
                "This worker had stopped consuming: Redis had not taken %s, which counted against "
                "its prefetch limit. The watchdog has repeated this, and the worker consumes again.",
                "1 acknowledgement" if repeated == 1 else f"{repeated} acknowledgements",
            )
            notify.send_consuming_resumed(repeated)
        return math.inf


def _record_failures(method: Callable[..., object], failed: dict[str, _Acknowledge]) -> Callable[..., object]:
    """Wrap a QoS method, which any thread may call, so that its failures are recorded and still raised."""

    def call(delivery_tag: str, *args: Any, **kwargs: Any) -> object:
        try:
            return method(delivery_tag, *args, **kwargs)
        except Exception:
            failed[delivery_tag] = lambda: method(delivery_tag, *args, **kwargs)
            raise

    return call
