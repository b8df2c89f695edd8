"""Circuit breakers: pause sending to a broker or a queue that does not take messages, each time for longer (LAW 7).

While an outage of the broker is on record, no caller waits for the broker. The sending thread probes it in the
background. Messages are sent again only after the broker has answered a probe.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing.report import Outage

logger = logging.getLogger("celery_durable.tasks")

BROKER_REST_SECONDS, QUEUE_REST_SECONDS = 5.0, 30.0
"""The longest pauses. Pauses start at 1 s and double.

The broker's is short: no caller waits for the next probe, and a fail-over must be noticed soon.
"""
_PROBE_SECONDS = 6.0
_SAY_AGAIN_SECONDS = 60.0


@dataclass(slots=True)
class _Record:
    outage: Outage
    began: float
    retry_at: float
    said_at: float
    answers: bool = False
    """The broker has answered a probe, but no message has been sent yet."""
    probe_until: float = 0.0


class CircuitBreakers:
    """The outages that one process knows, by the queue's name; the key None is the broker itself."""

    def __init__(self, runtime: Runtime, broker: Callable[[], str]) -> None:
        self._runtime, self._broker = runtime, broker
        self._records: dict[str | None, _Record] = {}
        self._lock = threading.Lock()

    def outages(self) -> dict[str | None, Outage]:
        with self._lock:
            return {queue: record.outage for queue, record in self._records.items()}

    def refuses(self, queue: str) -> bool:
        """Whether this queue has refused messages and its pause has not ended."""
        record = self._records.get(queue)
        return record is not None and self._runtime.monotonic() < record.retry_at

    def is_open(self) -> bool:
        """Whether nothing is sent to the broker, so that no caller waits for it."""
        record = self._records.get(None)
        return record is not None and not record.answers

    def should_probe(self) -> bool:
        """Whether the caller has to start a probe of the broker; True for one caller at a time."""
        now = self._runtime.monotonic()
        with self._lock:
            record = self._records.get(None)
            if record is None or record.answers or now < max(record.retry_at, record.probe_until):
                return False
            record.probe_until = now + _PROBE_SECONDS  # after this time another probe replaces one that hangs
            return True

    def answered(self) -> None:
        """Record that the broker answered a probe; the next message shows whether it takes messages."""
        with self._lock:
            if record := self._records.get(None):
                record.answers = True

    def failed(self, queue: str | None, error: str) -> None:
        """Record a failure, and pause sending to this queue, or to the broker if ``queue`` is None."""
        now = self._runtime.monotonic()
        with self._lock:
            record = self._records.get(queue)
            if record is None:
                where = self._broker() if queue is None else queue
                outage = Outage(where, self._runtime.wall_clock(), error, 0)
                record = self._records[queue] = _Record(outage, began=now, retry_at=now, said_at=now)
                self._say_begin(queue, outage)
            failures = record.outage.failures + 1
            record.outage = dataclasses.replace(record.outage, error=error, failures=failures)
            longest = BROKER_REST_SECONDS if queue is None else QUEUE_REST_SECONDS
            record.retry_at = now + self._runtime.spread(min(longest, 2.0 ** min(failures - 1, 10)))
            record.answers, record.probe_until = False, 0.0
            if now - record.said_at >= _SAY_AGAIN_SECONDS:
                record.said_at = now
                logger.warning(
                    "%s still takes no messages after %.0f s: %s", record.outage.where, now - record.began, error
                )

    def succeeded(self, queue: str | None) -> None:
        """Record that a message was taken, which ends the outage."""
        if queue in self._records:
            with self._lock:
                record = self._records.pop(queue, None)
            if record is not None:
                length = self._runtime.monotonic() - record.began
                text = "%s takes messages again after %.0f s, %s failures"
                logger.info(text, record.outage.where, length, record.outage.failures)

    def forked(self) -> None:
        """Reset the lock and the probes in a forked child, which has no other threads that could finish them."""
        self._lock = threading.Lock()
        for record in self._records.values():
            record.probe_until = 0.0

    @staticmethod
    def _say_begin(queue: str | None, outage: Outage) -> None:
        if queue is None:
            text = "The broker %s takes no messages; what is due is sent when it does: %s"
        else:
            text = "Queue %r takes no messages, the others go on; it is tried again ever more rarely: %s"
        logger.warning(text, outage.where, outage.error)
