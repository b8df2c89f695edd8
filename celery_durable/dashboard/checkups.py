"""What `doctor` finds by asking servers, and the lengths of the queues. A thread asks: a page never waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from celery_durable.app import Durable
from celery_durable.doctor import Finding, Level, Servers, check_database, check_servers

_FRESH_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 2.0
logger = logging.getLogger("celery_durable.dashboard")


@dataclass(frozen=True, slots=True)
class Checkup:
    """The findings of one run, ``taken_at`` by the process's clock, in the order in which they should be fixed."""

    taken_at: float
    findings: Sequence[Finding]
    servers: Servers
    queues: Mapping[str, int | None]
    """The length of each queue; None if the broker cannot say."""


class Checkups:
    """The last checkup of this process. A page that finds an old one starts the next."""

    def __init__(self, durable: Durable, *, has_broker: bool = True) -> None:
        self._durable, self.has_broker = durable, has_broker
        self._lock, self._first = threading.Lock(), threading.Event()
        self._is_running = False
        self._last: Checkup | None = None

    def read(self) -> Checkup | None:
        """Return the last checkup; None if the first one takes longer than two seconds."""
        now = self._durable.internals.runtime.monotonic()
        with self._lock:
            is_due = self._last is None or now - self._last.taken_at > _FRESH_SECONDS
            if is_due and not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="durable-dashboard-checkup", daemon=True).start()
        self._first.wait(_FIRST_WAIT_SECONDS)
        return self._last

    def _run(self) -> None:
        findings, servers, queues = list[Finding](), Servers(), dict[str, int | None]()
        try:
            findings += (check_servers if self.has_broker else check_database)(self._durable, servers)
            queues = self._durable.internals.queue_lengths() if self.has_broker else {}
        except Exception as exc:
            logger.exception("The checks of the dashboard failed")
            findings.append(Finding(Level.FAIL, "checks", f"They failed: {exc}", "See the log of this process."))
        self._last = Checkup(self._durable.internals.runtime.monotonic(), findings, servers, queues)
        self._first.set()
        with self._lock:
            self._is_running = False
