"""The values that a running pass publishes: the newest value of each key, for any client to read.

The engine never reads one, and a failed write never fails a body: the next commit of the pass writes it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import Superseded
from celery_durable.runner.commit_parts import CommitPart, OpenCommit
from celery_durable.runner.environment import Environment
from celery_durable.runner.lease import Lease
from celery_durable.store.engine import Tx
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.runs import claims, outputs

logger = logging.getLogger("celery_durable.runner")

MAX_KEY_LENGTH = 64
_MIN_INTERVAL_SECONDS = 1.0
"""The minimum time between two writes of a key, so that a tight loop causes one write per second."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueVersion:
    """A value as JSON text. Compared by identity: two publications of the same text are two versions."""

    text: str


def encode_published_value(settings: Settings, key: str, value: Any) -> str:
    """Encode a value to publish as JSON text; raises NameInvalid, NotSerializable and PayloadTooLarge."""
    values.check_text_name("Published key", key, MAX_KEY_LENGTH)
    return values.encode(value, what=f"Published value {key!r}", limits=settings.limits)


class PublishedValues(CommitPart):
    """The published values of one pass. The threads of bodies and the thread of the pass share it."""

    def __init__(self, env: Environment, lease: Lease) -> None:
        self._store, self._lease, self._stops_process = env.store, lease, env.stops_process
        self._monotonic = env.runtime.monotonic
        self._lock = threading.Lock()
        """Protects the fields below. It is never held during a database call."""
        self.pending: dict[str, ValueVersion] = {}
        """The values that the next commit writes."""
        self.flushing: dict[str, ValueVersion] = {}
        """The values that the commit that runs now has written."""
        self._last_attempt_at: dict[str, float] = {}

    def publish(self, key: str, text: str) -> None:
        """Write a value now, or keep it pending, if it cannot be written or its key just was; raises Superseded."""
        if self._lease.is_lost:
            raise Superseded(str(self._lease.claim.ref))
        now = self._monotonic()
        with self._lock:
            self.pending[key] = ValueVersion(text)
            last_attempt_at = self._last_attempt_at.get(key)
            if last_attempt_at is not None and now - last_attempt_at < _MIN_INTERVAL_SECONDS:
                return
            # Set even if the write fails: in an outage, a body must not wait for the database at every value.
            self._last_attempt_at[key] = now
        if self._store.is_write_locked_by_step:
            return
        try:
            self._mark_written(self._store.transact_once(self._write))
        except Superseded:
            self._lease.is_lost = True
            raise
        except Exception as exc:
            if self._stops_process(exc):
                raise
            # The error must not become the body's failure.
            why = describe_fault(exc)  # SQLAlchemy's own text would contain the value
            logger.warning("%s could not publish %r, it is tried again: %s", self._lease.claim.ref, key, why)

    def _write(self, tx: Tx) -> dict[str, ValueVersion]:
        claims.guard_without_renewal(tx, self._lease.claim)
        return self._write_pending(tx)

    def write(self, commit: OpenCommit) -> None:
        self.flushing = self._write_pending(commit.tx)

    def mark_flushed(self) -> None:
        """Remove the values that `write` wrote from the pending ones, after their commit has succeeded."""
        self._mark_written(self.flushing)
        self.flushing = {}

    def _write_pending(self, tx: Tx) -> dict[str, ValueVersion]:
        # Copied while the transaction holds the instance's row lock, so the later transaction writes newer values.
        with self._lock:
            pending = dict(self.pending)
        outputs.write_published(tx, self._lease.claim, {key: version.text for key, version in pending.items()})
        return pending

    def _mark_written(self, versions: dict[str, ValueVersion]) -> None:
        if not versions:
            return
        now = self._monotonic()
        with self._lock:
            for key, version in versions.items():
                self._last_attempt_at[key] = now
                # If a body published a newer value during the write, the newer one stays pending.
                if self.pending.get(key) is version:
                    del self.pending[key]
