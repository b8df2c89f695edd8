"""Keeping claims alive while bodies run: one thread per process renews the leases of all its passes.

Losing a lease costs a repeated body, never a wrong record: the token alone decides what is written.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from celery_durable.errors import Superseded
from celery_durable.model import Claim
from celery_durable.runtime import Runtime
from celery_durable.store import claims
from celery_durable.store.engine import Store

logger = logging.getLogger("celery_durable.runner")


class Lease:
    """A claim, and until when this process may believe in it, on its own steady clock."""

    def __init__(self, claim: Claim, length: timedelta, runtime: Runtime, *, asked_at: float) -> None:
        self.claim, self.length = claim, length
        self.is_lost = False
        self._runtime = runtime
        # Counted from before the question was sent, less a margin: the database's lease lasts longer than ours.
        self._good_for = length.total_seconds() * 0.9
        self._valid_until = asked_at + self._good_for
        self._asked_at = asked_at

    @property
    def now(self) -> datetime:
        """The database's time, as far as our steady clock can tell since the claim; decides nothing (LAW 4)."""
        return self.claim.claimed_at + timedelta(seconds=self._runtime.monotonic() - self._asked_at)

    @property
    def is_valid(self) -> bool:
        return not self.is_lost and self._runtime.monotonic() < self._valid_until

    def renewed(self, *, asked_at: float) -> None:
        self._valid_until = max(self._valid_until, asked_at + self._good_for)

    def check(self, store: Store) -> None:
        """Before a body starts: certain to hold the claim, or Superseded."""
        if self.is_lost:
            raise Superseded(str(self.claim.ref))
        if not self.is_valid:
            asked_at = self._runtime.monotonic()
            store.transact(lambda tx: claims.guard(tx, self.claim, lease=self.length, is_progress=False))
            self.renewed(asked_at=asked_at)


class Keeper:
    """Renews every held lease each third of its length, on a daemon thread that lives as long as there is one."""

    def __init__(self, store: Store, length: timedelta, runtime: Runtime) -> None:
        self._store, self._length, self._runtime = store, length, runtime
        self._begin()

    def _begin(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._is_running = False
        self._pid = os.getpid()

    @contextmanager
    def hold(self, lease: Lease) -> Iterator[Lease]:
        """Keep ``lease`` renewed inside the block."""
        if self._pid != os.getpid():
            self._begin()  # after a fork: neither the thread nor the parent's leases are ours
        with self._lock:
            if not self._is_running:
                # Not on a condition: every pass that begins would end the wait, and be renewed at once.
                self._runtime.repeat(self._length.total_seconds() / 3, self._look, name="durable-leases")
                self._is_running = True
            self._leases[lease.claim.token] = lease
        try:
            yield lease
        finally:
            with self._lock:
                self._leases.pop(lease.claim.token, None)

    def _look(self) -> bool:
        """Renew what is held; False ends the thread: nothing is."""
        with self._lock:
            held = dict(self._leases)
            if not held:
                self._is_running = False
                return False
        self._renew(held)
        return True

    def _renew(self, held: dict[str, Lease]) -> None:
        asked_at = self._runtime.monotonic()
        wanted = [lease.claim for lease in held.values()]
        try:
            found = self._store.transact(lambda tx: claims.renew(tx, wanted, lease=self._length))
        except Exception as exc:  # noqa: BLE001  # the thread must outlive an outage
            logger.warning("The leases of %d instances could not be renewed, trying again: %s", len(held), exc)
            return
        for token, lease in held.items():
            if token in found.renewed:
                lease.renewed(asked_at=asked_at)
            elif token not in found.held:
                lease.is_lost = True
