"""What does not take messages now: the broker, or single queues, each left alone for ever longer (LAW 7).

While an outage of the broker is on record no caller waits for it: the sending thread looks in the background whether
it answers again, and only then is a message given to it.
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
"""The longest rests. They begin with 1 s and double. A broker's is short, since nobody waits for its next trial, and a
fail-over has to be noticed soon."""
_PROBE_SECONDS = 6.0
_SAY_AGAIN_SECONDS = 60.0


@dataclass(slots=True)
class _Record:
    outage: Outage
    began: float
    retry_at: float
    said_at: float
    answers: bool = False
    """The broker answers again; no message has left yet."""
    probe_until: float = 0.0


class CircuitBreakers:
    """The outages of one process; None is the broker itself, else a queue's name."""

    def __init__(self, runtime: Runtime, broker: Callable[[], str]) -> None:
        self._runtime, self._broker = runtime, broker
        self._records: dict[str | None, _Record] = {}
        self._lock = threading.Lock()

    def outages(self) -> dict[str | None, Outage]:
        with self._lock:
            return {queue: record.outage for queue, record in self._records.items()}

    def refuses(self, queue: str) -> bool:
        """Whether this queue has refused messages and is left alone."""
        record = self._records.get(queue)
        return record is not None and self._runtime.monotonic() < record.retry_at

    def is_open(self) -> bool:
        """Whether the broker is left alone: nobody waits for it."""
        record = self._records.get(None)
        return record is not None and not record.answers

    def should_probe(self) -> bool:
        """Whether the caller is to have the broker tried; says so to one caller at a time."""
        now = self._runtime.monotonic()
        with self._lock:
            record = self._records.get(None)
            if record is None or record.answers or now < max(record.retry_at, record.probe_until):
                return False
            record.probe_until = now + _PROBE_SECONDS  # a probe that hangs is given up
            return True

    def answered(self) -> None:
        """The broker answers a probe: the next message shows whether it takes any."""
        with self._lock:
            if record := self._records.get(None):
                record.answers = True

    def failed(self, queue: str | None, error: str) -> None:
        """Something was not taken: leave the broker, or this queue, alone for a while."""
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
        """A message was taken."""
        if queue in self._records:
            with self._lock:
                record = self._records.pop(queue, None)
            if record is not None:
                length = self._runtime.monotonic() - record.began
                text = "%s takes messages again after %.0f s, %s failures"
                logger.info(text, record.outage.where, length, record.outage.failures)

    def forked(self) -> None:
        """In a child: whoever held the lock, or was about to look, is not here."""
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
