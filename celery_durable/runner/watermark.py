"""The watermark of each queue: the send time of the newest dispatch message that led to a claim.

Dispatchers conclude from it that older messages of the queue are lost. Each process writes it at most every few
seconds, so most passes need no extra statement. If it ends before, a lost message is found later: after the next claim,
or when the queue is empty.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from datetime import datetime

from celery_durable.model import Claim
from celery_durable.redispatch import SLACK
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.store.runs import schedule

logger = logging.getLogger("celery_durable.runner")


@dataclass(slots=True)
class _QueueWatermark:
    """``write_at``: the monotonic time before which nothing is written. ``has_row``: the database has this queue."""

    sent_at: datetime
    write_at: float = -math.inf
    has_row: bool = False


class Watermark:
    """The watermark of each queue, as far as this process knows. Threads may share the object."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self._by_queue: dict[str, _QueueWatermark] = {}

    def record_claim(self, claim: Claim) -> None:
        """Raise the watermark to the dispatch message that led to this claim. Database errors are only logged."""
        if claim.sent_at is None:
            return
        watermark = self._by_queue.setdefault(claim.queue, _QueueWatermark(claim.sent_at))
        watermark.sent_at = max(watermark.sent_at, claim.sent_at)
        now = self._runtime.monotonic()
        if now < watermark.write_at:
            return
        # `schedule.record_claimed` does nothing if the row is younger than `SLACK`. The time is set first, so that
        # other threads do not write too.
        watermark.write_at = now + SLACK.total_seconds()
        try:
            self._write(claim.queue, watermark)
        except Exception as exc:  # noqa: BLE001  # the pass does not depend on this write
            logger.info("The watermark of queue %r could not be written: %s", claim.queue, exc)

    def _write(self, queue: str, watermark: _QueueWatermark) -> None:
        sent_at, write = watermark.sent_at, schedule.record_claimed if watermark.has_row else schedule.insert_queue
        self._store.transact_once(lambda tx: write(tx, queue, sent_at=sent_at))
        if not watermark.has_row:
            # `schedule.insert_queue` changes nothing if the row exists: the next claim writes the watermark into it.
            watermark.has_row, watermark.write_at = True, -math.inf
