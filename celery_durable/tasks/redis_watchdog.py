"""A worker on Redis that stopped consuming: found, and made to consume again, without a new connection (LAW 8).

A message whose acknowledgement fails keeps its place among those that a worker may hold at a time, for good:
`kombu.transport.redis.QoS.ack` removes it from Redis first and from the places afterwards, and `Message.ack_log_error`
only logs. While all places are taken Celery does not read the connection. So a worker without remote control and
gossip, which has no other connection whose end would be seen, never consumes again when Redis is back.

The failed acknowledgement is what tells that worker from one that is merely full: Redis closes idle connections too
(its ``timeout``), and Celery opens another as soon as it has a free place. To connect anew then, as for a lost
connection, would restore what the worker holds and so run its late-acknowledged tasks a second time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery_durable.tasks.fork_safety import ForkSafeThread

logger = logging.getLogger("celery_durable.tasks")

_Acknowledge = Callable[[], object]


class RedisWatchdog(ForkSafeThread):
    """Repeats the acknowledgements that Redis did not take, where they keep a full worker from consuming."""

    def __init__(self) -> None:
        super().__init__()
        self._qos: Any = None
        self._failed: dict[str, _Acknowledge] = {}
        self._thread: threading.Thread | None = None

    def watch(self, consumer: Any) -> None:
        """Remember what fails from now on. Each new connection has places of its own, and forgets those of the last."""
        self._qos, self._failed = None, {}
        if consumer.connection is None or consumer.connection.transport.driver_type != "redis":
            return
        self._qos = consumer.task_consumer.channel.qos
        for name in ("ack", "reject"):
            setattr(self._qos, name, _remembering(getattr(self._qos, name), self._failed))

    def check(self) -> None:
        """Repeat what failed if the worker has no free place; called by Celery's event loop, which must not wait."""
        if not self._failed or self._qos.can_consume() or (self._thread is not None and self._thread.is_alive()):
            return
        self.reset_fork_lock()
        self._thread = threading.Thread(
            target=self._repeat, args=(self._failed,), name="durable-redis-watchdog", daemon=True
        )
        self._thread.start()

    def _repeat(self, failed: dict[str, _Acknowledge]) -> None:
        with self.fork_lock:
            repeated = 0
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
                "This worker had stopped consuming: Redis had not taken %s, which kept a place among the messages that "
                "the worker may hold. This is repeated now, and the worker consumes again.",
                "1 acknowledgement" if repeated == 1 else f"{repeated} acknowledgements",
            )


def _remembering(method: Callable[..., object], failed: dict[str, _Acknowledge]) -> Callable[..., object]:
    """The same method of one QoS, which other threads may call; what it raises goes on to Celery."""

    def call(delivery_tag: str, *args: Any, **kwargs: Any) -> object:
        try:
            return method(delivery_tag, *args, **kwargs)
        except Exception:
            failed[delivery_tag] = lambda: method(delivery_tag, *args, **kwargs)
            raise

    return call
