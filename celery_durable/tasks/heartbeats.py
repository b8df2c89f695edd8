"""Heartbeats: every ten seconds, a dispatcher or a worker writes that it is alive, and its queues and workflows.

A heartbeat is one statement, at best effort. The dispatcher's thread writes it; a worker without a dispatcher has a
thread for it alone. A failure is logged once, and the next heartbeat tries again.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

from celery_durable.model import HEARTBEAT_INTERVAL, SWEEP_TASK, Outage
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.store.faults import describe_fault
from celery_durable.store.time_limits import LOOP
from celery_durable.tasks.fork_safety import ForkSafeThread

logger = logging.getLogger("celery_durable.heartbeat")

_PERIOD_SECONDS = HEARTBEAT_INTERVAL.total_seconds()
_WRITES_PER_CLEANUP = 60


class ProcessHeartbeat(ForkSafeThread):
    """The heartbeat row of this process; the dispatcher's thread writes it, or a thread of its own after `start`.

    There is no row before `register`, and a forked child has to call `register` again.
    ``store`` is called when the first heartbeat is due, so a worker without a usable database starts too.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        runtime: Runtime,
        *,
        queues: Callable[[], Sequence[str]],
        workflows: Callable[[], Sequence[str]],
    ) -> None:
        super().__init__()
        self._store, self._runtime, self._queues, self._workflows = store, runtime, queues, workflows
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._id: str | None = None
        self.is_row_needed = False
        self._kind: Literal["dispatcher", "worker"] = "worker"
        self._pool: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._pid, self._due_at, self._write_count, self._has_row, self._is_failing = (
            os.getpid(),
            -math.inf,
            0,
            False,
            False,
        )
        self._last_check_at, self._next_check_at = -math.inf, math.inf
        self._outages: Sequence[Outage] = ()

    def register(self, kind: Literal["dispatcher", "worker"], node: str, *, pool: str | None = None) -> None:
        """Give this process a row id, for `write_if_due`. A worker that also hosts beat counts as a worker."""
        self._pool = pool or self._pool
        if self._id is not None and self._pid == os.getpid():
            if kind == "worker":
                self._kind, self._node, self._due_at = kind, node, -math.inf
            return
        self._reset()
        self._kind, self._node, self._id = kind, node, self._runtime.new_token()

    @property
    def row_id(self) -> str | None:
        """The id of this process's row; None before `register` and after `remove_row`."""
        return self._id if self._pid == os.getpid() else None

    def start(self) -> None:
        """Write heartbeats on a thread for this alone, until `stop`."""
        self._stop = threading.Event()
        self.reset_fork_lock()
        self._thread = threading.Thread(target=self._loop, args=(self._stop,), name="durable-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Tell the thread to remove the row and end; ``wait``: wait up to five seconds until it has ended."""
        self._stop.set()
        if wait:
            self.join(5)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout)

    def _loop(self, stop: threading.Event) -> None:
        delay = 0.0
        while not stop.wait(delay):
            with self.fork_lock:
                self.write_if_due()
            delay = _PERIOD_SECONDS
        with self.fork_lock:
            self.remove_row()

    def write_if_due(
        self,
        *,
        seconds_since_check: float | None = None,
        seconds_to_next_check: float = math.inf,
        outages: Sequence[Outage] = (),
    ) -> None:
        """Write the heartbeat if it is due; never raises.

        Dispatchers pass the seconds since their last check for due work, and until their next one.
        ``outages``: what keeps the process from its work, with ``since`` by this machine's clock. A change of the
        outages is written at once.
        """
        now = self._runtime.monotonic()
        if _outage_keys(outages) != _outage_keys(self._outages):
            self._due_at = -math.inf
        self._outages = outages
        if seconds_since_check is not None:
            if math.isinf(self._last_check_at):
                self._due_at = -math.inf  # the first sweep of a dispatcher is written at once
            self._last_check_at, self._next_check_at = now - seconds_since_check, now + seconds_to_next_check
        if self._id is None or self._pid != os.getpid() or now < self._due_at:
            return
        self._due_at = now + _PERIOD_SECONDS
        try:
            self._write(self._id, now)
        except Exception as exc:  # noqa: BLE001  # no work may fail because a heartbeat cannot be written
            if not self._is_failing:
                logger.warning("This process cannot write its heartbeat and will retry: %s", describe_fault(exc))
            self._is_failing = True
        else:
            self._is_failing = False

    def _write(self, id_: str, now: float) -> None:
        wall = self._runtime.wall_clock()
        update = heartbeats.HeartbeatUpdate(
            id_,
            self._kind,
            self._node,
            self._pid,
            queues=self._queues() if self._kind == "worker" else (),
            workflows=self._workflows(),
            swept_ago=_duration(now - self._last_check_at),
            wakes_in=_duration(self._next_check_at - now),
            pool=self._pool,
            outages=[(each, max(wall - each.since, timedelta(0))) for each in self._outages],
        )
        self._store().transact_once(lambda tx: heartbeats.upsert(tx, update))
        self._has_row = True
        if update.swept_ago is not None and self._write_count % _WRITES_PER_CLEANUP == 0:
            self._store().transact_once(heartbeats.delete_old)
        self._write_count += 1

    def remove_row(self) -> None:
        """Remove the row when this process ends in good order, unless the last heartbeat failed.

        Does nothing while ``is_row_needed`` is set: a worker that stops still works on the tasks that it holds.
        """
        if self.is_row_needed:
            return
        id_, self._id = self._id, None
        if id_ is None or not self._has_row or self._is_failing or self._pid != os.getpid():
            return
        try:
            self._store().transact_once(lambda tx: heartbeats.delete(tx, id_))
        except Exception as exc:  # noqa: BLE001  # a dispatcher removes the row when it is an hour old
            logger.info("This process cannot delete its heartbeat; a dispatcher will: %s", describe_fault(exc))


class SweepTaskHeartbeat:
    """The heartbeat of the `sweep` task, for a beat that hosts no dispatcher."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self._due_at = -math.inf

    def is_only_sweeper(self) -> bool:
        """Whether no dispatcher sweeps, so that no process remembers when a queue was empty."""
        return not self._store.read(lambda tx: heartbeats.has_recent_sweep(tx, excluding=SWEEP_TASK), timeouts=LOOP)

    def write_if_due(self, node: str) -> None:
        """Write the heartbeat if this process has not just written it; never raises."""
        now = self._runtime.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _PERIOD_SECONDS
        update = heartbeats.HeartbeatUpdate(SWEEP_TASK, "dispatcher", node, os.getpid(), swept_ago=timedelta(0))
        try:
            self._store.transact_once(lambda tx: heartbeats.upsert(tx, update))
        except Exception as exc:  # noqa: BLE001  # the sweep is done whether or not the heartbeat is written
            logger.info("The sweep task cannot write its heartbeat: %s", describe_fault(exc))


def _outage_keys(outages: Sequence[Outage]) -> set[tuple[str, str, str]]:
    return {(each.what, each.where, each.error) for each in outages}


def _duration(seconds: float) -> timedelta | None:
    return None if math.isinf(seconds) else timedelta(seconds=max(0.0, seconds))
