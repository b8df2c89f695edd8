"""What a pass shows of itself while it goes on: the newest value of each key, for whoever looks.

Best effort, and beside the steps: it is no step, nothing is decided by it, and no body fails because it cannot be
written. What is not written at once is kept, and rides in the next commit of the pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import Superseded
from celery_durable.runner.lease import Lease
from celery_durable.store import claims, published_values
from celery_durable.store.engine import Store, Tx

logger = logging.getLogger("celery_durable.runner")

MAX_KEY_LENGTH = 64
_MIN_INTERVAL_SECONDS = 1.0
"""Between two writes of a key: a tight loop costs one a second."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueVersion:
    """A value, as JSON text. The same one only if it is the same object."""

    text: str


def checked(settings: Settings, key: str, value: Any) -> str:
    """What is to be published, as JSON text; raises NameInvalid, NotSerializable, PayloadTooLarge."""
    values.label("Published key", key, MAX_KEY_LENGTH)
    return values.encode(value, what=f"Published value {key!r}", limits=settings.limits)


class PublishedValues:
    """The values of one pass. Bodies use it from their threads, the pass from its own."""

    def __init__(
        self, store: Store, settings: Settings, lease: Lease, *, is_from_outside: Callable[[BaseException], bool]
    ) -> None:
        self._store, self._settings, self._lease = store, settings, lease
        self._is_from_outside = is_from_outside
        self._lock = threading.Lock()
        """Of the fields below; never held while the database is asked."""
        self._pending: dict[str, ValueVersion] = {}
        self._last_attempt_at: dict[str, float] = {}
        self._flushing: dict[str, ValueVersion] = {}

    @property
    def has_pending(self) -> bool:
        """Whether the next commit has something to take along."""
        return bool(self._pending)

    def checked(self, key: str, value: Any) -> str:
        """``value`` as JSON text; raises NameInvalid, NotSerializable, PayloadTooLarge."""
        return checked(self._settings, key, value)

    def publish(self, key: str, text: str) -> None:
        """Write a value now, or keep it where that was done a moment ago or cannot be done; raises Superseded."""
        if self._lease.is_lost:
            raise Superseded(str(self._lease.claim.ref))
        now = self._store.runtime.monotonic()
        with self._lock:
            self._pending[key] = ValueVersion(text)
            last_attempt_at = self._last_attempt_at.get(key)
            if last_attempt_at is not None and now - last_attempt_at < _MIN_INTERVAL_SECONDS:
                return
            self._last_attempt_at[key] = now  # also of one that fails: who is cut off must not wait for each value
        if self._store.is_held_by_a_step:
            return
        try:
            self._mark_written(self._store.attempt(self._write))
        except Superseded:
            self._lease.is_lost = True
            raise
        except Exception as exc:
            if self._is_from_outside(exc):
                raise
            # Whatever it is, it is not the body's failure.
            why = getattr(exc, "orig", None) or exc  # its whole text shows the value
            logger.warning("%s could not publish %r, it is tried again: %s", self._lease.claim.ref, key, why)

    def _write(self, tx: Tx) -> dict[str, ValueVersion]:
        claims.touch(tx, self._lease.claim)
        return self._write_pending(tx)

    def flush(self, tx: Tx) -> None:
        """Write what is kept in a commit of the pass, behind its guard."""
        if self._pending:
            self._flushing = self._write_pending(tx)

    def flushed(self) -> None:
        """The commit that took values along has happened."""
        self._mark_written(self._flushing)
        self._flushing = {}

    def _write_pending(self, tx: Tx) -> dict[str, ValueVersion]:
        # Looked at under the row's lock: of two transactions, the later one has the newer values.
        with self._lock:
            pending = dict(self._pending)
        published_values.write(tx, self._lease.claim, {key: version.text for key, version in pending.items()})
        return pending

    def _mark_written(self, versions: dict[str, ValueVersion]) -> None:
        if not versions:
            return
        now = self._store.runtime.monotonic()
        with self._lock:
            for key, version in versions.items():
                self._last_attempt_at[key] = now
                if self._pending.get(key) is version:
                    del self._pending[key]
