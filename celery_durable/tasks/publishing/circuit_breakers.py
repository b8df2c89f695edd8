"""Circuit breakers: pause sending to a broker or a queue that does not take messages, each time for longer (LAW 7).

Meanwhile no caller waits for the broker. The sending thread probes it; an answer lets messages be sent again.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing.report import BrokerOutage

logger = logging.getLogger("celery_durable.tasks")

MAX_BROKER_PAUSE_SECONDS, MAX_QUEUE_PAUSE_SECONDS = 5.0, 30.0
"""The longest pauses; they start at 1 s. No caller waits for probes of the broker, and a fail-over is noticed soon."""
_PROBE_TIMEOUT_SECONDS = 6.0
_LOG_INTERVAL_SECONDS = 60.0


@dataclass(slots=True)
class _Record:
    outage: BrokerOutage
    started_at: float
    retry_at: float
    logged_at: float
    has_answered_probe: bool = False
    """The broker has answered a probe, but no message has been sent yet."""
    probe_until: float = 0.0


class CircuitBreakers:
    """The outages that one process knows, by the queue's name; the key None is the broker itself."""

    def __init__(self, runtime: Runtime, broker: Callable[[], str]) -> None:
        self._runtime, self._broker = runtime, broker
        self._records: dict[str | None, _Record] = {}
        self._lock = threading.Lock()

    def outages(self) -> dict[str | None, BrokerOutage]:
        with self._lock:
            return {queue: record.outage for queue, record in self._records.items()}

    def is_paused(self, queue: str) -> bool:
        """Whether this queue has refused messages and its pause has not ended."""
        record = self._records.get(queue)
        return record is not None and self._runtime.monotonic() < record.retry_at

    def is_open(self) -> bool:
        """Whether sending to the broker is paused; then no caller waits for it."""
        record = self._records.get(None)
        return record is not None and not record.has_answered_probe

    def should_probe(self) -> bool:
        """Whether the caller has to start a probe of the broker; True for one caller at a time."""
        now = self._runtime.monotonic()
        with self._lock:
            record = self._records.get(None)
            if record is None or record.has_answered_probe or now < max(record.retry_at, record.probe_until):
                return False
            record.probe_until = now + _PROBE_TIMEOUT_SECONDS  # after this time another probe replaces one that hangs
            return True

    def record_probe_answer(self) -> None:
        """Record that the broker answered a probe; the next message shows whether it takes messages."""
        with self._lock:
            if record := self._records.get(None):
                record.has_answered_probe = True

    def record_failure(self, queue: str | None, error: str) -> None:
        """Record a failure, and pause sending to this queue, or to the broker if ``queue`` is None."""
        now = self._runtime.monotonic()
        with self._lock:
            record = self._records.get(queue)
            if record is None:
                where = self._broker() if queue is None else queue
                outage = BrokerOutage(where, self._runtime.wall_clock(), error, 0)
                record = self._records[queue] = _Record(outage, started_at=now, retry_at=now, logged_at=now)
                self._log_start(queue, outage)
            failures = record.outage.failures + 1
            record.outage = dataclasses.replace(record.outage, error=error, failures=failures)
            longest = MAX_BROKER_PAUSE_SECONDS if queue is None else MAX_QUEUE_PAUSE_SECONDS
            record.retry_at = now + self._runtime.add_jitter(min(longest, 2.0 ** min(failures - 1, 10)))
            record.has_answered_probe, record.probe_until = False, 0.0
            if now - record.logged_at >= _LOG_INTERVAL_SECONDS:
                record.logged_at = now
                logger.warning(
                    "%s still takes no messages after %.0f s: %s", record.outage.where, now - record.started_at, error
                )

    def record_success(self, queue: str | None) -> None:
        """Record that a message was taken, which ends the outage."""
        if queue in self._records:
            with self._lock:
                record = self._records.pop(queue, None)
            if record is not None:
                seconds = self._runtime.monotonic() - record.started_at
                text = "%s takes messages again after %.0f s, %s failures"
                logger.info(text, record.outage.where, seconds, record.outage.failures)

    def reset_in_child(self) -> None:
        """Reset the lock and the probes in a forked child, which has no other threads that could finish them."""
        self._lock = threading.Lock()
        for record in self._records.values():
            record.probe_until = 0.0

    @staticmethod
    def _log_start(queue: str | None, outage: BrokerOutage) -> None:
        if queue is None:
            text = "The broker %s takes no messages; due work is published when it takes messages again: %s"
        else:
            text = "Queue %r takes no messages; other queues are not affected. Retries follow with growing pauses: %s"
        logger.warning(text, outage.where, outage.error)
